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
from melodi.layers.fifo import append
from melodi.layers.frame import Layer, Seen, WindowPart, Written
from melodi.layers.gate import Gate
from melodi.layers.queue import Forms, QueueLayer
from melodi.layers.transformer import Pairs, RMSNorm, randomise


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


class LongTermLayer(QueueLayer[MelodiMemory], ShortTermLayer):
    """A short-term layer that also reads, and adds to, a FIFO of compressed key-value pairs."""

    forms = Forms(LongTermMemory, GrowingMemory, RoomyMemory)

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

    def newest_pairs(self, memory: MelodiMemory, slots: int) -> Pairs:
        if isinstance(memory, LongTermTokenMemory):
            return self.project(memory.tokens_BMD[:, -slots:])
        return super().newest_pairs(memory, slots)

    def remember(self, new: Branches, memory: MelodiMemory, part: WindowPart) -> MelodiMemory:
        memory = super().remember(new, memory, part)
        m_BLD = memory.z_BSD if self.copies else new.m_BLD
        if isinstance(memory, LongTermTokenMemory):
            return memory._replace(tokens_BMD=append(memory.tokens_BMD, m_BLD, 1, part))
        return self.append_pairs([memory.z_BSD], memory, self.project(m_BLD), part)


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
