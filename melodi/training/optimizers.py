"""How the weights move: the paper's Adafactor, AdamW, Muon, and the schedule.

- `Adafactor` follows optax, as the authors do. torch.optim.Adafactor does not: it caps the learning
  rate at 1/√t, has no momentum, factors small matrices too, and fails on FSDP2's sharded tensors.
- Ours works on sharded tensors because the second moments keep their reduced dimensions, so that
  they broadcast, and because only sums cross the shards.
- `Muon` is torch.optim.Muon with products in float32 on a CPU unless the run is in bfloat16, with
  small matrices of one shape together, and one gathering per sharded matrix, not one per product.
- The trainer sets the learning rate of each group: `schedule(...) * group["multiplier"]`.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from melodi.config.training import OptimizerConfig
from melodi.sharded import gather, is_sharded, shard_like
from melodi.training.parameters import MATRICES, parameter_groups

FACTORED_SIZE = 128
"""Second moments are factored over the two largest dimensions if both are at least this long."""
TOGETHER = 1 << 21
"""Entries of matrices that Muon takes at a time: more would need memory, and gain nothing."""
SMALLEST_SQUARE = 1e-30
"""Added to squared gradients, so that a gradient of zero gives an update of zero."""
SMALLEST_SCALE = 1e-3
"""The size that a parameter near zero is taken to have, so that it can move at all."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Muon's polynomial: five times applied, it brings all singular values near one."""


def make_optimizer(model: nn.Module, config: OptimizerConfig, precision: str = "fp32") -> Optimizer:
    """The optimizer of a model whose parameters are where, and sharded as, they will be trained.
    The precision of the run is that of Muon's products on a CPU; elsewhere they are in bf16."""
    groups = parameter_groups(model, config.weight_decay)
    multipliers = {"gates": config.gate_multiplier, "mixers": config.mixer_multiplier}
    for group in groups:
        group["multiplier"] = multipliers.get(group["name"], 1.0)
        group["lr"] = config.peak * group["multiplier"]
    if config.name == "adafactor":
        return Adafactor(groups, config.peak)
    if config.name == "adamw":
        return AdamW(groups, config.peak, config.betas, weight_decay=0.0, fused=True)
    matrices = [group for group in groups if group["name"] in MATRICES]
    rest = [group for group in groups if group["name"] not in MATRICES]
    return CombinedOptimizer(
        Muon(matrices, config.peak, config.momentum, half=precision == "bf16"),
        AdamW(rest, config.peak, config.betas, weight_decay=0.0, fused=True),
    )


def schedule(step: int, peak: float, floor: float, warmup: int, horizon: int) -> float:
    """The learning rate at a step, counted from 1: a cosine from the peak at step 0 to the floor at
    the horizon, where it stays. During warm-up it stands at its value at the end of the warm-up,
    times the share of the warm-up that is done."""
    progress = min(1.0, max(step, warmup) / horizon)
    cosine = floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    return cosine * min(1.0, step / max(warmup, 1))


