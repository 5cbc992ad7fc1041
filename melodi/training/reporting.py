"""What a run says of itself: at the start, while it trains, and in its metrics.

- `Meter` adds up the steps between two lines of metrics. It is saved with a checkpoint, so that
  after a resume a line covers as many steps as in a run that never stopped.
- `Reporter` writes metrics.jsonl and TensorBoard, and talks to the user: with a bar in a terminal,
  with a plain line now and then where the output goes to a file. Of many processes only the first
  says anything.
"""

import functools
import math
import sys
import time
from collections import defaultdict
from typing import Any, TypeAlias

from tqdm import tqdm

from melodi.config.training import TrainConfig
from melodi.data.segments import Walker
from melodi.model import LanguageModel
from melodi.run import Run

Bar: TypeAlias = "tqdm[Any]"
LINE_SECONDS = 30.0
"""Time between two plain lines where there is no bar."""
TIMES = ("seconds", "data_seconds")
ESTIMATE_AFTER = 10
"""Steps after which the end of the run is foretold."""


class Meter:
    """Sums over the steps between two lines of metrics. A step that was skipped, because its
    figures are not finite, counts by its time alone."""

    def __init__(self) -> None:
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.steps = 0
        self.learning_rate = 0.0

    def add(self, step: dict[str, float]) -> None:
        finite = all(map(math.isfinite, step.values()))
        for name, value in step.items():
            if finite or name in TIMES:
                self.sums[name] += value
        self.steps += finite
        self.learning_rate = step["learning_rate"]

    def record(self) -> dict[str, float]:
        sums, seconds = self.sums, max(self.sums["seconds"], 1e-9)
        return {
            "loss": sums["nats"] / sums["predictions"] if sums["predictions"] else math.nan,
            "learning_rate": self.learning_rate,
            "gradient_norm": sums["gradient_norm"] / self.steps if self.steps else math.nan,
            "tokens": int(sums["predictions"]),
            "tokens_per_second": sums["predictions"] / seconds,
            "data_share": sums["data_seconds"] / seconds,
        }

    def state_dict(self) -> dict[str, Any]:
        last = {"learning_rate": self.learning_rate}
        return {"sums": self.sums, "steps": self.steps, "last": last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Earlier checkpoints may hold figures that were not finite, as null.
        finite = {name: value for name, value in state["sums"].items() if value is not None}
        self.sums = defaultdict(float, finite)
        self.steps, self.learning_rate = state["steps"], state["last"]["learning_rate"]


class Reporter:
    """The voice of a run. It begins to count time when its bar begins."""

    def __init__(self, run: Run, steps: int, first: bool, tensorboard: bool = False) -> None:
        self.run, self.steps, self.first, self.tensorboard = run, steps, first, tensorboard

    def begin(self, step: int) -> Bar:
        """The bar, to be closed at the end; without a terminal it shows nothing."""
        self.started = self.spoke = time.monotonic()
        self.start_step = step
        self.bar: Bar = tqdm(
            total=self.steps,
            initial=step,
            desc="train",
            unit="step",
            disable=None if self.first else True,
            dynamic_ncols=True,
        )
        return self.bar

    def step_done(self, step: int, meter: Meter) -> None:
        self.bar.update()
        if step - self.start_step == ESTIMATE_AFTER and self._seconds_left(step) > LINE_SECONDS:
            self.say(f"step {step}: the end is expected {self._expected_end(step)}")
        if self.bar.disable and time.monotonic() - self.spoke >= LINE_SECONDS:
            self.spoke = time.monotonic()
            shown = shown_figures(meter.record())
            self.say(f"step {step} of {self.steps}: {shown}, ends {self._expected_end(step)}")

    def record(self, record: dict[str, Any]) -> None:
        """One line of metrics; the record has the step."""
        if not self.first:
            return
        self.run.log(record)
        if self.tensorboard:
            for name, value in record.items():
                self._board.add_scalar(name, value, record["step"])

    def say(self, line: str) -> None:
        if self.first:
            tqdm.write(line, file=sys.stderr)

    def _seconds_left(self, step: int) -> float:
        """Validations and saves so far are counted in."""
        each = (time.monotonic() - self.started) / (step - self.start_step)
        return each * (self.steps - step)

    def _expected_end(self, step: int) -> str:
        left = self._seconds_left(step)
        form = "%H:%M" if left < 12 * 3600 else "%d %B, %H:%M"
        return f"in {duration(left)}, at {time.strftime(form, time.localtime(time.time() + left))}"

    @functools.cached_property
    def _board(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self.run.folder / "tensorboard")


def introduction(
    run: Run, model: LanguageModel, walker: Walker, config: TrainConfig, device: object
) -> list[str]:
    """What a run is going to cost, before it begins."""
    window = model.config.window
    length = config.segment_windows * window
    tokens = config.rows * length
    documents = int((walker.num_predictions > 0).sum())
    lines = [
        f"{run.folder}: {model.num_parameters:,} parameters, {sum(model.config.memory_floats()):,} "
        f"floats of memory per document, on {device}",
        f"{config.steps:,} steps of {tokens:,} tokens ({config.rows} rows of "
        f"{config.segment_windows} windows of {window}), {config.steps * tokens:,} tokens in all: "
        f"{walker.epochs_in(config.steps):.3g} times through the "
        f"{documents:,} training documents, {len(walker.row_documents):,} of them at a time",
    ]
    if config.rows > documents:
        lines.append(
            f"warning: rows={config.rows} exceed the {documents} training documents, so that "
            f"several rows read the same document at the same time: prepare more documents, or "
            f"train with at most {documents} rows"
        )
    return lines


def shown_figures(record: dict[str, Any]) -> str:
    return f"loss {record['loss']:.3f}, {record['tokens_per_second']:,.0f} tok/s"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days = hours / 24
    return f"{days:,.1f} days" if days < 730 else f"{days / 365.25:,.0f} years"
