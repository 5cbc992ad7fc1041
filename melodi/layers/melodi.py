"""The paper's h(z, x, u): layers that read a piece of a window and, when it is full, remember it.

- `Layer` is the frame that every kind shares, the baselines too: self-attention over
  [past; window; summary], then what else the kind attends to, then what it remembers.
- `ShortTermLayer` (Sec. 2.2, Fig. 2) rewrites its short-term memory z by token mixers.
- `LongTermLayer` (Sec. 2.3, Fig. 3) adds the queue of compressed pairs, the gate, and M_long.
- A piece is at most one window per row. Whole aligned windows are the fast path; in all other
  pieces the layer adds to its `OpenWindow`, and rows whose window is not full remember nothing.

Shapes: B rows, t tokens of the piece (context, then summary), W window, S short-term = summary
tokens, L long-term tokens, Q windows, M slots, P past slots, k keys, O mixer outputs, H heads,
E head width, D width, b = 1 or B.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from melodi.config import ModelConfig
from melodi.layers.transformer import Block, RMSNorm, attend, randomise
from melodi.memory import LongTermMemory, LongTermTokenMemory, OpenWindow, ShortTermMemory, push

GATE_START = 0.2
"""The share of long-term attention before training, where the gate is per head."""

Zeros = Callable[..., Tensor]


@dataclass(frozen=True)
class Piece:
    """What all layers need to know of the tokens being read: at most one window per row."""

    whole: bool
    """Every row reads exactly one whole window."""
    opens: bool
    """Some row begins a window."""
    closes: bool
    """Some row fills its window: summary tokens run, and memory is rewritten."""
    fewest_windows: int
    """Windows read so far by the row that has read least."""
    most_windows: int
    """Windows read so far by the row that has read most."""
    windows_B: Tensor
    position_B: Tensor
    """Tokens in the open window before this piece."""
    length_B: Tensor
    """Tokens that each row reads now; the rest is padding."""
    full_B: Tensor
    """Rows that fill their window."""
    visible_b1tk: Tensor
    """Which queries [context; summary] see which keys [past; window; summary]."""

    def commit(self, new: Tensor, old: Tensor) -> Tensor:
        """The new memory in rows that fill their window, the old one in the others."""
        new = new.to(old.dtype)
        return new if self.whole else _where(self.full_B, new, old)

    def append(self, queue: Tensor, new: Tensor, dim: int) -> Tensor:
        """The queue with the entries of a window that is full; as it was in the other rows."""
        return self.commit(push(queue, new, dim), queue)

    def add_to_window(self, new_BHtE: Tensor, window_BHWE: Tensor) -> Tensor:
        """Writes the piece's context tokens into their slots of the open window."""
        slot_W = torch.arange(window_BHWE.size(2), device=new_BHtE.device)
        source_BW = slot_W - self.position_B[:, None]
        written_BW = (source_BW >= 0) & (source_BW < self.length_B[:, None])
        index_BW = source_BW.clamp(0, new_BHtE.size(2) - 1)
        moved_BHWE = new_BHtE.gather(2, index_BW[:, None, :, None].expand_as(window_BHWE))
        return torch.where(written_BW[:, None, :, None], moved_BHWE, window_BHWE)

    def rows_of(self, table_WO: Tensor, tokens: int) -> Tensor:
        """The table's rows at the piece's places in the window; zero for padding."""
        offset_t = torch.arange(tokens, device=table_WO.device)
        index_Bt = (self.position_B[:, None] + offset_t).clamp(max=len(table_WO) - 1)
        return table_WO[index_Bt] * (offset_t < self.length_B[:, None])[:, :, None]


class Pairs(NamedTuple):
    keys_BHkE: Tensor
    values_BHkE: Tensor


class Seen(NamedTuple):
    """What a layer's self-attention was made of."""

    h_BtD: Tensor
    q_BHtE: Tensor
    past: Pairs
    window: Pairs