class Adafactor(Optimizer):
    """optax.adafactor(lr, decay_rate=0.8, momentum=0.9, multiply_by_parameter_scale=True).

    Weight decay differs from optax, which does not multiply it by the learning rate: here it means
    the same as in AdamW and Muon. The paper has none.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        decay_rate: float = 0.8,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = dict(lr=lr, decay_rate=decay_rate, momentum=momentum, weight_decay=weight_decay)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state["momentum"] = torch.zeros_like(parameter)
                state["step"] += 1
                update = _precondition(state, parameter.grad, group["decay_rate"])
                # The root mean squares of the parameter and of the update, both times √n.
                root = math.sqrt(parameter.numel())
                scale = _norm(parameter).clamp(min=SMALLEST_SCALE * root)
                scale = scale / _norm(update).clamp(min=root)
                state["momentum"].mul_(momentum).addcmul_(update, scale, value=(1 - momentum) * lr)
                if group["weight_decay"]:
                    parameter.mul_(1 - lr * group["weight_decay"])
                parameter.sub_(state["momentum"])


def _precondition(state: dict[str, Any], grad: Tensor, decay_rate: float) -> Tensor:
    """The gradient divided by the root of its second moment, whose running mean is in `state`."""
    # The first share is 1: what stands in the state before the first step does not matter.
    share = state["step"].item() ** -decay_rate
    factored = _factored_dims(grad)
    if factored is None:
        if "square" not in state:
            state["square"] = torch.zeros_like(grad)
        state["square"].mul_(1 - share).addcmul_(grad, grad, value=share)
        return state["square"].add_(share * SMALLEST_SQUARE).rsqrt().mul_(grad)
    smaller, larger = factored
    square = grad.square()
    row = _average(state, "row", _mean(square, larger) + SMALLEST_SQUARE, share)
    column = _average(state, "column", _mean(square, smaller) + SMALLEST_SQUARE, share)
    # Fresh memory is slow at first touch: the squares' serves again.
    return torch.mul(grad, (row / _mean(row, smaller)).rsqrt(), out=square).mul_(column.rsqrt())


def _average(state: dict[str, Any], key: str, new: Tensor, share: float) -> Tensor:
    state[key] = state[key].lerp_(new, share) if key in state else new
    return state[key]


def _factored_dims(tensor: Tensor) -> tuple[int, int] | None:
    """The second largest and the largest dimension (among equals the later), if long enough."""
    if tensor.dim() < 2:
        return None
    *_, smaller, larger = sorted(range(tensor.dim()), key=tensor.size)
    return (smaller, larger) if tensor.size(smaller) >= FACTORED_SIZE else None


def _mean(tensor: Tensor, dim: int) -> Tensor:
    # Sharded tensors of uneven length are gathered whole for a mean, but not for a sum.
    return _whole(tensor.sum(dim, keepdim=True)) / tensor.size(dim)


def _norm(tensor: Tensor) -> Tensor:
    return _whole(torch.linalg.vector_norm(tensor))


def _whole(tensor: Tensor) -> Tensor:
    """Sums that each rank holds in part, added up; the identity on ordinary tensors."""
    if not is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    sharded: Any = tensor
    return sharded.redistribute(
        placements=[Replicate() if p.is_partial() else p for p in sharded.placements]
    )


class Muon(Optimizer):
    """Momentum with all singular values brought near one, for matrices only.

    The step has the size of AdamW's (0.2 per entry, in the root mean square), so that the two share
    a learning rate and a weight decay: torch's adjust_lr_fn="match_rms_adamw".
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        half: bool = False,
    ) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.half = half

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameters in together([p for p in group["params"] if p.grad is not None]):
                moving = [gather(self._nesterov(p, group["momentum"])) for p in parameters]
                updates = orthogonalised(torch.stack(moving), self.half)
                for parameter, update in zip(parameters, updates, strict=True):
                    update = shard_like(update.to(parameter.dtype), parameter)
                    size = 0.2 * math.sqrt(max(parameter.shape))
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-group["lr"] * size)

    def _nesterov(self, parameter: Tensor, momentum: float) -> Tensor:
        """The gradient, moved towards its running mean."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(buffer, momentum)


def together(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Matrices of one shape, as many as are small together; sharded ones one by one, so that only
    one is whole at a time."""
    alike: dict[tuple[int, ...], list[Tensor]] = {}
    for parameter in parameters:
        key = (id(parameter),) if is_sharded(parameter) else tuple(parameter.shape)
        alike.setdefault(key, []).append(parameter)
    for same in alike.values():
        count = max(TOGETHER // same[0].numel(), 1)
        yield from (same[start : start + count] for start in range(0, len(same), count))


def orthogonalised(x_nab: Tensor, half: bool) -> Tensor:
    """Newton-Schulz: each matrix with its singular values near one."""
    a, b, c = NEWTON_SCHULZ
    tall = x_nab.size(1) > x_nab.size(2)
    x_nab = x_nab.mT if tall else x_nab
    x_nab = x_nab / torch.linalg.matrix_norm(x_nab, keepdim=True).clamp(min=1e-7)
    single = x_nab.device.type == "cpu" and not half
    x_nab = x_nab.to(torch.float32 if single else torch.bfloat16)
    for _ in range(5):
        gram_naa = x_nab @ x_nab.mT
        factor_naa = torch.baddbmm(gram_naa, gram_naa, gram_naa, beta=b, alpha=c)
        x_nab = torch.baddbmm(x_nab, factor_naa, x_nab, beta=a)
    return x_nab.mT if tall else x_nab


class CombinedOptimizer(Optimizer):
    """Several optimizers, each with its own parameters, as one.

    The groups and the state belong to the whole; the parts see their own groups of it.
    """

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]
