"""The whole of a sharded tensor, and the shard of a whole one; ordinary tensors as they are."""

from typing import Any

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Asked this way because the import of torch.distributed.tensor takes a second."""
    return hasattr(tensor, "placements")


def gather(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor; ordinary tensors as they are."""
    sharded: Any = tensor
    return sharded.full_tensor() if is_sharded(tensor) else tensor


def shard_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, sharded as the parameter is along the dimensions that both have in full."""
    if not is_sharded(parameter) or tensor.dim() == 0:
        return tensor
    from torch.distributed.tensor import Replicate, distribute_tensor

    like: Any = parameter
    placements = [
        p if p.is_shard() and tensor.size(p.dim) == parameter.size(p.dim) else Replicate()
        for p in like.placements
    ]
    # Every rank has the whole tensor: nothing is sent.
    tensor = tensor.to(like.device)
    return distribute_tensor(tensor, like.device_mesh, placements, src_data_rank=None)
