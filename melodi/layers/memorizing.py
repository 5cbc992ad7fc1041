"""Memorizing Transformer (Wu et al. 2022): the pairs of all earlier windows, without gradient.

The external memory is a FIFO of pairs, read densely or only at the k best; all of it beside a
Transformer-XL cache.

Shapes as in frame.py.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from melodi.config import ModelConfig
from melodi.layers.fifo import (
    append,
    filled_slots,
    newest,
    push_into_room,
    with_room,
    written_slots,
)
from melodi.layers.frame import Seen, WindowPart, Written
from melodi.layers.gate import Gate
from melodi.layers.growing import attend_filled, begun, pushed
from melodi.layers.transformer import Pairs, Projections, attend
from melodi.layers.transformer_xl import CachedLayer


class MemorizingMemory(NamedTuple):
    """memorizing: the previous window's pairs, and the FIFO of all earlier pairs."""

    cache_keys_BHWE: Tensor
    cache_values_BHWE: Tensor
    keys_BHME: Tensor
    values_BHME: Tensor


class GrowingMemorizingMemory(NamedTuple):
    """The same inside a segment: the FIFO as it was, and the pairs appended since."""

    cache_keys_BHWE: Tensor
    cache_values_BHWE: Tensor
    keys_BHME: Tensor
    values_BHME: Tensor
    fresh_keys_BHfE: Tensor
    fresh_values_BHfE: Tensor


class RoomyMemorizingMemory(NamedTuple):
    """The same while windows are read without a gradient: the FIFO is the newest slots."""

    cache_keys_BHWE: Tensor
    cache_values_BHWE: Tensor
    keys_BHkE: Tensor
    values_BHkE: Tensor


PairsMemory = MemorizingMemory | GrowingMemorizingMemory | RoomyMemorizingMemory


class MemorizingLayer(CachedLayer[PairsMemory]):
    """Also attends to the pairs of all earlier windows, densely or to the k best."""

    carries: type[PairsMemory] = MemorizingMemory

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config, index)
        self.slots = config.memory_slots
        self.entries_per_window = config.window
        self.top_k = config.top_k
        self.gate = Gate(config, per_channel=False)

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        return (*self.pairs_size(self.window), *self.pairs_size(self.slots))

    def read(
        self, a_BHtE: Tensor, made: Projections, memory: PairsMemory, part: WindowPart
    ) -> tuple[Tensor, ...]:
        if isinstance(memory, GrowingMemorizingMemory):
            base, fresh = Pairs(*memory[2:4]), Pairs(*memory[4:])
            long, empty_B = attend_filled(
                made.q_BHtE, base, fresh, part, self.entries_per_window, self.masked
            )
            return (a_BHtE if long is None else self.gate(a_BHtE, long, empty_B),)
        filled = filled_slots(part, self.slots, self.window, self.masked)
        if filled.slots == 0:
            return (a_BHtE,)
        pairs = Pairs(*memory[2:]).slots(-filled.slots)
        drop_rate = self.block.drop_rate
        if part.probe is not None:
            part.probe.note(self.index, "long-term", made.q_BHtE, pairs, filled.mask())
        if self.top_k is None or self.top_k >= filled.slots:
            long_BHtE = attend(made.q_BHtE, *pairs, visible=filled.visible_B11M, dropout=drop_rate)
        else:
            written_B11M = written_slots(part, filled.slots, self.window)
            long_BHtE = attend_best(
                made.q_BHtE, pairs, written_B11M, self.top_k, self.masked, drop_rate
            )
        return (self.gate(a_BHtE, long_BHtE, filled.empty_B),)

    def write(self, seen: Seen, memory: PairsMemory, part: WindowPart) -> Written[PairsMemory]:
        cache, new = self.new_cache(seen, memory, part), seen.window.detach()
        if isinstance(memory, GrowingMemorizingMemory):
            base, fresh = memory[2:4], Pairs(*memory[4:])
            return Written(GrowingMemorizingMemory(*cache, *base, *fresh.join(new)))
        if isinstance(memory, RoomyMemorizingMemory):
            longer = map(push_into_room, memory[2:], new, [self.slots] * 2)
            return Written(RoomyMemorizingMemory(*cache, *longer))
        keys = append(memory.keys_BHME, new.keys_BHkE, 2, part)
        values = append(memory.values_BHME, new.values_BHkE, 2, part)
        return Written(MemorizingMemory(*cache, keys, values))

    def begin_segment(self, memory: PairsMemory, windows: int) -> PairsMemory:
        """With a gradient the k best are looked for in a queue that is whole."""
        assert isinstance(memory, MemorizingMemory)
        base = Pairs(memory.keys_BHME, memory.values_BHME)
        if not torch.is_grad_enabled():
            return RoomyMemorizingMemory(*memory[:2], *with_room(base, windows * self.window))
        if self.top_k is not None or any(tensor.requires_grad for tensor in base):
            return memory
        base, fresh = begun(base)
        return GrowingMemorizingMemory(*memory[:2], *base, *fresh)

    def end_segment(self, memory: PairsMemory) -> PairsMemory:
        if isinstance(memory, RoomyMemorizingMemory):
            return MemorizingMemory(*memory[:2], *newest(memory[2:], self.slots))
        if not isinstance(memory, GrowingMemorizingMemory):
            return memory
        return MemorizingMemory(*memory[:2], *pushed(Pairs(*memory[2:4]), Pairs(*memory[4:])))


def attend_best(
    q_BHtE: Tensor,
    pairs: Pairs,
    written_B11M: Tensor,
    top_k: int,
    masked: bool = True,
    dropout: float = 0.0,
) -> Tensor:
    """Attention to the k written keys with the largest q·k, exactly; the choice has no gradient.

    Where fewer are written, the rest is masked, or read as zeros.
    """
    k_BHME, v_BHME = pairs
    with torch.no_grad():
        scores_BHtM = q_BHtE @ k_BHME.transpose(2, 3)
        scores_BHtM = scores_BHtM.masked_fill(~written_B11M, float("-inf"))
        best_BHtK, index_BHtK = scores_BHtM.topk(top_k, dim=-1)
        # A row without any written key sees zeros; the gate then drops the result.
        hidden_BHtK = best_BHtK.isneginf() & written_B11M.any(-1, keepdim=True) & masked

    def pick(x_BHME: Tensor) -> Tensor:
        index = index_BHtK.flatten(2)[..., None].expand(-1, -1, -1, x_BHME.size(-1))
        return x_BHME.gather(2, index).unflatten(2, index_BHtK.shape[2:])

    logits_BHtK = (q_BHtE[:, :, :, None] * pick(k_BHME)).sum(-1)
    p_BHtK = logits_BHtK.masked_fill(hidden_BHtK, float("-inf")).softmax(-1)
    p_BHtK = F.dropout(p_BHtK, dropout)
    return (p_BHtK[..., None] * pick(v_BHME)).sum(-2)
