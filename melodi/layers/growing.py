"""Attention to a FIFO that grows while a segment is trained on, on the CPU.

Inside a segment a FIFO is two parts: `base`, as it was when the segment began, without gradient and
the same tensor for all windows, and `fresh`, the few slots that were appended since. So no window
keeps a queue of its own for the backward pass, and no gradient of old slots is computed.
Every row attends to what it has filled, and to nothing else; slots that count as zeros only add
their number to the sum by which the softmax divides.

Shapes: B rows, H heads, t query tokens, M slots of the base, f fresh slots, E head width.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from melodi.layers.fifo import push
from melodi.layers.frame import WindowPart
from melodi.layers.transformer import Pairs
from melodi.precision import product_dtype

CHUNK = 512
"""Slots of the base that the backward pass takes at a time: their scores stay in the cache."""


def attend_filled(
    q_BHtE: Tensor,
    base: Pairs,
    fresh: Pairs,
    part: WindowPart,
    entries_per_window: int,
    masked: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Attention to what each row has filled; None where no row has filled anything. Also the rows
    that have not; None where all have."""
    slots = base.keys_BHkE.size(2)
    newest = min(fresh.keys_BHkE.size(2), slots)
    written = [n * entries_per_window for n in part.windows_read]
    if masked and not any(written):
        return None, None
    old = [min(n, slots) - newest for n in written]
    zeros = [0 if masked else slots - newest - n for n in old]
    empty_B = part.windows_read_B == 0 if masked and 0 in written else None
    return attend_growing(q_BHtE, base, fresh.slots(-newest), old, zeros), empty_B


def begun(queue: Pairs) -> tuple[Pairs, Pairs]:
    """The FIFO as `base`, in the numbers of its products, and as `fresh` nothing yet."""
    return queue.to(product_dtype(queue.keys_BHkE)), queue.slots(0, 0)


def pushed(base: Pairs, fresh: Pairs) -> Pairs:
    """The FIFO with its fresh slots, in the numbers that it is carried in: products that autocast
    has made, and that are all that base holds, lose nothing on the way."""
    base = base.to(fresh.keys_BHkE.dtype)
    keys, values = (push(old, new, 2) for old, new in zip(base, fresh, strict=True))
    return Pairs(keys, values)


def attend_growing(
    q_BHtE: Tensor, base: Pairs, fresh: Pairs, old: Sequence[int], zeros: Sequence[int]
) -> Tensor:
    """softmax(q·k)·v over the newest `old` slots of the base, the fresh ones, and as many slots of
    zeros, each given by row. Zero where a row has none of them."""
    numbers = base.keys_BHkE.dtype
    q_BHtE, fresh = q_BHtE.to(numbers), fresh.to(numbers)
    return GrowingAttention.apply(q_BHtE, *base, *fresh, tuple(old), tuple(zeros))


class GrowingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHtE: Tensor,
        base_keys: Tensor,
        base_values: Tensor,
        fresh_keys: Tensor,
        fresh_values: Tensor,
        old: tuple[int, ...],
        zeros: tuple[int, ...],
    ) -> Tensor:
        base, fresh = Pairs(base_keys, base_values), Pairs(fresh_keys, fresh_values)
        if len(set(zip(old, zeros, strict=True))) == 1:
            out_BHtE, total_BHt1 = attend_parts(q_BHtE, base, fresh, old[0], zeros[0])
        else:
            one = [slice(b, b + 1) for b in range(len(old))]
            rows = [
                attend_parts(q_BHtE[b], base.rows(b), fresh.rows(b), *counts)
                for b, *counts in zip(one, old, zeros, strict=True)
            ]
            out_BHtE, total_BHt1 = (torch.cat(parts) for parts in zip(*rows, strict=True))
        ctx.save_for_backward(q_BHtE, *base, *fresh, out_BHtE, total_BHt1)
        ctx.old = old
        return out_BHtE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHtE: Tensor) -> tuple[Tensor | None, ...]:
        q_BHtE, base_keys, base_values, *fresh, out_BHtE, total_BHt1 = ctx.saved_tensors
        # Products take a rounded total, which puts all weights of a query off by one factor. Every
        # use of a weight is a product with this gradient, so that the factor is mended here.
        exact_BHt1, total_BHt1 = total_BHt1, total_BHt1.to(q_BHtE.dtype)
        grad_BHtE = (grad_BHtE * (total_BHt1 - exact_BHt1).exp()).to(q_BHtE.dtype).contiguous()
        delta_BHt1 = (grad_BHtE * out_BHtE).sum(-1, keepdim=True)
        grads_q, grads_fresh = [], []
        for b, slots in enumerate(ctx.old):
            q, grad = q_BHtE[b].contiguous(), grad_BHtE[b]
            minus_total, minus_delta = -total_BHt1[b], -delta_BHt1[b]
            grad_q = torch.zeros_like(q)

            def weights(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                """The softmax p over these slots, and the gradient of q·k."""
                p = torch.baddbmm(minus_total, q, k.mT).exp_()  # noqa: B023
                return p, torch.baddbmm(minus_delta, grad, v.mT).mul_(p)  # noqa: B023

            end = base_keys.size(2)
            for start in range(end - slots, end, CHUNK):
                k = base_keys[b, :, start : start + CHUNK]
                _, ds = weights(k, base_values[b, :, start : start + CHUNK])
                grad_q.baddbmm_(ds, k)
            p, ds = weights(fresh[0][b], fresh[1][b])
            grad_q.baddbmm_(ds, fresh[0][b])
            grads_q.append(grad_q)
            if ctx.needs_input_grad[3] or ctx.needs_input_grad[4]:
                grads_fresh.append((ds.mT @ q, p.mT @ grad))
        grad_q_BHtE = torch.stack(grads_q)
        if not grads_fresh:
            return grad_q_BHtE, *[None] * 6
        keys, values = (torch.stack(grads) for grads in zip(*grads_fresh, strict=True))
        return grad_q_BHtE, None, None, keys, values, None, None


def attend_parts(
    q_BHtE: Tensor, base: Pairs, fresh: Pairs, old: int, zeros: int
) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithm of the sum of exp(q·k), in float32 at least: each part by
    itself, then together."""
    parts = []
    wide = torch.promote_types(q_BHtE.dtype, torch.float32)
    if old:
        out_BHtE, total_BHt = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHtE, *base.slots(-old), scale=1.0
        )
        parts.append((out_BHtE, total_BHt[..., None].to(wide)))
    if fresh.keys_BHkE.size(2):
        scores_BHtf = (q_BHtE @ fresh.keys_BHkE.mT).to(wide)
        total_BHt1 = scores_BHtf.logsumexp(-1, keepdim=True)
        p_BHtf = scores_BHtf.sub_(total_BHt1).exp_().to(q_BHtE.dtype)
        parts.append((p_BHtf @ fresh.values_BHkE, total_BHt1))
    if zeros or not parts:
        nothing_BHtE = torch.zeros_like(q_BHtE)
        parts.append((nothing_BHtE, nothing_BHtE[..., :1].to(wide) + math.log(max(zeros, 1))))
    out_BHtE, total_BHt1 = parts[0]
    for other_BHtE, other_BHt1 in parts[1:]:
        share_BHt1 = (other_BHt1 - total_BHt1).sigmoid().to(q_BHtE.dtype)
        out_BHtE = torch.lerp(out_BHtE, other_BHtE, share_BHt1)
        total_BHt1 = torch.logaddexp(total_BHt1, other_BHt1)
    return out_BHtE, total_BHt1
