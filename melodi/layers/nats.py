"""Nats of targets straight from hidden vectors: no more than a chunk of logits exists at a time,
in each of the few threads that compute them.

The gradient is taken in the forward pass, chunk by chunk, while the logits are there. That is
possible because what comes back from a sum is one number; any other gradient is computed again.

Shapes: n predictions, D width, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from melodi.precision import product_dtype
from melodi.sharded import is_sharded
from melodi.threads import side_by_side

CHUNK_LOGITS = 1 << 20
"""Logits that should exist at the same time: more leave the cache, and are mapped afresh."""
MOST_LOGITS = 1 << 22
"""And that exist at most."""
CHUNK_ROWS = (128, 512)
"""Predictions of a chunk, if they may be chosen: fewer would read a large table too often, and more
gain nothing."""


def linear_nats(x_nD: Tensor, weight_VD: Tensor, targets_n: Tensor, scale: float) -> Tensor:
    """-log softmax(scale · x·Wᵀ) at each target; zero where it is -1."""
    if torch.is_grad_enabled() and (x_nD.requires_grad or weight_VD.requires_grad):
        nats_n: Tensor = LinearNats.apply(x_nD, weight_VD, targets_n, scale)
        return nats_n

    def nats_of(chunk: tuple[Tensor, Tensor]) -> Tensor:
        x_cD, target_c = chunk
        return nats_in_place(logits_of(x_cD, weight_VD, scale), target_c)[0]

    parts = list(chunks(x_nD, targets_n, len(weight_VD)))
    if x_nD.device.type == "cpu" and not is_sharded(weight_VD):
        return torch.cat(side_by_side(nats_of, parts))
    return torch.cat([nats_of(part) for part in parts])


class LinearNats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_nD: Tensor, weight_VD: Tensor, targets_n: Tensor, scale: float
    ) -> Tensor:
        ctx.scale = scale
        one_n = torch.ones((), device=x_nD.device).expand(len(x_nD))
        nats_n, *grads = nats_and_gradients(x_nD, weight_VD, targets_n, one_n, scale)
        ctx.save_for_backward(x_nD, weight_VD, targets_n, *grads)
        return nats_n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_n: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_nD, weight_VD, targets_n, grad_x_nD, grad_weight_VD = ctx.saved_tensors
        if grad_n.stride() == (0,):  # one number, seen n times: the gradient of a sum
            return grad_x_nD * grad_n[0], grad_weight_VD * grad_n[0], None, None
        _, *grads = nats_and_gradients(x_nD, weight_VD, targets_n, grad_n, ctx.scale)
        return grads[0], grads[1], None, None


def nats_and_gradients(
    x_nD: Tensor, weight_VD: Tensor, targets_n: Tensor, grad_n: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The nats, and the gradients of their sum weighted by `grad_n`."""
    nats, grads_x = [], []
    grad_weight_VD = torch.zeros_like(weight_VD)
    start = 0
    for x_cD, target_c in chunks(x_nD, targets_n, len(weight_VD)):
        p_cV = logits_of(x_cD, weight_VD, scale)
        nats_c, total_c1, place_c1 = nats_in_place(p_cV, target_c)
        nats.append(nats_c)
        counted_c1 = (target_c >= 0)[:, None]
        weight_c1 = grad_n[start : start + len(x_cD), None].to(p_cV.dtype) * counted_c1 * scale
        # d nats / d logits = softmax - one at the target, in the memory of the logits.
        p_cV = p_cV.mul_(weight_c1 / total_c1).scatter_add_(1, place_c1, -weight_c1)
        # Once for both products: what is turned around is slow to convert.
        p_cV = p_cV.to(product_dtype(x_nD))
        grads_x.append(p_cV @ weight_VD)
        grad_weight_VD += p_cV.T @ x_cD
        start += len(x_cD)
    return torch.cat(nats), torch.cat(grads_x).to(x_nD.dtype), grad_weight_VD


def nats_in_place(logits_cV: Tensor, target_c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The nats of the targets. The logits become exp(logit - largest); their sums, and where the
    targets are, come with the nats. No second table of this size is mapped."""
    place_c1 = target_c.clamp(min=0)[:, None]
    largest_c1, found_c1 = logits_cV.amax(-1, keepdim=True), logits_cV.gather(1, place_c1)
    total_c1 = logits_cV.sub_(largest_c1).exp_().sum(-1, keepdim=True)
    # The two logits may be large, their difference is what counts.
    nats_c1 = total_c1.log() + (largest_c1 - found_c1)
    return nats_c1[:, 0].masked_fill(target_c < 0, 0), total_c1, place_c1


def logits_of(x_nD: Tensor, weight_VD: Tensor, scale: float) -> Tensor:
    """In float32 at least: bfloat16 would round nats to two digits."""
    logits_nV = F.linear(x_nD, weight_VD)
    logits_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
    return logits_nV if scale == 1.0 else logits_nV * scale


def chunks(x_nD: Tensor, targets_n: Tensor, vocab_size: int) -> "zip[tuple[Tensor, Tensor]]":
    fewest, most = CHUNK_ROWS
    size = min(max(CHUNK_LOGITS // vocab_size, fewest), most, max(MOST_LOGITS // vocab_size, 1))
    return zip(x_nD.split(size), targets_n.split(size), strict=True)
