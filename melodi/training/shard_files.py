"""Sharded tensors as files: each process writes its own part, and reads what it needs of all parts.

torch's distributed checkpoints (DCP) plan who writes and reads what, in any number of processes.
The parts are safetensors, which say themselves where in the whole they belong: nothing is pickled.
DCP is imported where it is used, because that takes a second.
"""

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

Place = Callable[[str, torch.Size, torch.dtype], Tensor]
"""Makes the tensor, whole or sharded, into which that of a name, size and type is read."""


def write_shards(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """All processes at the same time, into a folder that is there; the tensors are on the host. A
    failure of one is that of all."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        save(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        reason, _ = next(iter(error.failures.values()))
        raise OSError(f"{folder} cannot be written: {reason}") from error


def read_shards(folder: Path, place: Place, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """All processes at the same time, or one alone."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    about = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    tensors = {
        name: place(name, found.size, found.properties.dtype)  # type: ignore[union-attr]
        for name, found in about.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit")
        load(
            tensors,
            storage_reader=HuggingFaceStorageReader(str(folder)),
            process_group=group,
            no_dist=group is None,
        )
    return tensors