class Layer(nn.Module):
    """One layer of any kind. Subclasses say what of the past they see, consult and remember."""

    sources = 1
    """Attention results that the block projects back."""

    def __init__(self, config: ModelConfig, past_slots: int) -> None:
        super().__init__()
        self.past_slots = past_slots
        self.skipped_slots = config.past_slots - past_slots
        self.window = config.window
        self.heads = (config.num_heads, config.head_size)
        self.masked = config.rules.empty_memory == "masked"
        self.block = Block(config, self.sources)

    def forward(
        self,
        x_BtD: Tensor,
        u_BSD: Tensor | None,
        memory: Any,
        window: OpenWindow | None,
        piece: Piece,
        bias_bHtk: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Any, OpenWindow | None]:
        """x, u, memory, open window in; the same out. There is no open window in whole pieces."""
        tokens = x_BtD.size(1)
        xu_BtD = x_BtD if u_BSD is None else torch.cat([x_BtD, u_BSD], dim=1)
        h_BtD = self.block.normed(xu_BtD)
        q_BHtE = self.block.queries(h_BtD)
        k_BHtE, v_BHtE = self.block.keys_values(h_BtD)
        past = self.past(memory, window, piece)
        own = Pairs(k_BHtE[:, :, :tokens], v_BHtE[:, :, :tokens])
        if window is not None:
            own = Pairs(
                piece.add_to_window(own.keys_BHkE, window.keys_BHWE),
                piece.add_to_window(own.values_BHkE, window.values_BHWE),
            )
        seen = Seen(h_BtD, q_BHtE, past, own)

        k_BHkE = torch.cat([past.keys_BHkE, own.keys_BHkE, k_BHtE[:, :, tokens:]], dim=2)
        v_BHkE = torch.cat([past.values_BHkE, own.values_BHkE, v_BHtE[:, :, tokens:]], dim=2)
        queries = slice(xu_BtD.size(1))
        keys = slice(self.skipped_slots, self.skipped_slots + k_BHkE.size(2))
        a_BHtE = self.block.self_attention(
            q_BHtE,
            k_BHkE,
            v_BHkE,
            None if bias_bHtk is None else bias_bHtk[..., queries, keys],
            piece.visible_b1tk[..., queries, keys],
        )

        y_BtD = self.block.finish(xu_BtD, *self.cross_attend(a_BHtE, seen, memory, piece))
        x_BtD, u_BSD = y_BtD[:, :tokens], None if u_BSD is None else y_BtD[:, tokens:]
        if window is not None:
            window = window._replace(keys_BHWE=own.keys_BHkE, values_BHWE=own.values_BHkE)
        return x_BtD, *self.remember(x_BtD, u_BSD, seen, memory, window, piece)

    def empty_memory(self, batch_size: int, zeros: Zeros) -> Any:
        raise NotImplementedError

    def empty_window(self, batch_size: int, zeros: Zeros) -> OpenWindow:
        """An open window without tokens."""
        past = self.empty_pairs(batch_size, 0, zeros)
        own = self.empty_pairs(batch_size, self.window, zeros)
        return OpenWindow(*past, *own, zeros(batch_size, 0, 0))

    def empty_pairs(self, batch_size: int, slots: int, zeros: Zeros) -> Pairs:
        heads, head_width = self.heads
        size = (batch_size, heads, slots, head_width)
        return Pairs(zeros(*size), zeros(*size))

    def past(self, memory: Any, window: OpenWindow | None, piece: Piece) -> Pairs:
        """Keys and values of the slots that precede the window in self-attention."""
        raise NotImplementedError

    def cross_attend(
        self, a_BHtE: Tensor, seen: Seen, memory: Any, piece: Piece
    ) -> tuple[Tensor, ...]:
        """What else the queries attend to, combined with or put beside self-attention."""
        return (a_BHtE,)

    def remember(
        self,
        x_BtD: Tensor,
        u_BSD: Tensor | None,
        seen: Seen,
        memory: Any,
        window: OpenWindow | None,
        piece: Piece,
    ) -> tuple[Tensor | None, Any, OpenWindow | None]:
        """Summary tokens for the next layer, memory for the next window, and the open window."""
        raise NotImplementedError


