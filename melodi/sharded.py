"""The whole of a sharded tensor, and the shard of a whole one; ordinary tensors as they are."""

from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Asked this way because the import of torch.distributed.tensor takes a second."""
    return hasattr(tensor, "placements")


def gather(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor; ordinary tensors as they are."""
    sharded: Any = tensor
    return sharded.full_tensor() if is_sharded(tensor) else tensor


def shard_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, sharded as the parameter is along the dimensions that both have in full; one
    that is sharded already as it is."""
    if not is_sharded(parameter) or tensor.dim() == 0 or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    like: Any = parameter
    # Every rank has the whole tensor: nothing is sent.
    tensor = tensor.to(like.device)
    placements = _placements(tensor.shape, parameter)
    return distribute_tensor(tensor, like.device_mesh, placements, src_data_rank=None)


def empty_like_shard(size: torch.Size, dtype: torch.dtype, parameter: Tensor | None) -> Tensor:
    """A place for a tensor of this whole size, sharded as `shard_like` would."""
    if parameter is None or not is_sharded(parameter) or not size:
        return torch.empty(size, dtype=dtype)
    from torch.distributed import tensor

    like: Any = parameter
    placements = _placements(size, parameter)
    return tensor.empty(size, dtype=dtype, device_mesh=like.device_mesh, placements=placements)


def _placements(size: torch.Size, parameter: Tensor) -> list[Any]:
    from torch.distributed.tensor import Replicate

    like: Any = parameter
    return [
        p if p.is_shard() and size[p.dim] == parameter.size(p.dim) else Replicate()
        for p in like.placements
    ]
