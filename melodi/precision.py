"""In which numbers products are computed: float32, or bfloat16 where the machine gains from it.

- "bf16" is torch's autocast: weights, memory, residual stream, norms and the loss stay in float32.
- "auto" asks the machine. A GPU says whether it has bfloat16; on a CPU a product of the model's
  shape is timed in both, because without instructions for it bfloat16 is many times slower.
"""

import functools
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F

from melodi.config import ModelConfig
from melodi.config.training import Precision

CLEARLY = 1.5
"""On a CPU products must be so many times faster: of a whole step they are only a part."""
HOPELESS = 0.25
"""Where they are that much slower, two tries are enough."""
TRIES = 5


def resolve(precision: str, device: torch.device, model: ModelConfig) -> Literal["fp32", "bf16"]:
    """What "auto" means on this machine for a model; "fp32" and "bf16" as they are."""
    if precision not in get_args(Precision):
        known = ", ".join(get_args(Precision))
        raise ValueError(f"precision={precision!r} is unknown: choose one of {known}")
    if precision != "auto":
        return "bf16" if precision == "bf16" else "fp32"
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if device.type != "cpu":
        return "fp32"
    return "bf16" if bf16_gain(model.width, model.ffn_width) >= CLEARLY else "fp32"


@functools.cache
def bf16_gain(width: int, ffn_width: int) -> float:
    """How many times faster this CPU multiplies in bfloat16; measured in a tenth of a second, once,
    so that all documents of a reading get the same answer."""
    shapes = (128, min(width, 256)), (min(ffn_width, 1024), min(width, 256))
    single, half = (
        [torch.ones(shape, dtype=dtype, device="cpu") for shape in shapes]
        for dtype in (torch.float32, torch.bfloat16)
    )
    _seconds(*single), _seconds(*half)  # the first time both are prepared
    gains: list[float] = []
    while len(gains) < TRIES and not (len(gains) > 1 and max(gains) < HOPELESS):
        gains.append(_seconds(*single) / _seconds(*half))
    return statistics.median(gains)


def _seconds(inputs: torch.Tensor, weights: torch.Tensor) -> float:
    with torch.inference_mode():
        started = time.perf_counter()
        F.linear(inputs, weights)
        return time.perf_counter() - started


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Around a forward pass, in training and in use."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """In which numbers torch multiplies it here, by itself: autocast leaves float64 alone."""
    device = x.device.type
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def use_tensor_cores(device: torch.device) -> None:
    """float32 products on a GPU in TF32: eight times as fast on an A100, inputs rounded to 10 bits
    of mantissa. NVIDIA_TF32_OVERRIDE=0 in the environment forbids it."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
