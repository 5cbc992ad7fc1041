"""The frame that all layer kinds share: h(z, x, u) for a part of a window, in any cut.

- `Layer.forward` is the paper's h: self-attention over [past; window; write tokens], what else the
  kind reads, then, when a window is full, what it writes. A kind says what its past is (`past`,
  and `past_tokens` where it is made of tokens), what else it reads (`recall`, `read`), and what a
  full window leaves behind (`write`).
- A `WindowPart` is at most one window per row. Whole aligned windows are the fast path; in all
  other parts the layer adds to its `OpenWindow`, and rows whose window is not full remember
  nothing.

Shapes: B rows, t tokens of the part (context, then write tokens), W window, S write tokens, M
slots, P past slots, k keys, H heads, E head width, D width, b = 1 or B.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from melodi.config import ModelConfig
from melodi.config.kinds import KINDS
from melodi.layers.transformer import Block, Pairs, Projections, Sight

Zeros = Callable[..., Tensor]
LayerMemory = tuple[Tensor, ...]
"""What one layer carries from window to window: a NamedTuple of tensors, rows first."""
Memory = TypeVar("Memory", bound=LayerMemory)
"""The NamedTuple of one kind."""


class OpenWindow(NamedTuple):
    """What an unfinished window has left in one layer, so that nothing is computed twice."""

    keys_BHkE: Tensor
    values_BHkE: Tensor
    """Of [past; window]: the past as it was when the window opened."""
    kept_BWD: Tensor
    """What the kind needs of every token when the window is full; without width if nothing."""


class Probe:
    """Notes, while a model reads, how much attention each key gets, on average over its queries.

    `shares[layer, source]` has one vector of weights for each part of a window that was read;
    source is "self" or "long-term".
    """

    def __init__(self) -> None:
        self.shares: dict[tuple[int, str], list[Tensor]] = {}

    def note(
        self,
        layer: int,
        source: str,
        q_BHtE: Tensor,
        pairs: Pairs,
        mask: Tensor | None,
    ) -> None:
        logits_BHtk = q_BHtE @ pairs.keys_BHkE.transpose(2, 3)
        if mask is not None:
            logits_BHtk = logits_BHtk + mask
        weights_k = logits_BHtk.softmax(-1).nan_to_num(0).mean((0, 1, 2))
        self.shares.setdefault((layer, source), []).append(weights_k.detach())


@dataclass(frozen=True)
class WindowPart:
    """What all layers need to know of the tokens being read: at most one window per row."""

    all_close: bool
    """Every row fills its window."""
    opens: bool
    """Some row begins a window."""
    closes: bool
    """Some row fills its window: write tokens run, and memory is rewritten."""
    fewest_windows: int
    """Windows read so far by the row that has read least."""
    most_windows: int
    """Windows read so far by the row that has read most."""
    windows_read_B: Tensor
    position_B: Tensor
    """Tokens in the open window before this part."""
    length_B: Tensor
    """Tokens that each row reads now; the rest is padding."""
    full_B: Tensor
    """Rows that fill their window."""
    place: int | None = None
    """Where all rows stand in their open windows, if these may be written to in place."""
    probe: Probe | None = None
    windows_read: tuple[int, ...] = ()
    """As `windows_read_B`, on the host; empty where shapes are static, and for single tokens, of
    which nobody asks it."""

    def commit(self, new: Tensor, old: Tensor) -> Tensor:
        """The new memory in rows that fill their window, the old one in the others."""
        new = new.to(old.dtype)
        return new if self.all_close else where_rows(self.full_B, new, old)

    def put(self, new: Tensor, window: Tensor, dim: int, past: int = 0) -> Tensor:
        """The open window with the part's context tokens in their slots, which lie along `dim`
        behind those of the past."""
        if self.place is not None:
            window.narrow(dim, past + self.place, new.size(dim)).copy_(new)
            return window
        slot_k = torch.arange(window.size(dim), device=new.device) - past
        source_Bk = slot_k - self.position_B[:, None]
        written_Bk = (source_Bk >= 0) & (source_Bk < self.length_B[:, None])
        shape = [size if axis in (0, dim) else 1 for axis, size in enumerate(window.shape)]
        index = source_Bk.clamp(0, new.size(dim) - 1).view(shape)
        moved = new.gather(dim, index.expand_as(window))
        return torch.where(written_Bk.view(shape), moved, window)

    def put_past(self, new: Tensor, window: Tensor) -> Tensor:
        """The open window with a new past, in rows whose window opens."""
        slots = new.size(2)
        if self.place is not None:
            window.narrow(2, 0, slots).copy_(new)
            return window
        past = where_rows(self.position_B == 0, new, window[:, :, :slots])
        return torch.cat([past, window[:, :, slots:]], dim=2)


class Seen(NamedTuple):
    """What a layer has made of a full window, for its kind to write from."""

    past: Pairs
    window: Pairs
    """The context tokens, without the write tokens."""
    kept_BWD: Tensor
    """What `keep` gave for each of them."""
    u_hat_BSD: Tensor
    """The paper's û, the write tokens after the block."""