class ShortTermLayer(Layer):
    """z', x', u' = h(z, x, u): short-term memory, rewritten by the summary of every window.

    With `remembers=False` it has no z and no M_right, but still hands on u (the paper's Fig. 7); in
    a stack without summary tokens it is then an ordinary transformer layer.
    """

    def __init__(self, config: ModelConfig, index: int, remembers: bool = True) -> None:
        super().__init__(config, config.short_term_tokens if remembers else 0)
        self.remembers = remembers
        self.width = config.width
        residual = config.rules.mixer == "residual"
        self.mixers: dict[str, TokenMixer] = nn.ModuleDict()  # type: ignore[assignment]
        if config.branching and index < config.last_summary_layer:
            self.mixers["up"] = TokenMixer(config, config.short_term_tokens, residual, residual)
        if config.branching and remembers:
            self.mixers["right"] = TokenMixer(config, config.short_term_tokens, residual, residual)

    def empty_memory(self, batch_size: int, zeros: Zeros) -> Any:
        return ShortTermMemory(zeros(batch_size, self.past_slots, self.width))

    def empty_window(self, batch_size: int, zeros: Zeros) -> OpenWindow:
        past = self.empty_pairs(batch_size, self.past_slots, zeros)
        window = super().empty_window(batch_size, zeros)
        return window._replace(
            past_keys_BHPE=past.keys_BHkE,
            past_values_BHPE=past.values_BHkE,
            sums_BOD=zeros(batch_size, sum(self._outputs()), self.width),
        )

    def past(self, memory: Any, window: OpenWindow | None, piece: Piece) -> Pairs:
        """Short-term memory, projected when a window opens and kept while it is open."""
        if window is None:
            return self._project(memory.z_BSD)
        kept = Pairs(window.past_keys_BHPE, window.past_values_BHPE)
        if not piece.opens:
            return kept
        opens_B = piece.position_B == 0
        new = self._project(memory.z_BSD)
        return Pairs(*[_where(opens_B, a, b) for a, b in zip(new, kept, strict=True)])

    def remember(
        self,
        x_BtD: Tensor,
        u_BSD: Tensor | None,
        seen: Seen,
        memory: Any,
        window: OpenWindow | None,
        piece: Piece,
    ) -> tuple[Tensor | None, Any, OpenWindow | None]:
        sums = {name: mixer.sum_context(x_BtD, piece) for name, mixer in self.mixers.items()}
        if window is not None:
            before = window.sums_BOD.split(self._outputs(), dim=1)
            sums = {name: a + b for (name, a), b in zip(sums.items(), before, strict=True)}
            nothing_B0D = window.sums_BOD[:, :0]  # for layers without mixers
            after_BOD = torch.cat([*sums.values(), nothing_B0D], dim=1)
            window = window._replace(
                past_keys_BHPE=seen.past.keys_BHkE,
                past_values_BHPE=seen.past.values_BHkE,
                sums_BOD=after_BOD.masked_fill(piece.full_B[:, None, None], 0),
            )
        if u_BSD is not None:
            u_BSD, memory = self.compress(sums, u_BSD, memory, piece)
        return u_BSD, memory, window

    def compress(
        self, sums: dict[str, Tensor], u_BSD: Tensor, memory: Any, piece: Piece
    ) -> tuple[Tensor, Any]:
        """Summary branching: M_up to the next layer, M_right to the next window."""
        if self.remembers:
            z_BSD = self._branch("right", sums, u_BSD)
            memory = memory._replace(z_BSD=piece.commit(z_BSD, memory.z_BSD))
        return self._branch("up", sums, u_BSD), memory

    def _branch(self, name: str, sums: dict[str, Tensor], u_BSD: Tensor) -> Tensor:
        """Without branching, and where nothing is above, the summary goes on as it is."""
        return self.mixers[name](sums[name], u_BSD) if name in self.mixers else u_BSD

    def _outputs(self) -> list[int]:
        return [mixer.outputs for mixer in self.mixers.values()]

    def _project(self, tokens_BMD: Tensor) -> Pairs:
        return Pairs(*self.block.keys_values(self.block.normed(tokens_BMD)))


class LongTermLayer(ShortTermLayer):
    """A short-term layer that also reads, and adds to, a queue of compressed key-value pairs."""

    def __init__(self, config: ModelConfig, index: int, remembers: bool = True) -> None:
        super().__init__(config, index, remembers)
        self.copies = config.copy_short_to_long
        self.stores_pairs = config.rules.long_term_store == "pairs"
        self.tokens = config.long_term_tokens
        self.slots = config.long_term_tokens * config.long_term_windows
        self.gate = Gate(config, per_channel=config.rules.gate == "channel")
        if not self.copies:
            biased = config.rules.mixer == "residual"
            self.mixers["long"] = TokenMixer(config, self.tokens, bias=biased, residual=False)

    def empty_memory(self, batch_size: int, zeros: Zeros) -> Any:
        z_BSD = zeros(batch_size, self.past_slots, self.width)
        if not self.stores_pairs:
            return LongTermTokenMemory(z_BSD, zeros(batch_size, self.slots, self.width))
        return LongTermMemory(z_BSD, *self.empty_pairs(batch_size, self.slots, zeros))

    def cross_attend(
        self, a_BHtE: Tensor, seen: Seen, memory: Any, piece: Piece
    ) -> tuple[Tensor, ...]:
        part = filled_slots(piece, self.slots, self.tokens, self.masked)
        if part.slots == 0:
            return (a_BHtE,)
        if self.stores_pairs:
            pairs = Pairs(
                memory.keys_BHME[:, :, -part.slots :], memory.values_BHME[:, :, -part.slots :]
            )
        else:
            pairs = self._project(memory.tokens_BMD[:, -part.slots :])
        long_BHtE = attend(
            seen.q_BHtE, *pairs, visible=part.visible_B11M, dropout=self.block.drop_rate
        )
        return (self.gate(a_BHtE, long_BHtE, part.empty_B),)

    def compress(
        self, sums: dict[str, Tensor], u_BSD: Tensor, memory: Any, piece: Piece
    ) -> tuple[Tensor, Any]:
        up_BSD, memory = super().compress(sums, u_BSD, memory, piece)
        m_BLD = memory.z_BSD if self.copies else self.mixers["long"](sums["long"], u_BSD)
        if not self.stores_pairs:
            tokens_BMD = piece.append(memory.tokens_BMD, m_BLD, dim=1)
            return up_BSD, memory._replace(tokens_BMD=tokens_BMD)
        new = self._project(m_BLD)
        return up_BSD, memory._replace(
            keys_BHME=piece.append(memory.keys_BHME, new.keys_BHkE, dim=2),
            values_BHME=piece.append(memory.values_BHME, new.values_BHkE, dim=2),
        )


