"""One process or many: plain torch, started by torchrun.

- Rows are global: each process owns a contiguous share of them, with their memory.
- DDP by default; FSDP2 (`fully_shard`) for models that do not fit on one device. The windows are
  looped over inside one forward, so the layers stay gathered for a whole segment.
- Sums are reduced in float64, so that every process reports the same numbers.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from melodi.layers.frame import Probe
from melodi.memory import MemoryState
from melodi.model import LanguageModel, Scored
from melodi.precision import use_tensor_cores

Item = TypeVar("Item")
PATIENCE = timedelta(hours=1)
"""How long the processes wait for each other: the first may be writing a large checkpoint."""
MOST_GRAPHS = 64
"""Graphs that torch may compile of one layer function."""


@dataclass(frozen=True)
class Processes:
    """This process among all."""

    rank: int
    world: int
    device: torch.device
    host: dist.ProcessGroup | None = None
    """In which the processes talk without their devices; None for a process that stands alone."""
    behind: dist.ProcessGroup | None = None
    """The same for the threads that write while training goes on."""

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, rows: int) -> range:
        """The global rows of this process."""
        if rows % self.world:
            raise ValueError(
                f"rows={rows} cannot be shared by {self.world} processes: choose a multiple"
            )
        each = rows // self.world
        return range(self.rank * each, (self.rank + 1) * each)

    def barrier(self) -> None:
        if self.host is not None:
            dist.barrier(self.host)

    def total(self, *values: float) -> list[float]:
        """Sums over all processes of numbers that are on the host."""
        tensor = torch.tensor(values, dtype=torch.float64, device="cpu")
        if self.host is not None:
            dist.all_reduce(tensor, group=self.host)
        return tensor.tolist()

    def totals(self, sum: Tensor, other: Tensor) -> tuple[float, float]:
        """The sum over all processes of a number on the device, and one that all have, read
        together."""
        if self.world > 1:
            dist.all_reduce(sum)
        first, second = torch.stack([sum, other.to(sum)]).tolist()
        return first, second

    def gather_behind(self, value: Item) -> list[Item]:
        """What each process says, among the threads that write."""
        if self.behind is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, self.behind)
        return values

    def any(self, flag: bool) -> bool:
        return self.total(float(flag))[0] > 0

    def on_first(self, work: Callable[[], object]) -> None:
        """Work of the first process, for which all wait. Where it fails, all fail: none waits for
        one that has gone on to something else."""
        error: Exception | None = None
        if self.first:
            try:
                work()
            except (ValueError, OSError) as found:
                error = found
        if self.any(error is not None):
            raise error or ValueError("the first process has failed; its own message says why")


@contextmanager
def processes(device: str | None = None) -> Iterator[Processes]:
    """Joins the processes that torchrun started, or stands alone."""
    place = device_of(device, int(os.environ.get("LOCAL_RANK", 0)))
    use_tensor_cores(place)
    if "RANK" not in os.environ:
        yield Processes(0, 1, place)
        return
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        host, behind = (dist.new_group(backend="gloo", timeout=PATIENCE) for _ in range(2))
        yield Processes(dist.get_rank(), dist.get_world_size(), place, host, behind)
    finally:
        dist.destroy_process_group()


def device_of(name: str | None, local_rank: int = 0) -> torch.device:
    """The device of that name, if it is there; without a name the process's GPU, else the CPU."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(f"cuda:{local_rank}" if name == "cuda" else name)
        torch.zeros(1, dtype=torch.float64, device=device).item()  # sums are kept in it
    # torch says it in several ways: no such word, not compiled with it, no such device, no data,
    # no such numbers.
    except (RuntimeError, AssertionError, NotImplementedError, TypeError):
        found = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise ValueError(
            f"device={name!r} is not on this machine: choose {' or '.join(['cpu', *found])}"
        ) from None
    return device


class NatsForward(nn.Module):
    """`model.nats` as a forward pass, which is what DDP and FSDP2 hook into."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        state: MemoryState,
        probe: Probe | None = None,
    ) -> Scored:
        return self.model.nats(tokens_BT, targets_BT, state, probe)


def compile_layers(model: LanguageModel, **options: Any) -> None:
    """Compiles each layer; layers of one structure share their graphs.

    A structure has a graph for the first window of a segment, whose memory has no gradient, one for
    the others, and one each for validation. torch's own limit counts those of all structures
    together, and would silently stop compiling.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    model.static_shapes = True
    for layer in model.layers:
        layer.compile(**options)


def distribute(
    model: LanguageModel,
    group: Processes,
    sharding: str,
    segment_windows: int,
    precision: str = "fp32",
) -> nn.Module:
    """The model as this process runs it: alone, in DDP, or sharded by FSDP2."""
    forward = NatsForward(model)
    if sharding == "fsdp" and dist.is_initialized():
        # Layers return views, which is safe: nothing here writes into what they return.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=False, mp_policy=gathered_in(precision))
        fully_shard(forward, reshard_after_forward=False)
        for module in sharded_modules(forward):
            module.set_reshard_after_backward(False)
        return forward
    if group.world > 1:
        # In a single window nothing is read back, so the memory's writers have no gradient.
        return DistributedDataParallel(forward, find_unused_parameters=segment_windows < 2)
    return forward


def gathered_in(precision: str) -> MixedPrecisionPolicy:
    """How a layer's weights travel: in bf16 as halves, gradients always in float32. What a layer is
    given and gives stays as autocast has it; the embedding and the tables beside the layers travel
    whole, so that the residual stream begins in float32."""
    if precision != "bf16":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)


def without_reduction(module: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Gradients are reduced once, with the last of the accumulated parts."""
    if isinstance(module, DistributedDataParallel) and not last:
        return module.no_sync()
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    return nullcontext()


def reshard(module: nn.Module) -> None:
    """Frees the gathered weights, so that the gradients of the shards are seen, and so that the
    next forward pass gathers the weights that the update has made."""
    for shard in sharded_modules(module):
        shard.reshard()


def sharded_modules(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]
