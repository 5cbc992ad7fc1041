"""The paper's T(x | z) (Eq. 1) and its parts: position bias, attention, feed-forward.

- Pre-norm RMSNorm, no biases in the projections, T5 relative position bias.
- `Block.forward` is T(x | z). It is made of `project`, `attend` and `finish`, so that a memory can
  plug in between: see layers/frame.py.
- Queries leave the projection already scaled: every attention is a plain softmax of q·k + bias.

Shapes: B rows, t query tokens, k keys, H heads, E head width, D width, N layers, b = 1 or B.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from melodi.config import ModelConfig

EPSILON = 1e-6
NUM_BUCKETS = 32
MAX_DISTANCE = 128
SMALL = 0.1
"""What a block adds to the stream at first, where it is to be little."""


class Pairs(NamedTuple):
    """Keys and values, slot by slot."""

    keys_BHkE: Tensor
    values_BHkE: Tensor

    def join(self, *others: "Pairs") -> "Pairs":
        """These slots, then those of the others."""
        keys, values = zip(self, *others, strict=True)
        return Pairs(torch.cat(keys, dim=2), torch.cat(values, dim=2))

    def slots(self, start: int, stop: int | None = None) -> "Pairs":
        if stop is None and start in (0, -self.keys_BHkE.size(2)):
            return self  # a slice of everything costs a copy of its gradient
        return Pairs(self.keys_BHkE[:, :, start:stop], self.values_BHkE[:, :, start:stop])

    def rows(self, rows: slice) -> "Pairs":
        return Pairs(self.keys_BHkE[rows], self.values_BHkE[rows])

    def split(self, slots: int) -> "tuple[Pairs, Pairs]":
        """The first slots, and the rest."""
        sizes = [slots, self.keys_BHkE.size(2) - slots]
        (keys, more_keys), (values, more_values) = (tensor.split(sizes, dim=2) for tensor in self)
        return Pairs(keys, values), Pairs(more_keys, more_values)

    def detach(self) -> "Pairs":
        return Pairs(self.keys_BHkE.detach(), self.values_BHkE.detach())

    def to(self, dtype: torch.dtype) -> "Pairs":
        return Pairs(self.keys_BHkE.to(dtype), self.values_BHkE.to(dtype))


class Sight(NamedTuple):
    """Who sees what in self-attention, and at which bias; shared by windows that are alike."""

    visible_b1tk: Tensor | None
    """None: every query sees all the keys."""
    bias_bHtk: Tensor | None
    keys: slice | None = None
    """The only keys that are seen, of which mask and bias are; None: all keys."""
    past: "Sight | None" = None
    """Of the past among itself, where it is made of tokens that run through the stack."""


class Projections(NamedTuple):
    """What a block makes of its input: the normed tokens, their queries, their pairs, and before
    these the pairs of tokens that precede them, if there are such."""

    h_BtD: Tensor
    q_BHtE: Tensor
    pairs: Pairs


class Block(nn.Module):
    """The paper's transformer block.

    `sources` is the number of attention results that `finish` projects back, side by side.
    """

    def __init__(self, config: ModelConfig, sources: int = 1) -> None:
        super().__init__()
        answers, inner = config.answers, config.num_heads * config.head_size
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.strict = answers.causal_mask == "strict"
        self.attention_norm = RMSNorm(config.width)
        self.query = Linear(config.width, inner)
        self.key = Linear(config.width, inner)
        self.value = Linear(config.width, inner)
        self.scale = AttentionScale(config)
        self.output = Linear(sources * inner, config.width)
        self.ffn_norm = RMSNorm(config.width)
        self.ffn = FeedForward(config, bias=answers.ffn_bias and config.family == "melodi")
        if answers.block_start == "small":
            with torch.no_grad():
                self.output.weight.mul_(SMALL)
                self.ffn.output.weight.mul_(SMALL)

    def forward(self, x_BtD: Tensor, z: Pairs, sight: Sight) -> Tensor:
        """T(x | z), Eq. 1: the tokens x attend to what precedes them, z, and to each other."""
        seen = self.project(x_BtD)
        return self.finish(x_BtD, self.attend(seen.q_BHtE, z.join(seen.pairs), sight))

    def project(self, x_BtD: Tensor, z_BPD: Tensor | None = None) -> Projections:
        """Of the tokens x; with tokens z that precede them, which ask nothing, the pairs are those
        of [z; x], made together."""
        if z_BPD is None:
            h_BtD = self.normed(x_BtD)
            return Projections(h_BtD, self.queries(h_BtD), self.pairs(h_BtD))
        h_BkD = self.normed(torch.cat([z_BPD, x_BtD], dim=1))
        h_BtD = h_BkD[:, z_BPD.size(1) :]
        return Projections(h_BtD, self.queries(h_BtD), self.pairs(h_BkD))

    def attend(self, q_BHtE: Tensor, pairs: Pairs, sight: Sight) -> Tensor:
        """Self-attention: within the window, and to the past that precedes it."""
        if sight.keys is not None:
            pairs = pairs.slots(sight.keys.start, sight.keys.stop)
        visible, bias = sight.visible_b1tk, self.scale.bias(sight.bias_bHtk)
        if not self.strict or visible is None:
            return attend(q_BHtE, *pairs, bias, visible, self.drop_rate)
        # A query with nothing to see is let to see everything, and its result is set to zero.
        blind = ~visible.any(-1, keepdim=True)
        a_BHtE = attend(q_BHtE, *pairs, bias, visible | blind, self.drop_rate)
        return a_BHtE.masked_fill(blind, 0)

    def mask(self, sight: Sight) -> Tensor:
        """What is added to q·k in self-attention: the bias, and -inf where nothing is seen."""
        bias, visible = self.scale.bias(sight.bias_bHtk), sight.visible_b1tk
        assert visible is not None, "only tokens that are read one at a time have no mask"
        bias = torch.zeros(visible.shape, device=visible.device) if bias is None else bias
        return masked(bias, visible)

    def finish(self, x_BtD: Tensor, *heads_BHtE: Tensor) -> Tensor:
        """Back from attention to the residual stream, and through the feed-forward."""
        merged = [merge_heads(a) for a in heads_BHtE]
        a_BtX = merged[0] if len(merged) == 1 else torch.cat(merged, dim=-1)
        y_BtD = x_BtD + self.output(a_BtX)
        f_BtD = self.ffn(self.ffn_norm(y_BtD))
        return y_BtD + F.dropout(f_BtD, self.dropout, self.training)

    def normed(self, x_BtD: Tensor) -> Tensor:
        return F.dropout(self.attention_norm(x_BtD), self.dropout, self.training)

    def queries(self, h_BtD: Tensor) -> Tensor:
        return self.scale.query(split_heads(self.query(h_BtD), self.num_heads))

    def pairs(self, h_BtD: Tensor) -> Pairs:
        k_BHtE = self.scale.key(split_heads(self.key(h_BtD), self.num_heads))
        return Pairs(k_BHtE, split_heads(self.value(h_BtD), self.num_heads))

    @property
    def drop_rate(self) -> float:
        return self.dropout if self.training else 0.0


class AttentionScale(nn.Module):
    """How q·k becomes a logit: divided by √E, or of unit vectors times a learned scale per head."""

    roles: ClassVar = {"factor": "gates"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.root = math.sqrt(config.head_size)
        start = attention_start(config)
        self.factor = (
            None if start is None else nn.Parameter(torch.full((config.num_heads,), start))
        )

    def query(self, q_BHtE: Tensor) -> Tensor:
        if self.factor is None:
            return q_BHtE / self.root
        return unit(q_BHtE, self.factor.abs().view(-1, 1, 1))

    def key(self, k_BHkE: Tensor) -> Tensor:
        return k_BHkE if self.factor is None else unit(k_BHkE)

    def raw_query(self, q_BHtE: Tensor) -> Tensor:
        """A query as it was before scaling, with entries of about unit size: √E·unit(q) where
        queries are unit vectors."""
        if self.factor is None:
            return q_BHtE * self.root
        return q_BHtE * (self.root / self.factor.abs().clamp(min=EPSILON))[:, None, None]

    def raw_key(self, k_BHkE: Tensor) -> Tensor:
        """The same for a key."""
        return k_BHkE if self.factor is None else k_BHkE * self.root

    def bias(self, bias_bHtk: Tensor | None) -> Tensor | None:
        if self.factor is None or bias_bHtk is None:
            return bias_bHtk
        return bias_bHtk * self.factor.abs().view(-1, 1, 1)


def attention_start(config: ModelConfig) -> float | None:
    """The learned scale before training; None where there is none."""
    starts = {"scaled": None, "normalised": 1.0, "normalised-root": math.sqrt(config.head_size)}
    return starts[config.answers.attention]


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig, bias: bool) -> None:
        super().__init__()
        self.hidden = Linear(config.width, config.ffn_width, bias)
        self.output = Linear(config.ffn_width, config.width, bias)
        self.activation = ACTIVATIONS[config.answers.activation]

    def forward(self, h_BtD: Tensor) -> Tensor:
        f_BtF = self.hidden(h_BtD)
        if self.activation is F.relu and not is_kept(self.hidden):
            return self.output(F.relu_(f_BtF))
        return self.output(self.activation(f_BtF))


class RelativePositionBias(nn.Module):
    """T5 buckets: one table per layer and head, looked up by the distance from query to key.

    The tables live together at the root of the model, so that one lookup serves all layers and all
    windows of a segment, also when the layers themselves are sharded.
    """

    def __init__(self, config: ModelConfig, layers: list[int]) -> None:
        super().__init__()
        start_HK = torch.zeros(config.num_heads, NUM_BUCKETS)
        if config.answers.bias_start == "near":
            start_HK = near_bias(config.num_heads) / (attention_start(config) or 1.0)
        self.tables = nn.ParameterDict(
            {str(layer): nn.Parameter(start_HK.clone()) for layer in layers}
        )

    def forward(self, layers: Iterable[int], distance_btk: Tensor) -> dict[int, Tensor]:
        """A (b, H, t, k) bias for each of these layers that has one."""
        return self._look_up(layers, bucket_of_distance(distance_btk), batched=True)

    def by_distance(self, layers: Iterable[int], count: int) -> dict[int, Tensor]:
        """The bias at the distances count - 1, …, 1, 0, as (H, count), for each layer."""
        weight = next(iter(self.tables.values()), None)
        if weight is None:
            return {}
        return self._look_up(layers, falling_buckets(count, weight.device), batched=False)

    def _look_up(self, layers: Iterable[int], buckets: Tensor, batched: bool) -> dict[int, Tensor]:
        biased = [layer for layer in layers if str(layer) in self.tables]
        if not biased:
            return {}
        tables_NHK = torch.stack([self.tables[str(layer)] for layer in biased])
        bias = tables_NHK[:, :, buckets]
        bias = bias.transpose(1, 2) if batched else bias
        return dict(zip(biased, bias.unbind(0), strict=True))


class RMSNorm(nn.RMSNorm):
    def __init__(self, width: int) -> None:
        super().__init__(width, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        """In the numbers of its weight: under autocast on a CPU products come in bfloat16."""
        return super().forward(x.to(self.weight.dtype))


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
        mask = bias if visible is None else masked(bias, visible)
        if bias.requires_grad and q_BHtE.device.type == "cpu":
            # On CPU a bias with a gradient takes torch's slow general path: this is faster.
            scores_BHtk = q_BHtE @ k_BHkE.transpose(2, 3)
            # A sum of two types, as autocast would make it, passes through memory three times.
            p_BHtk = scores_BHtk.add_(mask.to(scores_BHtk.dtype)).softmax(-1)
            return F.dropout(p_BHtk, dropout, dropout > 0) @ v_BHkE
    return F.scaled_dot_product_attention(
        q_BHtE, k_BHkE, v_BHkE, attn_mask=mask, dropout_p=dropout, scale=1.0
    )


def masked(bias_bHtk: Tensor, visible_b1tk: Tensor) -> Tensor:
    """The bias, and -inf where nothing is seen: by a sum, because visibility has fewer entries than
    the bias, and a sum has no gradient to compute."""
    return bias_bHtk + torch.where(visible_b1tk, 0.0, float("-inf")).to(bias_bHtk.dtype)


def bucket_of_distance(distance: Tensor) -> Tensor:
    """T5's unidirectional buckets: exact up to 15, then logarithmic up to 128."""
    exact = NUM_BUCKETS // 2
    steps = torch.log(distance.clamp(min=exact).double() / exact) / math.log(MAX_DISTANCE / exact)
    # The small addition keeps exact powers (32, 64) from falling into the bucket below.
    coarse = exact + (steps * (NUM_BUCKETS - exact) + 1e-9).long()
    return torch.where(distance < exact, distance.clamp(min=0), coarse.clamp(max=NUM_BUCKETS - 1))