class TokenMixer(nn.Module):
    """A linear map over the token axis, the same for every channel: (W + S) tokens to O tokens.

    Its sum over the context can be taken piece by piece; the summary is added when the window is
    full. `residual` normalises both inputs and adds the summary itself.
    """

    def __init__(self, config: ModelConfig, outputs: int, bias: bool, residual: bool) -> None:
        super().__init__()
        inputs = config.window + config.short_term_tokens
        self.window, self.outputs = config.window, outputs
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        randomise(self.weight, inputs**-0.5)
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.context_norm = RMSNorm(config.width) if residual else None
        self.summary_norm = RMSNorm(config.width) if residual else None

    def sum_context(self, x_BtD: Tensor, piece: Piece) -> Tensor:
        if self.context_norm is not None:
            x_BtD = self.context_norm(x_BtD)
        weight_WO = self.weight[: self.window]
        if piece.whole:
            return weight_WO.T @ x_BtD
        return piece.rows_of(weight_WO, x_BtD.size(1)).transpose(1, 2) @ x_BtD

    def forward(self, context_BOD: Tensor, u_BSD: Tensor) -> Tensor:
        normed_BSD = u_BSD if self.summary_norm is None else self.summary_norm(u_BSD)
        mixed_BOD = context_BOD + self.weight[self.window :].T @ normed_BSD
        if self.bias is not None:
            mixed_BOD = mixed_BOD + self.bias[:, None]
        return mixed_BOD if self.summary_norm is None else mixed_BOD + u_BSD


class Gate(nn.Module):
    """A = α·A_long + (1 - α)·A_self: α = σ(logit) per head, or 1 - σ(logit) per channel."""

    roles: ClassVar[dict[str, str]] = {"logit": "gates"}

    def __init__(self, config: ModelConfig, per_channel: bool) -> None:
        super().__init__()
        self.per_channel = per_channel
        if per_channel:
            self.logit = nn.Parameter(torch.empty(config.num_heads, config.head_size))
            randomise(self.logit, 0.25)
        else:
            start = math.log(GATE_START / (1 - GATE_START))
            self.logit = nn.Parameter(torch.full((config.num_heads,), start))

    def alpha(self) -> Tensor:
        """How much of the result comes from long-term memory; (H, 1, E or 1)."""
        if self.per_channel:
            return torch.sigmoid(-self.logit)[:, None, :]
        return torch.sigmoid(self.logit)[:, None, None]

    def forward(self, self_BHtE: Tensor, long_BHtE: Tensor, empty_B: Tensor | None) -> Tensor:
        alpha = self.alpha()
        if empty_B is not None:
            alpha = alpha.masked_fill(empty_B[:, None, None, None], 0)
        return self_BHtE + alpha * (long_BHtE - self_BHtE)


class FilledSlots(NamedTuple):
    """The part of a queue worth reading."""

    slots: int
    """How many slots, from the newest, hold something in at least one row."""
    visible_B11M: Tensor | None
    """Which of them hold something; None where all do. An empty row sees all of its zeros."""
    empty_B: Tensor | None
    """Rows that remember nothing; None where there are none."""


def filled_slots(piece: Piece, slots: int, per_window: int, masked: bool) -> FilledSlots:
    """Which slots of a queue to read when every window has pushed `per_window` entries."""
    if not masked:
        return FilledSlots(slots, None, None)
    count = min(piece.most_windows * per_window, slots)
    if piece.fewest_windows * per_window >= count:
        return FilledSlots(count, None, None)
    empty_B = piece.windows_B == 0
    visible_B11M = written_slots(piece, count, per_window) | empty_B[:, None, None, None]
    return FilledSlots(count, visible_B11M, empty_B)


def written_slots(piece: Piece, slots: int, per_window: int) -> Tensor:
    """Which of the newest slots of a queue have been written, (B, 1, 1, M)."""
    first_B = slots - piece.windows_B * per_window
    slot_M = torch.arange(slots, device=first_B.device)
    return (slot_M >= first_B[:, None])[:, None, None, :]


def _where(rows_B: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(rows_B.view(-1, *[1] * (yes.dim() - 1)), yes, no)
