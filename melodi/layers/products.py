"""Products of single tokens with weights of four, two or one byte.

Where a token is bound by the bytes of its weights, fewer bytes are faster. Narrow weights are
copies: whoever keeps them must see to it that they are still those of the model.

Shapes: B rows, D inputs, X outputs.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Numbers = Literal["fp32", "bf16", "int8"]
"""fp32 stands for the weights as they are."""
Product = Callable[[Tensor], Tensor]
"""W·x + b of each row."""

STEP = 64
"""Inputs that the kernel for int8 takes at a time; of other numbers it reads beyond the end."""


def product(weight_XD: Tensor, bias_X: Tensor | None, numbers: Numbers) -> Product:
    if numbers == "fp32":
        return partial(F.linear, weight=weight_XD, bias=bias_X)
    if numbers == "bf16":
        return partial(_bf16, weight_XD.bfloat16(), bias_X)
    return partial(_int8, *to_int8(weight_XD), bias_X)


def to_int8(weight_XD: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127, and what each row of them is to be multiplied with: in bf16,
    as the kernel takes it, and rounded before the weights are, so that both fit together."""
    weight_XD = F.pad(weight_XD, (0, -weight_XD.size(1) % STEP))
    scale_X = (weight_XD.abs().amax(1) / 127).clamp(min=1e-30).bfloat16()
    whole_XD = (weight_XD / scale_X.to(weight_XD.dtype)[:, None]).round().clamp(-127, 127)
    return whole_XD.to(torch.int8), scale_X


def _bf16(half_XD: Tensor, bias_X: Tensor | None, x_BD: Tensor) -> Tensor:
    y_BX = F.linear(x_BD.bfloat16(), half_XD).to(x_BD.dtype)
    return y_BX if bias_X is None else y_BX + bias_X


def _int8(whole_XD: Tensor, scale_X: Tensor, bias_X: Tensor | None, x_BD: Tensor) -> Tensor:
    x_BD = F.pad(x_BD, (0, -x_BD.size(1) % STEP)) if x_BD.size(1) % STEP else x_BD
    y_BX = torch._weight_int8pack_mm(x_BD.bfloat16(), whole_XD, scale_X).to(x_BD.dtype)
    return y_BX if bias_X is None else y_BX + bias_X
