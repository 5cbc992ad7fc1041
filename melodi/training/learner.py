"""A model that learns: everything that its next step depends on, and the step.

1. Each row walks through a document (data/segments.py); where a new one begins, that row forgets.
2. A step is a pure function of the weights, the optimizer, the memory, the data position and the
   step's number: random numbers are drawn anew from (seed, step, rank). So a run that was killed
   and resumed ends with the same weights, bit for bit, as one that never stopped.
3. The loss is the mean over all predictions of all rows of all processes, however they are split.
4. A step whose loss or gradient is not finite is skipped and counted: weights and memory stay as
   they were, and the rows read on behind it.
"""

import copy
import math
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from melodi.boundary import ids_checked
from melodi.config import ModelConfig
from melodi.config.training import Execution, TrainConfig
from melodi.data.segments import Walker
from melodi.data.store import Documents
from melodi.files import write_tensors
from melodi.memory import MemoryState
from melodi.model import LanguageModel
from melodi.precision import autocast
from melodi.sharded import gather, is_sharded
from melodi.training.batches import Batch, Batches
from melodi.training.distributed import (
    Processes,
    compile_layers,
    distribute,
    reshard,
    without_reduction,
)
from melodi.training.optimizers import make_optimizer, schedule
from melodi.training.parameters import flatten_state
from melodi.training.snapshot import Snapshot, owner_of, read_checkpoint, read_memory


