"""Melodi's own layers: short-term memory (Sec. 2.2, Fig. 2), long-term memory (Sec. 2.3, Fig. 3).

- `ShortTermLayer` rewrites its short-term memory z at the end of every window: x and û of the full
  window are mixed into u for the next layer and z for the next window (Eq. 2, `branch`).
- `LongTermLayer` also reads a FIFO of compressed key-value pairs through a gate, and adds L pairs,
  those of M_long(x, û), to it.

Shapes as in frame.py; S short-term = summary tokens, L long-term tokens, M = L·Q slots of the FIFO.
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from melodi.config import ModelConfig
from melodi.layers.fifo import append, filled_slots, newest, push_into_room, with_room
from melodi.layers.frame import Layer, Seen, WindowPart, Written
from melodi.layers.gate import Gate
from melodi.layers.growing import attend_filled, begun, pushed
from melodi.layers.transformer import Pairs, Projections, RMSNorm, attend, randomise


class ShortTermMemory(NamedTuple):
    """short, plain (S = 0): the paper's z."""

    z_BSD: Tensor


class LongTermMemory(NamedTuple):
    """long, long-only (S = 0): z, and the FIFO m of compressed key-value pairs."""

    z_BSD: Tensor
    keys_BHME: Tensor
    values_BHME: Tensor


class LongTermTokenMemory(NamedTuple):
    """As LongTermMemory in the dialect that stores tokens instead of pairs."""

    z_BSD: Tensor
    tokens_BMD: Tensor


class GrowingMemory(NamedTuple):
    """LongTermMemory while a segment is learned from: the FIFO as it was, and the pairs appended
    since."""

    z_BSD: Tensor
    keys_BHME: Tensor
    values_BHME: Tensor
    fresh_keys_BHfE: Tensor
    fresh_values_BHfE: Tensor


class RoomyMemory(NamedTuple):
    """LongTermMemory while windows are read without a gradient: its queue is the newest slots."""

    z_BSD: Tensor
    keys_BHkE: Tensor
    values_BHkE: Tensor


MelodiMemory = ShortTermMemory | LongTermMemory | LongTermTokenMemory | GrowingMemory | RoomyMemory


class Branches(NamedTuple):
    """What a full window is compressed into."""

    u_BSD: Tensor
    """Upward: summary tokens for the next layer."""
    z_BSD: Tensor
    """Rightward: short-term memory for the next window."""
    m_BLD: Tensor
    """Long-term memory."""


class ShortTermLayer(Layer[MelodiMemory]):
    """z', x', u' = h(z, x, u): short-term memory, rewritten by the summary of every window.

    A layer of kind "plain" has no z and no M_right, but still hands on u (the paper's Fig. 7); in a
    stack without summary tokens it is an ordinary transformer layer.
    """

    carries: type[MelodiMemory] = ShortTermMemory
    past_is = "short-term"
    keeps = True

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config, index)
        self.up: TokenMixer | None = None
        self.right: TokenMixer | None = None
        self.long: TokenMixer | None = None
        residual = config.answers.mixer == "residual"
        branching = config.branching and config.family == "melodi"
        if branching and index < config.last_writing_layer:
            self.up = TokenMixer(config, config.short_term_tokens, residual, residual)
        if branching and self.past_slots:
            self.right = TokenMixer(config, config.short_term_tokens, residual, residual)
        if config.answers.mixer_start == "tokens":
            if self.up is not None:
                self.up.start_from([] if residual else range(config.window, self.up.inputs))
            if self.right is not None:
                self.right.start_from(range(config.window)[-config.short_term_tokens :])

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.past_slots, self.width),)

    def past(self, memory: MelodiMemory) -> Pairs:
        return self.project(memory.z_BSD)

    def past_tokens(self, memory: MelodiMemory) -> Tensor | None:
        return memory.z_BSD if self.past_slots else None

    def keep(self, x_BtD: Tensor, h_BtD: Tensor) -> Tensor:
        return x_BtD

    def write(self, seen: Seen, memory: MelodiMemory, part: WindowPart) -> Written[MelodiMemory]:
        new = self.branch(seen.kept_BWD, seen.u_hat_BSD)
        return Written(self.remember(new, memory, part), new.u_BSD)

    def branch(self, x_BWD: Tensor, u_hat_BSD: Tensor) -> Branches:
        """Eq. 2: u = M_up(x, û), z = M_right(x, û), m = M_long(x, û).

        Without branching, and where nothing is above, the summary goes on as it is.
        """
        mixers = (self.up, self.right, self.long)
        if mixers == (None, None, None):
            return Branches(u_hat_BSD, u_hat_BSD, u_hat_BSD)
        xu_BtD = torch.cat([x_BWD, u_hat_BSD], dim=1)
        return Branches(*[u_hat_BSD if M is None else M(xu_BtD) for M in mixers])

    def remember(self, new: Branches, memory: MelodiMemory, part: WindowPart) -> MelodiMemory:
        """What is carried to the next window."""
        if not self.past_slots:
            return memory
        return memory._replace(z_BSD=part.commit(new.z_BSD, memory.z_BSD))

    def project(self, tokens_BMD: Tensor) -> Pairs:
        """Memory tokens as key-value pairs, by this layer's norm and projections."""
        return self.block.pairs(self.block.normed(tokens_BMD))


