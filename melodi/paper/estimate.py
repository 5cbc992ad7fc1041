"""What a recipe will cost, before it starts: operations by counting, hours by a measured speed.

The speed is that of the runs of this plan that have been trained, as operations per second; where
there is none yet, that of a short calibration. Hours are rough: systems differ in how well they use
a machine, and the machine may have other work.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from melodi.bench.operations import TRAINING, per_token
from melodi.data.store import TokenStore
from melodi.evaluation.documents import choose
from melodi.model import LanguageModel
from melodi.paper.plan import Planned, Settings, State, state_of, step_of
from melodi.paper.scales import LAPTOP, parameters
from melodi.paper.shapes import Shape
from melodi.precision import autocast
from melodi.run import Run

PASSES = 2
"""Times that an evaluation reads each document."""
ROWS, WINDOWS = LAPTOP.rows, LAPTOP.segment_windows
"""Size of a step of the calibration: few tokens at a time, as in the runs."""


@dataclass(frozen=True)
class Estimate:
    """One run."""

    planned: Planned
    state: State
    step: int
    flops: float
    """Floating-point operations of its training: two for each multiply-add."""
    hours: float | None
    """Of all that is still to be done; None where no speed is known."""

    def to_dict(self) -> dict[str, Any]:
        planned = self.planned
        short, long = planned.model.memory_floats()
        return {
            "row": planned.row.label,
            "seed": planned.seed,
            "folder": str(planned.folder),
            "parameters": parameters(planned.model),
            "floats": short + long,
            "steps": planned.train.steps,
            "tokens": planned.tokens,
            "flops": self.flops,
            "hours": self.hours,
            "state": self.state,
            "step": self.step,
        }


def estimate(
    planned: Planned, settings: Settings, store: TokenStore | None, speed: float | None
) -> Estimate:
    """speed: operations per second."""
    state = state_of(planned, settings)
    step = 0 if state == "new" else step_of(planned.run)
    left = training_flops(planned) * (1 - min(step / planned.train.steps, 1))
    if store is not None and state != "done":
        left += reading_flops(planned, settings, store, left)
    hours = None if speed is None else left / speed / 3600
    return Estimate(planned, state, step, training_flops(planned), hours)


def training_flops(planned: Planned) -> float:
    return 2 * TRAINING * per_token(planned.model) * planned.tokens


def reading_flops(
    planned: Planned, settings: Settings, store: TokenStore, training_left: float
) -> float:
    """The validations on the way, as many as there is training left, and the evaluation."""
    train, documents = planned.train, store.split(settings.split)
    validation = store.split("validation")
    chosen = choose(documents, settings.eval_tokens)
    tokens = PASSES * float(sum(documents.lengths[i] for i in chosen))
    each = float(sum(validation.lengths[i] for i in choose(validation, train.validation_tokens)))
    share = training_left / training_flops(planned)
    tokens += share * each * -(-train.steps // train.validate_every)
    return 2 * per_token(planned.model) * tokens


def measured_speed(planned: Sequence[Planned]) -> float | None:
    """Operations per second of the runs that have metrics; their median."""
    speeds = []
    for one in planned:
        tokens, seconds = training_time(one.run)
        if seconds:
            speeds.append(2 * TRAINING * per_token(one.model) * tokens / seconds)
    return statistics.median(speeds) if speeds else None


def training_time(run: Run) -> tuple[int, float]:
    """Tokens that a run has been trained on so far, and the seconds that its steps took."""
    if not run.metrics.exists():
        return 0, 0.0
    records = [record for record in run.read_metrics() if record.get("tokens_per_second")]
    seconds = sum(record["tokens"] / record["tokens_per_second"] for record in records)
    return sum(record["tokens"] for record in records), seconds


def calibrate(device: torch.device, precision: str) -> float:
    """Operations per second of a few steps of Melodi at the laptop scale; it takes some seconds."""
    config = LAPTOP.config(Shape())
    model = LanguageModel(config).to(device)
    tokens = torch.randint(0, config.vocab_size, (ROWS, WINDOWS * config.window), device=device)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        with autocast(precision, device):
            loss, _ = model.loss(tokens, tokens.roll(-1, 1), model.empty_state(ROWS))
        loss.backward()
        loss.item()  # waits for the device
        seconds.append(time.perf_counter() - started)
    return 2 * TRAINING * per_token(config) * tokens.numel() / min(seconds)
