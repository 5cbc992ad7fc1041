"""The same h for the models that the paper compares with (Sec. 3.3), in the same frame.

- `XLLayer`: Transformer-XL. The keys and values of the previous window are the past.
- `RecurrentLayer`: Block-Recurrent Transformer, "fixed, skip" variant. State vectors read the
  window and are read by it; all of it beside an XL cache.
- `MemorizingLayer`: Memorizing Transformer. All pairs of earlier windows, without gradient.

Shapes as in layers.py; R state vectors.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from melodi.config import ModelConfig
from melodi.layers.melodi import (
    Gate,
    Layer,
    Pairs,
    Piece,
    Seen,
    Zeros,
    filled_slots,
    written_slots,
)
from melodi.layers.transformer import (
    AttentionScale,
    Linear,
    RMSNorm,
    attend,
    merge_heads,
    randomise,
    split_heads,
)
from melodi.memory import MemorizingMemory, OpenWindow, RecurrentMemory, XLMemory


class XLLayer(Layer):
    """Every token sees the W tokens before it: the cache is the previous window."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.window)

    def empty_memory(self, batch_size: int, zeros: Zeros) -> Any:
        return XLMemory(*self.empty_pairs(batch_size, self.window, zeros))

    def past(self, memory: Any, window: OpenWindow | None, piece: Piece) -> Pairs:
        return Pairs(memory.cache_keys_BHWE, memory.cache_values_BHWE)

    def remember(
        self,
        x_BtD: Tensor,
        u_BSD: Tensor | None,
        seen: Seen,
        memory: Any,
        window: OpenWindow | None,
        piece: Piece,
    ) -> tuple[Tensor | None, Any, OpenWindow | None]:
        if piece.closes:
            memory = self.rewrite(seen, memory, piece)
        return u_BSD, memory, window

    def rewrite(self, seen: Seen, memory: Any, piece: Piece) -> Any:
        """What a full window leaves behind."""
        return memory._replace(
            cache_keys_BHWE=piece.commit(seen.window.keys_BHkE, memory.cache_keys_BHWE),
            cache_values_BHWE=piece.commit(seen.window.values_BHkE, memory.cache_values_BHWE),
        )


