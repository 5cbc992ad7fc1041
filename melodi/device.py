"""Small tensors on their way from the host to the device."""

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy that waits for nothing; a plain `.to` waits until a GPU has done all that it was given
    before."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
