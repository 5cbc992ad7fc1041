"""LanguageModel: reads tokens window by window and carries what it remembers in a MemoryState.

- `model(tokens, state) -> (logits, state)` for any number of tokens; the same logits however the
  stream is cut. `model.loss` is the same reading without holding all logits.
- `_read` is the recurrence over windows, `_window` one window through the stack of layers. Where
  rows stand in their windows is reading.py's business, who sees what sights.py's, what is refused
  boundary.py's.
- Input and output embedding are one table; write tokens start every window from another.

Shapes: B rows, T tokens, t tokens of a turn, S write tokens, D width, V vocabulary.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from melodi import boundary
from melodi.config import ModelConfig
from melodi.config.kinds import KINDS
from melodi.decoding import Decoder
from melodi.layers import make_layer
from melodi.layers.frame import Layer, LayerMemory, OpenWindow, Probe, WindowPart
from melodi.layers.nats import linear_nats
from melodi.layers.token import is_bare, is_watched
from melodi.layers.transformer import RelativePositionBias, RMSNorm, Sight, randomise
from melodi.memory import Fingerprint, Maker, MemoryState
from melodi.reading import Handover, Opening, RaggedRows, Turn, counters, inside, turns
from melodi.sharded import gather
from melodi.sights import alike, sights, token_sights
from melodi.threads import side_by_side, worker_count


class Scored(NamedTuple):
    """What reading towards targets gives."""

    nats_BT: Tensor
    """Of each target, zero where it is -1."""
    state: MemoryState
    extra_loss: Tensor | None
    """A loss of the layer kinds' own, per window, beside that of the language model."""


class Window(NamedTuple):
    """What the stack makes of one turn."""

    x_BtD: Tensor
    memory: tuple[LayerMemory, ...]
    opened: tuple[OpenWindow, ...] | None
    extra_loss: Tensor | None


