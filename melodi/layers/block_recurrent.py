"""Block-Recurrent Transformer (Hutchins et al. 2022), the "fixed, skip" variant.

State vectors read the window and are read by it; all of it beside a Transformer-XL cache.

Shapes as in frame.py; R state vectors.
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from melodi.config import ModelConfig
from melodi.layers.frame import Seen, WindowPart, Written
from melodi.layers.transformer import (
    AttentionScale,
    Linear,
    Pairs,
    Projections,
    RMSNorm,
    attend,
    merge_heads,
    randomise,
    split_heads,
)
from melodi.layers.transformer_xl import CachedLayer


class RecurrentMemory(NamedTuple):
    """recurrent: the previous window's pairs, and the state vectors c."""

    cache_keys_BHWE: Tensor
    cache_values_BHWE: Tensor
    c_BRD: Tensor


class RecurrentLayer(CachedLayer[RecurrentMemory]):
    """Tokens read the state as it was when the window began; the full window rewrites it."""

    carries = RecurrentMemory
    sources = 2

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config, index)
        self.size = (config.recurrent_states, config.width)
        self.read_query = Linear(config.width, config.num_heads * config.head_size)
        self.read_scale = AttentionScale(config)
        self.state = RecurrentState(config)

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        return (*self.pairs_size(self.window), self.size)

    def read(
        self, a_BHtE: Tensor, made: Projections, memory: RecurrentMemory, part: WindowPart
    ) -> tuple[Tensor, ...]:
        q_BHtE = split_heads(self.read_query(made.h_BtD), self.heads[0])
        pairs = self.state.pairs(self.state.normed(self._states(memory, part)))
        return a_BHtE, attend(self.read_scale.query(q_BHtE), *pairs, dropout=self.block.drop_rate)

    def write(
        self, seen: Seen, memory: RecurrentMemory, part: WindowPart
    ) -> Written[RecurrentMemory]:
        pairs = seen.past.join(seen.window)
        visible = None
        if self.masked and part.fewest_windows == 0:
            slot_k = torch.arange(pairs.keys_BHkE.size(2), device=pairs.keys_BHkE.device)
            visible_Bk = (slot_k >= self.window) | (part.windows_read_B > 0)[:, None]
            visible = visible_Bk[:, None, None, :]
        new_BRD = self.state(self._states(memory, part), pairs, visible)
        cache = self.new_cache(seen, memory, part)
        return Written(RecurrentMemory(*cache, part.commit(new_BRD, memory.c_BRD)))

    def _states(self, memory: RecurrentMemory, part: WindowPart) -> Tensor:
        """The learned initial state stands in for rows that have read no window yet.

        It is part of the graph even where no row needs it: DDP expects a gradient every time.
        """
        first_B11 = (part.windows_read_B == 0)[:, None, None]
        return torch.where(first_B11, self.state.initial.to(memory.c_BRD), memory.c_BRD)


class RecurrentState(nn.Module):
    """c' = g·c + (1 - g)·y: the state attends to itself and to the window's tokens."""

    roles: ClassVar = {"initial": "embeddings", "position": "embeddings", "gate": "gates"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner = config.num_heads * config.head_size
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.initial = nn.Parameter(torch.empty(config.recurrent_states, config.width))
        self.position = nn.Parameter(torch.empty(config.recurrent_states, config.width))
        randomise(self.initial, 0.25)
        randomise(self.position, 0.25)
        self.norm = RMSNorm(config.width)
        self.key = Linear(config.width, inner)
        self.value = Linear(config.width, inner)
        self.self_query = Linear(config.width, inner)
        self.self_scale = AttentionScale(config)
        self.token_query = Linear(config.width, inner)
        self.token_scale = AttentionScale(config)
        self.output = Linear(2 * inner, config.width)
        self.gate = nn.Parameter(torch.ones(config.width))

    def forward(self, c_BRD: Tensor, window: Pairs, visible: Tensor | None) -> Tensor:
        h_BRD = self.normed(c_BRD)
        drop = self.dropout if self.training else 0.0
        self_q = self.self_scale.query(split_heads(self.self_query(h_BRD), self.num_heads))
        token_q = self.token_scale.query(split_heads(self.token_query(h_BRD), self.num_heads))
        heads = (
            attend(self_q, *self.pairs(h_BRD), dropout=drop),
            attend(token_q, *window, visible=visible, dropout=drop),
        )
        y_BRD = self.output(torch.cat([merge_heads(a) for a in heads], dim=-1))
        g_D = torch.sigmoid(self.gate)
        return g_D * c_BRD + (1 - g_D) * y_BRD

    def normed(self, c_BRD: Tensor) -> Tensor:
        return self.norm(c_BRD) + self.position

    def pairs(self, h_BRD: Tensor) -> Pairs:
        k_BHRE = self.self_scale.key(split_heads(self.key(h_BRD), self.num_heads))
        return Pairs(k_BHRE, split_heads(self.value(h_BRD), self.num_heads))
