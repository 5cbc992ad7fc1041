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
from melodi.layers.fifo import FilledSlots, written_slots
from melodi.layers.frame import Seen, WindowPart, Written
from melodi.layers.gate import Gate
from melodi.layers.queue import Forms, QueueLayer
from melodi.layers.transformer import Pairs
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


class MemorizingLayer(QueueLayer[PairsMemory], CachedLayer[PairsMemory]):
    """Also attends to the pairs of all earlier windows, densely or to the k best."""

    carries: type[PairsMemory] = MemorizingMemory
    forms = Forms(MemorizingMemory, GrowingMemorizingMemory, RoomyMemorizingMemory)

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config, index)
        self.slots = config.memory_slots
        self.entries_per_window = config.window
        self.top_k = config.top_k
        self.grows = config.top_k is None  # the k best are looked for in a queue that is whole
        self.gate = Gate(config, per_channel=False)

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        return (*self.pairs_size(self.window), *self.pairs_size(self.slots))

    def attend_queue(
        self, q_BHtE: Tensor, pairs: Pairs, filled: FilledSlots, part: WindowPart
    ) -> Tensor:
        if self.top_k is None or self.top_k >= filled.slots:
            return super().attend_queue(q_BHtE, pairs, filled, part)
        written_B11M = written_slots(part, filled.slots, self.window)
        drop_rate = self.block.drop_rate
        return attend_best(q_BHtE, pairs, written_B11M, self.top_k, self.masked, drop_rate)

    def write(self, seen: Seen, memory: PairsMemory, part: WindowPart) -> Written[PairsMemory]:
        cache = self.new_cache(seen, memory, part)
        return Written(self.append_pairs(cache, memory, seen.window.detach(), part))


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