class Written(NamedTuple, Generic[Memory]):
    """What a full window leaves."""

    memory: Memory
    """For the next window."""
    u_BSD: Tensor | None = None
    """Write tokens for the next layer."""
    extra_loss: Tensor | None = None
    """A loss of the kind's own, beside that of the language model."""


class Stream(NamedTuple):
    """The tokens that run through the stack."""

    x_BtD: Tensor
    """The context."""
    u_BSD: Tensor | None = None
    """Write tokens, behind the context, when some row fills its window."""
    r_BPD: Tensor | None = None
    """Memory tokens, before the context, when some row opens a window; only in kinds whose past is
    made of tokens that run through the whole stack."""


class Output(NamedTuple):
    """What a layer gives on: upward the tokens, rightward what it remembers."""

    stream: Stream
    memory: LayerMemory
    window: OpenWindow | None
    extra_loss: Tensor | None = None


class Layer(nn.Module, Generic[Memory]):
    """One layer of any kind."""

    carries: type[Memory]
    """The NamedTuple of what it remembers, unless `memory_class` says otherwise."""
    sources = 1
    """Attention results that the block projects back."""
    past_is = "past"
    """What the slots before the window are, in words."""
    entries_per_window = 0
    """What a window adds to the kind's FIFO; 0 if it has none."""
    keeps = False
    """The kind keeps one vector of every token of an open window, see `keep`."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        self.past_slots = KINDS[config.layers[index]].past(config)
        self.window, self.width = config.window, config.width
        self.heads = (config.num_heads, config.head_size)
        self.masked = config.answers.empty_memory == "masked"
        self.block = Block(config, self.sources)

    def forward(
        self,
        stream: Stream,
        memory: Memory,
        window: OpenWindow | None,
        part: WindowPart,
        sight: Sight,
    ) -> Output:
        """h(z, x, u): reads a part of a window, and remembers the window where that fills it.

        There is no open window where all rows read whole windows.
        """
        tokens = stream.x_BtD.size(1)
        xu_BtD = self.recall(_joined(stream.x_BtD, stream.u_BSD), memory, part)
        z_BPD = self.past_tokens(memory) if window is None else None
        made = self.block.project(xu_BtD, z_BPD)
        r_BPD, past = stream.r_BPD, None
        if z_BPD is not None:
            pairs, first = made.pairs, self.past_slots
            past, own = pairs.slots(0, first), pairs.slots(first, first + tokens)
        else:
            own, written = made.pairs.split(tokens)
            if part.opens:
                past, r_BPD = self.precede(r_BPD, memory, sight)
            if window is None:
                assert past is not None, "whole windows open windows"
                pairs = past.join(made.pairs)
            else:
                window = self._extended(window, past, own, part)
                pairs = Pairs(window.keys_BHkE, window.values_BHkE)
                past, own = pairs.split(self.past_slots)
                pairs = pairs if stream.u_BSD is None else pairs.join(written)
        if part.probe is not None:
            part.probe.note(self.index, "self", made.q_BHtE, pairs, self.block.mask(sight))

        a_BHtE = self.block.attend(made.q_BHtE, pairs, sight)
        y_BtD = self.block.finish(xu_BtD, *self.read(a_BHtE, made, memory, part))  # Eq. 1
        x_BtD, u_hat_BSD = y_BtD.split([tokens, y_BtD.size(1) - tokens], dim=1)
        kept_BWD = self.keep(x_BtD, made.h_BtD[:, :tokens])
        if window is not None:
            kept_BWD = part.put(kept_BWD, window.kept_BWD, dim=1)
            window = window._replace(kept_BWD=kept_BWD)
        if not part.closes:
            return Output(Stream(x_BtD, None, r_BPD), memory, window)
        seen = Seen(past, own, kept_BWD, u_hat_BSD)
        memory, u_BSD, extra_loss = self.write(seen, memory, part)  # Eq. 2
        u_BSD = None if stream.u_BSD is None else u_BSD
        return Output(Stream(x_BtD, u_BSD, r_BPD), memory, window, extra_loss)

    @classmethod
    def memory_class(cls, config: ModelConfig) -> type[Memory]:
        return cls.carries

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Of each tensor that the kind carries, for one row."""
        raise NotImplementedError

    def empty_memory(self, batch_size: int, zeros: Zeros) -> Memory:
        """What rows carry that have read nothing."""
        tensors = [zeros(batch_size, *size) for size in self.sizes()]
        return named(self.memory_class(self.config), tensors)

    def empty_window(self, batch_size: int, zeros: Zeros) -> OpenWindow:
        """An open window without tokens."""
        pairs = self.pairs_size(self.past_slots + self.window)
        kept = (self.window, self.width if self.keeps else 0)
        return OpenWindow(*[zeros(batch_size, *size) for size in (*pairs, kept)])

    def pairs_size(self, slots: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        heads, head_width = self.heads
        return (heads, slots, head_width), (heads, slots, head_width)

    def begin(
        self, x_BtD: Tensor, table_SD: Tensor | None, memory: Memory, part: WindowPart
    ) -> Stream:
        """Asked of the first layer: the context, and the tokens that run with it. Write tokens
        start every window from one learned table."""
        if table_SD is None or not part.closes:
            return Stream(x_BtD)
        xu_BtD = torch.cat([x_BtD, table_SD.expand(len(x_BtD), -1, -1)], dim=1)
        # Views of one tensor, as between all layers: one compiled graph serves them.
        return Stream(*xu_BtD.split([x_BtD.size(1), len(table_SD)], dim=1))

    def begin_segment(self, memory: Memory, windows: int) -> LayerMemory:
        """The memory in the form in which so many whole windows are read, with a gradient or
        without."""
        return memory

    def end_segment(self, memory: Memory) -> LayerMemory:
        """The memory as it is carried, from that form."""
        return memory

    def past(self, memory: Memory) -> Pairs:
        """Keys and values of the slots that precede the window in self-attention."""
        return Pairs(*[memory[0].new_zeros(len(memory[0]), *size) for size in self.pairs_size(0)])

    def past_tokens(self, memory: Memory) -> Tensor | None:
        """Tokens before the window whose pairs are the past: those of whole windows are projected
        together with them. None where the past is anything else, or nothing."""
        return None

    def precede(
        self, r_BPD: Tensor | None, memory: Memory, sight: Sight
    ) -> tuple[Pairs, Tensor | None]:
        """The past of a window that opens, and the memory tokens for the next layer."""
        return self.past(memory), r_BPD

    def recall(self, xu_BtD: Tensor, memory: Memory, part: WindowPart) -> Tensor:
        """What the residual stream takes from memory before the block."""
        return xu_BtD

    def read(
        self, a_BHtE: Tensor, made: Projections, memory: Memory, part: WindowPart
    ) -> tuple[Tensor, ...]:
        """What else the queries attend to, combined with or put beside self-attention."""
        return (a_BHtE,)

    def keep(self, x_BtD: Tensor, h_BtD: Tensor) -> Tensor:
        """What `write` needs of every token: of its output x, or of h, its input after the norm."""
        return x_BtD[:, :, :0]

    def write(self, seen: Seen, memory: Memory, part: WindowPart) -> Written[Memory]:
        """What a full window leaves, in rows that fill theirs. Without write tokens û is empty."""
        raise NotImplementedError

    def end(self, u_BSD: Tensor, final_norm: nn.Module, memory: Memory, part: WindowPart) -> Memory:
        """Asked of the first layer: what is remembered of the write tokens after the last one."""
        return memory

    def _extended(
        self, window: OpenWindow, past: Pairs | None, own: Pairs, part: WindowPart
    ) -> OpenWindow:
        """The open window with the part's tokens, and with its past where it opens."""
        pairs = Pairs(window.keys_BHkE, window.values_BHkE)
        if past is not None and self.past_slots:
            pairs = Pairs(*map(part.put_past, past, pairs))
        slots = [self.past_slots] * 2
        keys, values = map(part.put, own, pairs, (2, 2), slots)
        return OpenWindow(keys, values, window.kept_BWD)


def named(memory: type[Memory], tensors: Iterable[Tensor]) -> Memory:
    """The NamedTuple with these tensors as its fields."""
    fields: Callable[..., Memory] = memory
    return fields(*tensors)


def where_rows(rows_B: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """In these rows the one, in the others the other."""
    return torch.where(rows_B.view(-1, *[1] * (yes.dim() - 1)), yes, no)


def _joined(x_BtD: Tensor, u_BSD: Tensor | None) -> Tensor:
    return x_BtD if u_BSD is None else torch.cat([x_BtD, u_BSD], dim=1)