class LanguageModel(nn.Module):
    tokenizer: Any = None
    """Set by `load`: the tokenizer that the model was trained with."""
    roles: ClassVar = {"summary": "embeddings", "memory": "embeddings"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_windows = False
        """Keep only what windows carry, and compute the rest again in the backward pass."""
        self.static_shapes = False
        """Read whole queues, full or not, so that compiled layers see one shape."""
        unit = config.answers.embedding == "unit"
        self.input_scale = 1.0 if unit else math.sqrt(config.width)
        self.output_scale = 1 / math.sqrt(config.width) if unit else 1.0
        self.embedding = Embedding(config.vocab_size, config.width, std=1 / self.input_scale)
        self.last_writing_layer = config.last_writing_layer
        self.table = config.table
        if self.table is not None:
            table_SD = nn.Parameter(torch.empty(config.write_tokens, config.width))
            randomise(table_SD, 0.25)
            self.register_parameter(self.table, table_SD)
        biased = [i for i, kind in enumerate(config.layers) if KINDS[kind].biased(config)]
        self.position_bias = RelativePositionBias(config, biased)
        self.layers = nn.ModuleList(make_layer(config, i) for i in range(len(config.layers)))
        self.final_norm = RMSNorm(config.width)

    def forward(
        self,
        tokens_BT: Tensor,
        state: MemoryState,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> tuple[Tensor, MemoryState]:
        """Logits for the token after each token, and the memory after the last.

        `lengths` gives the number of real tokens per row; the rest is padding at the right, which
        is not read, and whose logits are zero.
        """
        x_BTD, state, _ = self.hidden(tokens_BT, state, lengths)
        return self.logits(x_BTD), state

    def hidden(
        self,
        tokens_BT: Tensor,
        state: MemoryState,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> tuple[Tensor, MemoryState, Tensor | None]:
        """As `forward`, with the vectors that `logits` takes, and the layer kinds' own losses."""
        lengths_B = boundary.checked_lengths(tokens_BT, lengths)
        tokens_BT = self._checked(tokens_BT, state, lengths_B)
        return self._read(tokens_BT, state, lengths_B)

    def logits(self, x_BTD: Tensor) -> Tensor:
        logits_BTV = F.linear(x_BTD, self.embedding.weight)
        return logits_BTV if self.output_scale == 1.0 else logits_BTV * self.output_scale

    def loss(
        self, tokens_BT: Tensor, targets_BT: Tensor, state: MemoryState
    ) -> tuple[Tensor, MemoryState]:
        """Mean nats per target, with a gradient plus what layers have of losses of their own; and
        the memory after the last token.

        Nothing is shifted: the target of a token is the token after it, and -1 where there is none.
        """
        scored = self.nats(tokens_BT, targets_BT, state)
        loss = scored.nats_BT.sum() / (targets_BT >= 0).sum().clamp(min=1)
        return loss if scored.extra_loss is None else loss + scored.extra_loss, scored.state

    def nats(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        state: MemoryState,
        probe: Probe | None = None,
    ) -> Scored:
        """Nats of each target. Few logits exist at the same time."""
        tokens_BT = self._checked(tokens_BT, state)
        targets_BT = boundary.checked_targets(tokens_BT, targets_BT, self.config)
        x_BTD, state, extra_loss = self._read(tokens_BT, state, probe=probe)
        nats_n = linear_nats(
            x_BTD.flatten(0, 1), self.embedding.weight, targets_BT.flatten(), self.output_scale
        )
        return Scored(nats_n.view_as(targets_BT), state, extra_loss)

    def empty_state(self, batch_size: int) -> MemoryState:
        """The memory of rows that have read nothing."""
        boundary.check_batch_size(batch_size)
        return MemoryState(
            config=self.config,
            owner=Maker(self),
            windows_B=torch.zeros(batch_size, dtype=torch.long, device="cpu"),
            open_B=torch.zeros(batch_size, dtype=torch.long, device="cpu"),
            layers=tuple(layer.empty_memory(batch_size, self._zeros) for layer in self.stack),
        )

    def check_owner(self, state: MemoryState) -> None:
        """Refuses the memory of another model."""
        if not state.made_by(self):
            like = replace(self.empty_state(1), open_window=self._empty_windows(1))
            boundary.check_owner(state, self.fingerprint(), like)

    def decodes(self) -> bool:
        """Whether its parts are such that a Decoder can read single tokens."""
        ends = (self.embedding, self.final_norm)
        seem = tuple(map(type, ends)) == (Embedding, RMSNorm)
        return seem and not any(map(is_watched, ends)) and all(map(is_bare, self.stack))

    def fingerprint(self) -> Fingerprint:
        """Digests of the architecture and of the weights as they are now."""
        if self.embedding.weight.is_meta:
            return Fingerprint(self.config.digest(), "")
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode())
            # Sharded: every process must ask at the same time.
            whole = gather(tensor).cpu().contiguous().view(-1)
            digest.update(whole.view(torch.uint8).numpy().data)
        return Fingerprint(self.config.digest(), digest.hexdigest())

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def stack(self) -> list[Layer[LayerMemory]]:
        """The layers, bottom first."""
        return cast(list[Layer[LayerMemory]], list(self.layers))

    @property
    def table_SD(self) -> Tensor | None:
        """The learned tokens that write tokens start from."""
        return None if self.table is None else getattr(self, self.table)

    def _read(
        self,
        tokens_BT: Tensor,
        state: MemoryState,
        lengths_B: Tensor | None = None,
        probe: Probe | None = None,
    ) -> tuple[Tensor, MemoryState, Tensor | None]:
        """The recurrence over windows k = 1, 2, …: the final hidden vectors, the memory after the
        last, and the layers' own losses."""
        in_place = not torch.is_grad_enabled()
        one = lengths_B is None and probe is None and tokens_BT.size(1) == 1
        if in_place and one and inside(state) is not None and self.is_plain() and self.decodes():
            token = Decoder(self)(tokens_BT, state)
            if token is not None:
                return *token, None
        if lengths_B is None:
            lengths_B = torch.full_like(state.open_B, tokens_BT.size(1))
        run: Callable[..., Window] = self._window
        if self.checkpoint_windows and not in_place:  # only the edges of windows are kept
            run = functools.partial(checkpoint, self._window, use_reentrant=False)
        rows = RaggedRows(tokens_BT, self._zeros(state.batch_size, 0, self.config.width))
        memory, opening = state.layers, Opening(state, in_place)
        growing = probe is None and self._grows(state, lengths_B)
        if growing:
            windows = int(lengths_B[0]) // self.config.window
            memory = tuple(
                layer.begin_segment(m, windows) for layer, m in zip(self.stack, memory, strict=True)
            )
        plan, extra_losses = list(turns(state, lengths_B)), []
        known: dict[tuple[object, ...], tuple[Sight, ...]] = {}
        windows_B, open_B = plan[-1].next_counters() if plan else (state.windows_B, state.open_B)
        if growing and in_place and self._overlaps():
            memory, plan = self._overlapping(plan, memory, rows, known), []
        placed = counters(plan, self.embedding.weight.device)
        for turn, counters_4B in zip(plan, placed, strict=True):
            part = turn.part(counters_4B, self.static_shapes, in_place, probe)
            opened = opening.before(turn, self._empty_windows)
            seen = self._sights(turn, known, masked=probe is not None)
            window = run(rows.tokens(turn), memory, opened, part, seen)
            memory = window.memory
            opening.after(turn, window.opened)
            rows.add(window.x_BtD, turn)
            if window.extra_loss is not None:
                extra_losses.append(window.extra_loss)
        if growing:
            memory = tuple(
                layer.end_segment(m) for layer, m in zip(self.stack, memory, strict=True)
            )
        state = MemoryState(
            self.config, Maker(self), windows_B, open_B, memory, opening.windows, opening.fill
        )
        x_BTD = F.dropout(self.final_norm(rows.joined()), self.config.dropout, self.training)
        return x_BTD, state, torch.stack(extra_losses).mean() if extra_losses else None

    def _grows(self, state: MemoryState, lengths_B: Tensor) -> bool:
        """Whether all rows read whole windows: then queues take another form. With a gradient it is
        that of layers/growing.py, on the CPU; without, that of layers/fifo.py, if there are several
        windows."""
        window = self.config.window
        whole = not bool((state.open_B + lengths_B % window).any())
        if self.static_shapes or not whole or not bool((lengths_B == lengths_B[0]).all()):
            return False
        if not torch.is_grad_enabled():
            return int(lengths_B[0]) > window
        on_cpu = self.embedding.weight.device.type == "cpu"
        return on_cpu and not (self.training and self.config.dropout)

    def _overlaps(self) -> bool:
        """Whether several windows can be on their way through the stack, in threads of their own:
        on a CPU, where no memory goes from the last layer to the first, nothing is random, and no
        layer is adapted, sharded, or watched by hooks."""
        return (
            worker_count() > 1
            and self.embedding.weight.device.type == "cpu"
            and type(self.stack[0]).end is Layer.end
            and not (self.training and self.config.dropout)
            and all(map(is_bare, self.stack))
            and not any(map(is_watched, self.modules()))
        )

    def _overlapping(
        self,
        plan: Sequence[Turn],
        memory: Sequence[LayerMemory],
        rows: RaggedRows,
        known: dict[tuple[object, ...], tuple[Sight, ...]],
    ) -> tuple[LayerMemory, ...]:
        """Whole windows, read without a gradient: layer l of window k needs layer l - 1 of its own
        window, and what layer l remembers of window k - 1. So each window follows the one before it
        through the stack, a layer or more behind. Gives the memory after the last."""
        steps: list[tuple[Turn, WindowPart, tuple[Sight, ...], Handover]] = []
        for turn, counters_4B in zip(plan, counters(plan, torch.device("cpu")), strict=True):
            part, left = turn.part(counters_4B, in_place=True), Handover(memory)
            steps.append((turn, part, self._sights(turn, known, masked=False), left))
            memory = left

        def read(step: tuple[Turn, WindowPart, tuple[Sight, ...], Handover]) -> Tensor:
            turn, part, seen, left = step
            with left.failing():
                return self._window(rows.tokens(turn), left.before, None, part, seen, left).x_BtD

        for turn, x_BtD in zip(plan, side_by_side(read, steps), strict=True):
            rows.add(x_BtD, turn)
        return tuple(memory)

    def is_plain(self) -> bool:
        """Without autocast, static shapes and dropout, which layers/token.py cannot do."""
        weight = self.embedding.weight
        return not (
            (not weight.is_meta and torch.is_autocast_enabled(weight.device.type))
            or self.static_shapes
            or (self.training and self.config.dropout)
        )

    def _sights(
        self, turn: Turn, known: dict[tuple[object, ...], tuple[Sight, ...]], masked: bool
    ) -> tuple[Sight, ...]:
        """Who sees what in this turn; built once for those that are alike. Single tokens need no
        mask, unless one is asked for."""
        if not self.static_shapes and not masked:
            place, windows = turn.token_place, turn.windows_read_B.tolist()
            if place is not None:
                of_token = token_sights(self.config, self.position_bias, place, windows)
                if of_token is not None:
                    return of_token
        key = alike(self.config, turn)
        if key not in known:
            device = self.embedding.weight.device
            known[key] = sights(self.config, self.position_bias, turn, device, self.static_shapes)
        return known[key]

    def _window(
        self,
        tokens_Bt: Tensor,
        memory: Sequence[LayerMemory],
        opened: tuple[OpenWindow, ...] | None,
        part: WindowPart,
        sights: tuple[Sight, ...],
        left: Handover | None = None,
    ) -> Window:
        """One window, or a part of one, through the stack: layer l = 1, 2, …

        Write tokens run only when a window is full, and up to the last layer that needs them. What
        layers remember is handed on at once to whoever waits for it.
        """
        first, stack = self.stack[0], self.stack
        x_BtD = self.embedding(tokens_Bt) * self.input_scale
        stream = first.begin(x_BtD, self.table_SD, memory[0], part)
        memories, windows, extra_loss, u_BSD = [], [], None, None
        for i, layer in enumerate(stack):
            window = None if opened is None else opened[i]
            output = layer(stream, memory[i], window, part, sights[i])
            stream = output.stream
            if i == self.last_writing_layer:
                u_BSD, stream = stream.u_BSD, stream._replace(u_BSD=None)
            memories.append(output.memory)
            if left is not None:
                left.append(output.memory)
            windows.append(output.window)
            if output.extra_loss is not None:
                extra_loss = output.extra_loss + (0 if extra_loss is None else extra_loss)
        if u_BSD is not None:
            memories[0] = first.end(u_BSD, self.final_norm, memories[0], part)
        opened = None if opened is None else tuple(windows)
        return Window(stream.x_BtD, tuple(memories), opened, extra_loss)

    def _zeros(self, *size: int) -> Tensor:
        weight = self.embedding.weight
        return torch.zeros(size, device=weight.device, dtype=weight.dtype)

    def _empty_windows(self, batch_size: int) -> tuple[OpenWindow, ...]:
        return tuple(layer.empty_window(batch_size, self._zeros) for layer in self.stack)

    def _checked(
        self, tokens_BT: Tensor, state: MemoryState, lengths_B: Tensor | None = None
    ) -> Tensor:
        weight = self.embedding.weight
        tokens_BT = boundary.checked_tokens(tokens_BT, state, lengths_B, self.config, weight)
        self.check_owner(state)
        return tokens_BT


class Embedding(nn.Embedding):
    roles: ClassVar = {"weight": "embeddings"}

    def __init__(self, vocab_size: int, width: int, std: float) -> None:
        self.std = std
        super().__init__(vocab_size, width)

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=self.std)