def near_bias(num_heads: int) -> Tensor:
    """A (H, buckets) bias, in logits. Of four heads the first looks at the token before, half of
    what copying needs; the bias of the next two falls by 1/4 and 1/16 with every token of distance,
    as in ALiBi; the last sees all alike. Fewer heads are the last ones."""
    exact = NUM_BUCKETS // 2
    bucket_K = torch.arange(NUM_BUCKETS)
    far_K = exact * (MAX_DISTANCE / exact) ** ((bucket_K - exact) / exact)
    distance_K = torch.where(bucket_K < exact, bucket_K, far_K)
    starts = [4.0 * (bucket_K == 1), -distance_K / 4, -distance_K / 16, 0.0 * distance_K]
    return torch.stack([starts[(head - num_heads) % 4] for head in range(num_heads)])


@functools.cache
def falling_buckets(count: int, device: torch.device) -> Tensor:
    """Of the distances count - 1, …, 1, 0: a constant."""
    with torch.inference_mode(False):
        return bucket_of_distance(torch.arange(count - 1, -1, -1, device=device))


def unit(x: Tensor, length: Tensor | None = None) -> Tensor:
    """Vectors of length 1, or of this one."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        factor = torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)
        return x * (factor if length is None else factor * length)
    # The same in fewer passes: √(|x|² + ε) is the hypotenuse of |x| and √ε.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    norm = norm.hypot_(root_of_epsilon(x.dtype, x.device))
    return x / (norm if length is None else norm / length)


@functools.cache
def root_of_epsilon(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A constant."""
    with torch.inference_mode(False):
        return torch.tensor(EPSILON**0.5, dtype=dtype, device=device)


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


def is_kept(linear: nn.Module) -> bool:
    """Whether anybody else may have, or need, what the module returns: then nothing may be written
    into it."""
    hooks = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    return type(linear) is not Linear or any(getattr(linear, name) for name in hooks)


def randomise(parameter: Tensor, std: float) -> None:
    """Fills with a normal distribution cut at two deviations."""
    if not parameter.is_meta:  # random numbers on the meta device cost a second of imports
        nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)