class MemorizingLayer(XLLayer):
    """Also attends to the pairs of all earlier windows, densely or to the k best."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.slots = config.memory_slots
        self.top_k = config.top_k
        self.gate = Gate(config, per_channel=False)

    def empty_memory(self, batch_size: int, zeros: Zeros) -> Any:
        keys, values = super().empty_memory(batch_size, zeros)
        return MemorizingMemory(keys, values, *self.empty_pairs(batch_size, self.slots, zeros))

    def cross_attend(
        self, a_BHtE: Tensor, seen: Seen, memory: Any, piece: Piece
    ) -> tuple[Tensor, ...]:
        part = filled_slots(piece, self.slots, self.window, self.masked)
        if part.slots == 0:
            return (a_BHtE,)
        k_BHME = memory.keys_BHME[:, :, -part.slots :]
        v_BHME = memory.values_BHME[:, :, -part.slots :]
        if self.top_k is None or self.top_k >= part.slots:
            long_BHtE = attend(
                seen.q_BHtE,
                k_BHME,
                v_BHME,
                visible=part.visible_B11M,
                dropout=self.block.drop_rate,
            )
        else:
            written_B11M = written_slots(piece, part.slots, self.window)
            long_BHtE = attend_best(
                seen.q_BHtE,
                k_BHME,
                v_BHME,
                written_B11M,
                self.top_k,
                self.masked,
                self.block.drop_rate,
            )
        return (self.gate(a_BHtE, long_BHtE, part.empty_B),)

    def rewrite(self, seen: Seen, memory: Any, piece: Piece) -> Any:
        memory = super().rewrite(seen, memory, piece)
        return memory._replace(
            keys_BHME=piece.append(memory.keys_BHME, seen.window.keys_BHkE.detach(), dim=2),
            values_BHME=piece.append(memory.values_BHME, seen.window.values_BHkE.detach(), dim=2),
        )


class RecurrentLayer(XLLayer):
    """Tokens read the state as it was when the window began; the full window rewrites it."""

    sources = 2

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.size = (config.recurrent_states, config.width)
        self.read_query = Linear(config.width, config.num_heads * config.head_size)
        self.read_scale = AttentionScale(config)
        self.state = RecurrentState(config)

    def empty_memory(self, batch_size: int, zeros: Zeros) -> Any:
        keys, values = super().empty_memory(batch_size, zeros)
        return RecurrentMemory(keys, values, zeros(batch_size, *self.size))

    def cross_attend(
        self, a_BHtE: Tensor, seen: Seen, memory: Any, piece: Piece
    ) -> tuple[Tensor, ...]:
        q_BHtE = split_heads(self.read_query(seen.h_BtD), self.heads[0])
        k_BHRE, v_BHRE = self.state.keys_values(self.state.normed(self._states(memory, piece)))
        return a_BHtE, attend(
            self.read_scale.query(q_BHtE), k_BHRE, v_BHRE, dropout=self.block.drop_rate
        )

    def rewrite(self, seen: Seen, memory: Any, piece: Piece) -> Any:
        k_BHkE = torch.cat([seen.past.keys_BHkE, seen.window.keys_BHkE], dim=2)
        v_BHkE = torch.cat([seen.past.values_BHkE, seen.window.values_BHkE], dim=2)
        visible = None
        if self.masked and piece.fewest_windows == 0:
            slot_k = torch.arange(k_BHkE.size(2), device=k_BHkE.device)
            visible_Bk = (slot_k >= self.window) | (piece.windows_B > 0)[:, None]
            visible = visible_Bk[:, None, None, :]
        states_BRD = self._states(memory, piece)
        new_BRD = self.state(states_BRD, k_BHkE, v_BHkE, visible)
        memory = super().rewrite(seen, memory, piece)
        return memory._replace(c_BRD=piece.commit(new_BRD, memory.c_BRD))

    def _states(self, memory: Any, piece: Piece) -> Tensor:
        """The learned initial state stands in for rows that have read no window yet.

        It is part of the graph even where no row needs it: DDP expects a gradient every time.
        """
        first_B11 = (piece.windows_B == 0)[:, None, None]
        return torch.where(first_B11, self.state.initial.to(memory.c_BRD), memory.c_BRD)


class RecurrentState(nn.Module):
    """c' = g·c + (1 - g)·y: the state attends to itself and to the window's tokens."""

    roles: ClassVar[dict[str, str]] = {
        "initial": "embeddings",
        "position": "embeddings",
        "gate": "gates",
    }

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

    def forward(
        self, c_BRD: Tensor, k_BHkE: Tensor, v_BHkE: Tensor, visible: Tensor | None
    ) -> Tensor:
        h_BRD = self.normed(c_BRD)
        drop = self.dropout if self.training else 0.0
        self_q = self.self_scale.query(split_heads(self.self_query(h_BRD), self.num_heads))
        token_q = self.token_scale.query(split_heads(self.token_query(h_BRD), self.num_heads))
        heads = (
            attend(self_q, *self.keys_values(h_BRD), dropout=drop),
            attend(token_q, k_BHkE, v_BHkE, visible=visible, dropout=drop),
        )
        y_BRD = self.output(torch.cat([merge_heads(a) for a in heads], dim=-1))
        g_D = torch.sigmoid(self.gate)
        return g_D * c_BRD + (1 - g_D) * y_BRD

    def normed(self, c_BRD: Tensor) -> Tensor:
        return self.norm(c_BRD) + self.position

    def keys_values(self, h_BRD: Tensor) -> tuple[Tensor, Tensor]:
        k_BHRE = self.self_scale.key(split_heads(self.key(h_BRD), self.num_heads))
        return k_BHRE, split_heads(self.value(h_BRD), self.num_heads)


def attend_best(
    q_BHtE: Tensor,
    k_BHME: Tensor,
    v_BHME: Tensor,
    written_B11M: Tensor,
    top_k: int,
    masked: bool = True,
    dropout: float = 0.0,
) -> Tensor:
    """Attention to the k written keys with the largest q·k, exactly; the choice has no gradient.

    Where fewer are written, the rest is masked, or read as zeros.
    """
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
