"""Products of single tokens with weights of four, two or one byte.

Where a token is bound by the bytes of its weights, fewer bytes are faster. Narrow weights are
copies: whoever keeps them must see to it that they are still those of the model.

Shapes: B rows, D inputs, X outputs.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Numbers = Literal["fp32", "bf16", "int8"]
"""fp32 stands for the weights as they are."""

STEP = 64
"""Inputs that torch's kernel for int8 takes at a time; of other numbers it reads beyond the end."""


class Product:
    """W·x + b of each row."""

    def __init__(self, weight_XD: Tensor, bias_X: Tensor | None, numbers: Numbers) -> None:
        self.numbers, self.bias_X = numbers, bias_X
        self.outputs, self.inputs = weight_XD.shape
        self.weight_XD, self.scale_X = weight_XD, None
        if numbers == "bf16":
            self.weight_XD = weight_XD.bfloat16()
        elif numbers == "int8":
            self.weight_XD, self.scale_X = to_int8(weight_XD)

    def __call__(self, x_BD: Tensor) -> Tensor:
        if self.numbers == "fp32":
            return F.linear(x_BD, self.weight_XD, self.bias_X)
        half_BD = x_BD.bfloat16()
        if self.scale_X is None:
            y_BX = F.linear(half_BD, self.weight_XD)
        else:
            half_BD = F.pad(half_BD, (0, -self.inputs % STEP)) if self.inputs % STEP else half_BD
            y_BX = torch._weight_int8pack_mm(half_BD, self.weight_XD, self.scale_X)
        y_BX = y_BX.to(x_BD.dtype)
        return y_BX if self.bias_X is None else y_BX + self.bias_X


def to_int8(weight_XD: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127, and what each row of them is to be multiplied with: in bf16,
    as the kernel takes it, and rounded before the weights are, so that both fit together."""
    weight_XD = F.pad(weight_XD, (0, -weight_XD.size(1) % STEP))
    scale_X = (weight_XD.abs().amax(1) / 127).clamp(min=1e-30).bfloat16()
    whole_XD = (weight_XD / scale_X.to(weight_XD.dtype)[:, None]).round().clamp(-127, 127)
    return whole_XD.to(torch.int8), scale_X
