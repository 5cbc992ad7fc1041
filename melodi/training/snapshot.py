"""What a checkpoint holds, and the two forms that it has.

- Whole: weights and optimizer are one file of whole tensors each, which the first process writes.
- Sharded, where the model is: `sharded/` has a file of each process (shard_files.py), and no
  process ever holds the whole.
- In both, memory is stored by global row, and trainer.json has the rest. Either form is read by any
  number of processes, whether their model is sharded or not.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from melodi.files import read_json, read_tensors, write_json, write_tensors
from melodi.memory import Fingerprint, MemoryState
from melodi.model import LanguageModel
from melodi.run import set_weights
from melodi.sharded import empty_like_shard
from melodi.training.checkpoint import MOMENTS, SHARDS, TRAINER, WEIGHTS, load_rows, save_rows
from melodi.training.distributed import Processes
from melodi.training.parameters import restore_state
from melodi.training.shard_files import read_shards, write_shards


@dataclass(frozen=True)
class Snapshot:
    """A learner as it stands after a step. Sharded, it holds copies on the host, and can be written
    while training goes on."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    first_rows: list[int]
    states: list[MemoryState]
    trainer: dict[str, Any]
    sharded: bool

    def write(self, folder: Path, group: Processes) -> None:
        """Each process writes its part of a new checkpoint."""
        if self.sharded:  # first: here a process that fails tells the others
            tensors = {f"weights/{name}": tensor for name, tensor in self.weights.items()}
            tensors |= {f"moments/{name}": tensor for name, tensor in self.moments.items()}
            assert group.behind is not None
            write_shards(folder / SHARDS, tensors, group.behind)
        elif group.first:
            write_tensors(folder / WEIGHTS, self.weights, {"step": str(self.trainer["step"])})
            write_tensors(folder / MOMENTS, self.moments)
        for first, state in zip(self.first_rows, self.states, strict=True):
            save_rows(folder, first, state)
        if group.first:
            write_json(folder / TRAINER, self.trainer)


def owner_of(model: LanguageModel, step: int, sharded: bool) -> Fingerprint:
    """Whose the memory in a checkpoint is. A digest of sharded weights would gather them all; there
    the step says it, and the checkpoint's checksums hold its files together."""
    return Fingerprint(model.config.digest(), f"step {step}") if sharded else model.fingerprint()


def read_checkpoint(
    folder: Path, model: LanguageModel, optimizer: Optimizer, group: Processes
) -> dict[str, Any]:
    """Puts weights and moments back; gives what trainer.json says."""
    if not (folder / SHARDS).is_dir():
        set_weights(model, read_tensors(folder / WEIGHTS)[1], folder / WEIGHTS)
        restore_state(optimizer, model, read_tensors(folder / MOMENTS)[1])
        return dict(read_json(folder / TRAINER))
    parameters = dict(model.named_parameters())

    def place(path: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        kind, _, name = path.partition("/")
        name = name if kind == "weights" else name.rpartition("/")[0]
        return empty_like_shard(size, dtype, parameters.get(name))

    tensors = read_shards(folder / SHARDS, place, group.host)
    parts: dict[str, dict[str, Tensor]] = {"weights": {}, "moments": {}}
    for path, tensor in tensors.items():
        kind, _, name = path.partition("/")
        parts[kind][name] = tensor
    set_weights(model, parts["weights"], folder / SHARDS)
    restore_state(optimizer, model, parts["moments"])
    return dict(read_json(folder / TRAINER))


def read_memory(
    folder: Path, model: LanguageModel, step: int, first_rows: list[int], count: int
) -> list[MemoryState]:
    """The memory of these rows, as the model's own: the model would check whose it is in its
    forward pass, where the weights of a sharded model cannot be gathered."""
    expected = owner_of(model, step, sharded=(folder / SHARDS).is_dir())
    owner, device = model.empty_state(1).owner, model.embedding.weight.device
    states = []
    for first in first_rows:
        state = load_rows(folder, first, count).to(device)
        if state.owner.fingerprint() != expected:
            raise ValueError(f"the memory in {folder} was made with other weights than its own")
        states.append(replace(state, owner=owner))
    return states
