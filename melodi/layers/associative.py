"""A matrix that stores values under features of keys: what Infini-attention and ARMT share.

It is carried with z, the sum of all features that were stored, by which a reading is divided. Both
grow with every window of a document, so their arithmetic is in their own precision, also under
autocast: in half precision they would overflow, and lose what is added late.

Shapes: t tokens, K features, D width of a value; leading dimensions are rows, or rows and heads.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def exact(like: Tensor) -> AbstractContextManager[object]:
    """Switches autocast off, where the device of this tensor has it."""
    if not torch.amp.is_autocast_available(like.device.type):
        return nullcontext()
    return torch.autocast(like.device.type, enabled=False)


def recalled(f_tK: Tensor, matrix_KD: Tensor, z_K: Tensor, epsilon: float = 0.0) -> Tensor:
    """f·A / (f·z + ε): the mean of the values stored, weighted by how alike their keys are.

    Zero where nothing is stored. The divisor is chosen before dividing: a quotient by zero that is
    masked afterwards would still have no gradient.
    """
    divisor_t1 = f_tK @ z_K[..., None] + epsilon
    return f_tK @ matrix_KD / torch.where(divisor_t1 > 0, divisor_t1, 1)


def stored(f_tK: Tensor, v_tD: Tensor, matrix_KD: Tensor) -> Tensor:
    """A + Σ f ⊗ v."""
    return matrix_KD + f_tK.mT @ v_tD