class LongTermLayer(ShortTermLayer):
    """A short-term layer that also reads, and adds to, a FIFO of compressed key-value pairs."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config, index)
        self.copies = config.copy_short_to_long
        self.entries_per_window = config.long_term_tokens
        self.slots = config.long_term_tokens * config.long_term_windows
        self.gate = Gate(config, per_channel=config.answers.gate == "channel")
        self.stores_pairs = config.answers.long_term_store == "pairs"
        if not self.copies:
            biased = config.answers.mixer == "residual"
            self.long = TokenMixer(config, self.entries_per_window, bias=biased, residual=False)
            if config.answers.mixer_start == "tokens":
                apart = max(config.window // self.entries_per_window, 1)
                self.long.start_from(range(config.window)[apart - 1 :: apart])

    @classmethod
    def memory_class(cls, config: ModelConfig) -> type[MelodiMemory]:
        pairs = config.answers.long_term_store == "pairs"
        return LongTermMemory if pairs else LongTermTokenMemory

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        if self.stores_pairs:
            return (*super().sizes(), *self.pairs_size(self.slots))
        return (*super().sizes(), (self.slots, self.width))

    def read(
        self, a_BHtE: Tensor, made: Projections, memory: MelodiMemory, part: WindowPart
    ) -> tuple[Tensor, ...]:
        """Cross-attention to the FIFO, and the gate: α·A_long + (1 - α)·A_self."""
        if isinstance(memory, GrowingMemory):
            base, fresh = Pairs(*memory[1:3]), Pairs(*memory[3:])
            long, empty_B = attend_filled(
                made.q_BHtE, base, fresh, part, self.entries_per_window, self.masked
            )
            return (a_BHtE if long is None else self.gate(a_BHtE, long, empty_B),)
        filled = filled_slots(part, self.slots, self.entries_per_window, self.masked)
        if filled.slots == 0:
            return (a_BHtE,)
        if isinstance(memory, LongTermTokenMemory):
            pairs = self.project(memory.tokens_BMD[:, -filled.slots :])
        else:
            assert isinstance(memory, LongTermMemory | RoomyMemory)
            pairs = Pairs(*memory[1:]).slots(-filled.slots)
        if part.probe is not None:
            part.probe.note(self.index, "long-term", made.q_BHtE, pairs, filled.mask())
        long_BHtE = attend(
            made.q_BHtE, *pairs, visible=filled.visible_B11M, dropout=self.block.drop_rate
        )
        return (self.gate(a_BHtE, long_BHtE, filled.empty_B),)

    def remember(self, new: Branches, memory: MelodiMemory, part: WindowPart) -> MelodiMemory:
        memory = super().remember(new, memory, part)
        m_BLD = memory.z_BSD if self.copies else new.m_BLD
        if isinstance(memory, GrowingMemory):
            return GrowingMemory(*memory[:3], *Pairs(*memory[3:]).join(self.project(m_BLD)))
        if isinstance(memory, RoomyMemory):
            longer = map(push_into_room, memory[1:], self.project(m_BLD), [self.slots] * 2)
            return RoomyMemory(memory.z_BSD, *longer)
        if isinstance(memory, LongTermTokenMemory):
            return memory._replace(tokens_BMD=append(memory.tokens_BMD, m_BLD, 1, part))
        assert isinstance(memory, LongTermMemory)
        keys, values = self.project(m_BLD)
        return memory._replace(
            keys_BHME=append(memory.keys_BHME, keys, 2, part),
            values_BHME=append(memory.values_BHME, values, 2, part),
        )

    def begin_segment(self, memory: MelodiMemory, windows: int) -> MelodiMemory:
        """Where old slots have a gradient, the queue stays whole."""
        if not isinstance(memory, LongTermMemory):
            return memory
        base = Pairs(memory.keys_BHME, memory.values_BHME)
        if not torch.is_grad_enabled():
            return RoomyMemory(memory.z_BSD, *with_room(base, windows * self.entries_per_window))
        if any(tensor.requires_grad for tensor in base):
            return memory
        base, fresh = begun(base)
        return GrowingMemory(memory.z_BSD, *base, *fresh)

    def end_segment(self, memory: MelodiMemory) -> MelodiMemory:
        if isinstance(memory, RoomyMemory):
            return LongTermMemory(memory.z_BSD, *newest(memory[1:], self.slots))
        if not isinstance(memory, GrowingMemory):
            return memory
        return LongTermMemory(memory.z_BSD, *pushed(Pairs(*memory[1:3]), Pairs(*memory[3:])))


class TokenMixer(nn.Module):
    """A linear map over the token axis, the same for every channel: (W + S) tokens to O tokens.

    `residual` normalises both inputs and adds the summary itself.
    """

    roles: ClassVar = {"weight": "mixers"}

    def __init__(self, config: ModelConfig, outputs: int, bias: bool, residual: bool) -> None:
        super().__init__()
        self.inputs = config.window + config.short_term_tokens
        self.window = config.window
        self.weight = nn.Parameter(torch.empty(self.inputs, outputs))
        randomise(self.weight, self.inputs**-0.5)
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.context_norm = RMSNorm(config.width) if residual else None
        self.summary_norm = RMSNorm(config.width) if residual else None

    @torch.no_grad()
    def start_from(self, tokens: Sequence[int]) -> None:
        """Hands on these tokens, context first, as they are, and nothing in outputs beyond them."""
        if not self.weight.is_meta:
            self.weight.zero_()
            for output, token in enumerate(tokens[: self.weight.size(1)]):
                self.weight[token, output] = 1

    def forward(self, xu_BtD: Tensor) -> Tensor:
        x_BWD, u_hat_BSD = xu_BtD.split([self.window, xu_BtD.size(1) - self.window], dim=1)
        if self.context_norm is not None and self.summary_norm is not None:
            xu_BtD = torch.cat([self.context_norm(x_BWD), self.summary_norm(u_hat_BSD)], dim=1)
        # The weights for every row: torch would turn all rows around to make one product of them.
        mixed_BOD = torch.bmm(self.weight.T.expand(len(xu_BtD), -1, -1), xu_BtD)
        if self.bias is not None:
            mixed_BOD = mixed_BOD + self.bias[:, None]
        return mixed_BOD if self.summary_norm is None else mixed_BOD + u_hat_BSD
