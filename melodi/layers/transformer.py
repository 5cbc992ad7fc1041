"""The ordinary parts: position bias, attention, feed-forward, and the Block that joins them.

- Pre-norm RMSNorm, no biases in the projections, T5 relative position bias.
- Queries leave `Block.queries` already scaled: every attention is a plain softmax of q·k + bias.
- The Block is the paper's T(x | z) (Eq. 1). It is split into before (`normed`, `queries`,
  `keys_values`) and after attention (`finish`), so that a memory can plug in between.

Shapes: B rows, t query tokens, k keys, H heads, E head width, D width, N layers, b = 1 or B.
"""

import math
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from melodi.config import ModelConfig

EPSILON = 1e-6
NUM_BUCKETS = 32
MAX_DISTANCE = 128


class Block(nn.Module):
    """The paper's transformer block; memory plugs in between its two halves.

    `sources` is the number of attention results that `finish` projects back, side by side.
    """

    def __init__(self, config: ModelConfig, sources: int = 1) -> None:
        super().__init__()
        rules, inner = config.rules, config.num_heads * config.head_size
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.strict = rules.causal_mask == "strict"
        self.attention_norm = RMSNorm(config.width)
        self.query = Linear(config.width, inner)
        self.key = Linear(config.width, inner)
        self.value = Linear(config.width, inner)
        self.scale = AttentionScale(config)
        self.output = Linear(sources * inner, config.width)
        self.ffn_norm = RMSNorm(config.width)
        self.ffn = FeedForward(config, bias=rules.ffn_bias and config.has_summary)

    def normed(self, x_BtD: Tensor) -> Tensor:
        return F.dropout(self.attention_norm(x_BtD), self.dropout, self.training)

    def queries(self, h_BtD: Tensor) -> Tensor:
        return self.scale.query(split_heads(self.query(h_BtD), self.num_heads))

    def keys_values(self, h_BtD: Tensor) -> tuple[Tensor, Tensor]:
        k_BHtE = self.scale.key(split_heads(self.key(h_BtD), self.num_heads))
        return k_BHtE, split_heads(self.value(h_BtD), self.num_heads)

    def self_attention(
        self, q_BHtE: Tensor, k_BHkE: Tensor, v_BHkE: Tensor, bias: Tensor | None, visible: Tensor
    ) -> Tensor:
        """Attention within the window and to the past that precedes it."""
        if not self.strict:
            return attend(q_BHtE, k_BHkE, v_BHkE, self.scale.bias(bias), visible, self.drop_rate)
        # A query with nothing to see is let to see everything, and its result is set to zero.
        blind = ~visible.any(-1, keepdim=True)
        a_BHtE = attend(
            q_BHtE, k_BHkE, v_BHkE, self.scale.bias(bias), visible | blind, self.drop_rate
        )
        return a_BHtE.masked_fill(blind, 0)

    def finish(self, x_BtD: Tensor, *heads_BHtE: Tensor) -> Tensor:
        y_BtD = x_BtD + self.output(torch.cat([merge_heads(a) for a in heads_BHtE], dim=-1))
        f_BtD = self.ffn(self.ffn_norm(y_BtD))
        return y_BtD + F.dropout(f_BtD, self.dropout, self.training)

    @property
    def drop_rate(self) -> float:
        return self.dropout if self.training else 0.0


class AttentionScale(nn.Module):
    """How q·k becomes a logit: divided by √E, or of unit vectors times a learned scale per head."""

    roles: ClassVar[dict[str, str]] = {"factor": "gates"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.root = math.sqrt(config.head_size)
        kind = config.rules.attention
        start = {"scaled": None, "normalised": 1.0, "normalised-root": self.root}[kind]
        self.factor = (
            None if start is None else nn.Parameter(torch.full((config.num_heads,), start))
        )

    def query(self, q_BHtE: Tensor) -> Tensor:
        if self.factor is None:
            return q_BHtE / self.root
        return unit(q_BHtE) * self.factor.abs()[:, None, None]

    def key(self, k_BHkE: Tensor) -> Tensor:
        return k_BHkE if self.factor is None else unit(k_BHkE)

    def bias(self, bias_bHtk: Tensor | None) -> Tensor | None:
        if self.factor is None or bias_bHtk is None:
            return bias_bHtk
        return bias_bHtk * self.factor.abs()[:, None, None]


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig, bias: bool) -> None:
        super().__init__()
        self.hidden = Linear(config.width, config.ffn_width, bias)
        self.output = Linear(config.ffn_width, config.width, bias)
        self.activation = ACTIVATIONS[config.rules.activation]

    def forward(self, h_BtD: Tensor) -> Tensor:
        return self.output(self.activation(self.hidden(h_BtD)))


class RelativePositionBias(nn.Module):
    """T5 buckets: one table per layer and head, looked up by the distance from query to key.

    The tables live together at the root of the model, so that one lookup serves all layers and all
    windows of a segment, also when the layers themselves are sharded.
    """

    def __init__(self, num_heads: int, layers: list[int]) -> None:
        super().__init__()
        self.tables = nn.ParameterDict(
            {str(layer): nn.Parameter(torch.zeros(num_heads, NUM_BUCKETS)) for layer in layers}
        )

    def forward(self, distance_btk: Tensor) -> dict[str, Tensor]:
        """A (b, H, t, k) bias for each layer that has one."""
        if not self.tables:
            return {}
        buckets_btk = bucket_of_distance(distance_btk)
        tables_NHK = torch.stack(list(self.tables.values()))
        bias_NbHtk = tables_NHK[:, :, buckets_btk].transpose(1, 2)
        return dict(zip(self.tables, bias_NbHtk.unbind(0), strict=True))


class RMSNorm(nn.RMSNorm):
    def __init__(self, width: int) -> None:
        super().__init__(width, eps=EPSILON)


def attend(
    q_BHtE: Tensor,
    k_BHkE: Tensor,
    v_BHkE: Tensor,
    bias: Tensor | None = None,
    visible: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q·k + bias)·v over the visible keys, all of them where `visible` is None.

    Every query must see at least one key.
    """
    mask = visible
    if bias is not None:
        mask = bias if visible is None else bias.masked_fill(~visible, float("-inf"))
    return F.scaled_dot_product_attention(
        q_BHtE, k_BHkE, v_BHkE, attn_mask=mask, dropout_p=dropout, scale=1.0
    )


def bucket_of_distance(distance: Tensor) -> Tensor:
    """T5's unidirectional buckets: exact up to 15, then logarithmic up to 128."""
    exact = NUM_BUCKETS // 2
    steps = torch.log(distance.clamp(min=exact).double() / exact) / math.log(MAX_DISTANCE / exact)
    # The small addition keeps exact powers (32, 64) from falling into the bucket below.
    coarse = exact + (steps * (NUM_BUCKETS - exact) + 1e-9).long()
    return torch.where(distance < exact, distance.clamp(min=0), coarse.clamp(max=NUM_BUCKETS - 1))


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def split_heads(x_BtX: Tensor, num_heads: int) -> Tensor:
    return x_BtX.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x_BHtE: Tensor) -> Tensor:
    return x_BHtE.transpose(1, 2).flatten(2)


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": relu2,
    "gelu": F.gelu,
}


class Linear(nn.Linear):
    """Keeps the variance of its inputs; no bias unless asked for."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias)

    def reset_parameters(self) -> None:
        randomise(self.weight, self.in_features**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def randomise(parameter: Tensor, std: float) -> None:
    """Fills with a normal distribution cut at two deviations."""
    if not parameter.is_meta:  # random numbers on the meta device cost a second of imports
        nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)