class Learner:
    """The model, its optimizer, the documents that its rows are reading, and their memory."""

    def __init__(
        self,
        model: ModelConfig,
        documents: Documents,
        config: TrainConfig,
        execution: Execution,
        group: Processes,
    ) -> None:
        self.config, self.group = config, group
        self.local_rows = group.share(config.rows)
        if len(self.local_rows) % config.accumulate:
            raise ValueError(
                f"accumulate={config.accumulate} does not divide the {len(self.local_rows)} rows "
                "of a process: choose a divisor"
            )
        torch.manual_seed(config.seed)
        self.model = LanguageModel(model).to(group.device)
        self.model.checkpoint_windows = execution.checkpoint_windows
        if execution.compile:
            compile_layers(self.model)
        self.forward = distribute(
            self.model, group, execution.sharding, config.segment_windows, config.precision
        )
        self.sharded = any(map(is_sharded, self.model.parameters()))
        self.optimizer = make_optimizer(self.model, config.optimizer, config.precision)
        length = config.segment_windows * model.window
        walker = Walker.shuffled(
            documents, config.rows, length, config.seed, self.local_rows, config.turns
        )
        self.batches = Batches(walker, model.vocab_size, pinned=group.device.type == "cuda")
        self.rows_per_part = len(self.local_rows) // config.accumulate
        self.turns = walker.turns
        parts = self.turns * config.accumulate
        self.states = [self.model.empty_state(self.rows_per_part) for _ in range(parts)]
        self.step = 0
        self.skipped = 0
        self.skips_in_a_row = 0

    def take_step(self) -> dict[str, float]:
        """One segment of every row, and one update of the weights."""
        config = self.config
        self.step += 1
        started = time.perf_counter()
        torch.manual_seed((config.seed << 40) + (self.step << 12) + self.group.rank)
        batch = self.batches.next()
        data_seconds = time.perf_counter() - started
        rate = self._set_rate()
        self.model.train()
        nats, states = self._gradients(batch)
        reshard(self.forward)
        # The one place where the host waits for the device.
        total, norm = self.group.totals(nats, self._gradient_norm())
        if math.isfinite(norm) and total < float("inf"):
            self.optimizer.step()
            self.states[self._parts], self.skips_in_a_row = states, 0
        else:  # the weights and the memory stay as they were; the data moves on
            self.skipped, self.skips_in_a_row = self.skipped + 1, self.skips_in_a_row + 1
        self.optimizer.zero_grad(set_to_none=True)
        return {
            "nats": total,
            "predictions": batch.predictions,
            "learning_rate": rate,
            "gradient_norm": norm,
            "seconds": time.perf_counter() - started,
            "data_seconds": data_seconds,
        }

    @property
    def _parts(self) -> slice:
        """The parts of the rows whose turn it is in this step."""
        turn, parts = (self.step - 1) % self.turns, self.config.accumulate
        return slice(turn * parts, (turn + 1) * parts)

    def _gradients(self, batch: Batch) -> tuple[Tensor, list[MemoryState]]:
        """Adds up the gradients of the mean loss over all rows of all processes."""
        states, device, part = [], self.group.device, self.rows_per_part
        nats = torch.zeros((), dtype=torch.float64, device=device)
        # DDP and FSDP2 average over processes; each contributes its share of the one mean.
        scale = self.group.world / max(batch.predictions, 1)
        tokens_BT = batch.tokens_BT.to(device, non_blocking=True)
        targets_BT = batch.targets_BT.to(device, non_blocking=True)
        parts = range(len(self.states))[self._parts]
        for i, mine in enumerate(parts):
            rows = slice(i * part, (i + 1) * part)
            self.states[mine] = state = self.states[mine].forget(batch.starts_B[rows])
            with without_reduction(self.forward, last=i == len(parts) - 1):
                with autocast(self.config.precision, device), ids_checked():
                    nats_BT, state, extra_loss = self.forward(
                        tokens_BT[rows], targets_BT[rows], state
                    )
                    total = nats_BT.sum()
                loss = total * scale
                if extra_loss is not None:
                    loss = loss + extra_loss / len(parts)
                loss.backward()
            nats += total.detach()
            states.append(state.detach())
        return nats, states

    def _set_rate(self) -> float:
        settings = self.config.optimizer
        horizon = self.config.horizon or self.config.steps
        rate = schedule(self.step, settings.peak, settings.floor, settings.warmup, horizon)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["multiplier"]
        return rate

    def _gradient_norm(self) -> Tensor:
        norm = nn.utils.clip_grad_norm_(
            self.model.parameters(), self.config.clip or float("inf"), error_if_nonfinite=False
        )
        return gather(norm)

    def write_weights(self, path: Path) -> None:
        """The whole weights, for use. They are gathered one after the other, and written by the
        first process; every process must come here at the same time."""
        weights = self.model.state_dict()
        if self.group.first:
            write_tensors(path, weights, {"step": str(self.step)}, whole=gather)
        elif self.sharded:
            for name in sorted(weights):
                gather(weights[name])

    def snapshot(self, **more: object) -> Snapshot:
        """Everything that the next step depends on, and what else is to be known when it is taken.
        Every process must ask at the same time."""
        weights: dict[str, Tensor] = self.model.state_dict()
        if self.sharded:
            weights = {name: w.detach().to("cpu", copy=True) for name, w in weights.items()}
        owner = owner_of(self.model, self.step, self.sharded)
        return Snapshot(
            weights,
            flatten_state(self.optimizer, self.model, whole=not self.sharded),
            self._first_rows(),
            [replace(state, owner=owner) for state in self.states],
            {
                "step": self.step,
                "rows": self.batches.state_dict(),
                "skipped": self.skipped,
                "skips_in_a_row": self.skips_in_a_row,
                **copy.deepcopy(more),
            },
            self.sharded,
        )

    def load(self, folder: Path) -> dict[str, object]:
        """Goes back to a snapshot, with any number of processes, and gives what else was to be
        known."""
        saved = read_checkpoint(folder, self.model, self.optimizer, self.group)
        self.step, self.skipped = saved.pop("step"), saved.pop("skipped")
        self.skips_in_a_row = saved.pop("skips_in_a_row")
        self.batches.load_state_dict(saved.pop("rows"))
        self.states = read_memory(
            folder, self.model, self.step, self._first_rows(), self.rows_per_part
        )
        return saved

    def _first_rows(self) -> list[int]:
        """The global row with which each part of each turn begins."""
        firsts = self.local_rows[:: self.rows_per_part]
        return [turn * self.config.rows + row for turn in range(self.turns) for row in firsts]
