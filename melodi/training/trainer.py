"""A run from its first step to its last: steps, metrics, validations and checkpoints.

What the weights become is the learner's (learner.py). Here it is decided when to look at them, what
to say about them, and when they are written down, so that a run can be killed at any moment.
"""

import contextlib
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from melodi.config import ModelConfig
from melodi.config.training import Execution, TrainConfig
from melodi.data.store import TokenStore
from melodi.evaluation.documents import Evaluation
from melodi.evaluation.probes import gates
from melodi.files import locked, read_header, replacing
from melodi.precision import resolve
from melodi.run import BEST, LAST, Run
from melodi.training.checkpoint import WEIGHTS, Checkpoints
from melodi.training.distributed import Processes
from melodi.training.learner import Learner
from melodi.training.reporting import Meter, Reporter, introduction, shown_figures
from melodi.training.resume import check_vocabulary, continued
from melodi.training.validation import attention_to_memory, validate

MOST_SKIPS = 5
"""Steps in a row that may be skipped before the run stops."""


def train(
    folder: str | Path,
    store: TokenStore,
    model: ModelConfig,
    config: TrainConfig,
    execution: Execution,
    group: Processes,
    resume: bool = False,
    preset: str | None = None,
) -> Evaluation:
    """Trains a new run, or continues the one in the folder. Gives the last validation."""
    run = Run(folder)
    if resume:
        config = continued(run, model, config, store, preset)
    else:
        run.check_new()
        config = replace(config, precision=found_precision(config, model, group))
    check_vocabulary(model, store)
    group.on_first(lambda: store.verify("train", "validation"))
    trainer = Trainer(run, store, model, config, execution, group)
    run.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        group.on_first(lambda: held.enter_context(locked(run.folder)))
        if resume:
            trainer.restore()
        else:
            group.on_first(lambda: run.create(model, config, store, preset))
        return trainer.run_all()


def found_precision(
    config: TrainConfig, model: ModelConfig, group: Processes
) -> Literal["fp32", "bf16"]:
    """What "auto" means for the first process, for all."""
    found = group.first and resolve(config.precision, group.device, model)
    return "bf16" if group.any(found == "bf16") else "fp32"


class Trainer:
    """One run: the learner, and what becomes of its steps."""

    def __init__(
        self,
        run: Run,
        store: TokenStore,
        model: ModelConfig,
        config: TrainConfig,
        execution: Execution,
        group: Processes,
    ) -> None:
        self.run, self.store, self.config, self.execution = run, store, config, execution
        self.group = group
        self.learner = Learner(model, store.split("train"), config, execution, group)
        self.checkpoints = Checkpoints(run.checkpoints, execution.keep)
        self.reporter = Reporter(run, config.steps, group.first, execution.tensorboard)
        self.meter = Meter()
        self.best = float("inf")

    @property
    def step(self) -> int:
        return self.learner.step

    def run_all(self) -> Evaluation:
        """Steps, logs, validations and checkpoints until the end, or until interrupted."""
        config = self.config
        result = Evaluation()
        self._introduce()
        # Whatever ends the run, a checkpoint that is being written is finished.
        with (
            Interruption() as interrupted,
            contextlib.ExitStack() as stack,
            self.reporter.begin(self.step),
        ):
            stack.callback(self.checkpoints.wait)
            while self.step < config.steps:
                self.meter.add(figures := self.learner.take_step())
                self.reporter.step_done(self.step, self.meter)
                self._check_skips(figures)
                done = self.step == config.steps
                if self.step % self.execution.log_every == 0 or done:
                    self._log()
                if self.step % config.validate_every == 0 or done:
                    result = self._validate()
                stop = self.group.any(interrupted.wanted)
                if self.step % config.save_every == 0 or done or stop:
                    self.save(last=done or stop)
                if stop and not done:
                    raise KeyboardInterrupt(
                        f"stopped after step {self.step}: the same command with --resume goes on",
                        interrupted.signal,
                    )
        return result

    def save(self, last: bool = False) -> None:
        """A checkpoint, and the weights for use; of a sharded model those only with the last."""
        snapshot = self.learner.snapshot(best=self.best, meter=self.meter.state_dict())
        if not snapshot.sharded:
            self.checkpoints.write(self.step, snapshot.write, self.group)
            if self.group.first:
                with replacing(self.run.folder / LAST) as place:
                    shutil.copyfile(self.checkpoints.path(self.step) / WEIGHTS, place)
            return
        self.checkpoints.write_behind(self.step, snapshot.write, self.group)
        if last:
            self.learner.write_weights(self.run.folder / LAST)
            self.checkpoints.wait()

    def restore(self) -> None:
        """Goes back to the newest whole checkpoint; to the start if there is none."""
        found: list[int] = []
        self.group.on_first(
            lambda: found.append(self.checkpoints.newest_whole(self.reporter.say) or 0)
        )
        # The others hear of it from the first, which may have set damaged ones aside.
        step = int(self.group.total(sum(found))[0])
        if not step:
            self.group.on_first(self._check_nothing_is_lost)
        self.group.on_first(lambda: self.run.adopt(self.store, self.config.steps))
        if not step:
            self.group.on_first(lambda: self.run.rewind(0))
            self.reporter.say(f"{self.run.folder} has no checkpoint yet: starting anew")
            return
        saved: Any = self.learner.load(self.checkpoints.path(step))
        self.best = float("inf") if saved["best"] is None else saved["best"]
        if "meter" in saved:  # earlier checkpoints are without
            self.meter.load_state_dict(saved["meter"])
        between = step < self.config.steps and bool(self.meter.sums)
        self.group.on_first(lambda: self.run.rewind(step, between))
        self.reporter.say(f"resuming {self.run.folder} after step {step}")
        # A run that was killed behind its last checkpoint may be without the weights for use.
        last = self.run.folder / LAST
        stale = step == self.config.steps and self.group.first and not is_of_step(last, step)
        if self.group.any(stale):
            self.learner.write_weights(last)

    def _check_nothing_is_lost(self) -> None:
        """A run whose checkpoints are gone is not begun anew over what is left of it. One that was
        killed before its first was whole left no weights, and had taken fewer steps than to the
        second, which waits for it."""
        records = self.run.read_metrics() if self.run.metrics.exists() else []
        step = max((record["step"] for record in records), default=0)
        if step > 2 * self.config.save_every or (self.run.folder / LAST).exists():
            raise ValueError(
                f"{self.run.folder} was trained, to step {step}, and has no checkpoint to go "
                "on from: put them back, or begin a new run in another --out"
            )

    def _introduce(self) -> None:
        model, walker = self.learner.model, self.learner.batches.walker
        for line in introduction(self.run, model, walker, self.config, self.group.device):
            self.reporter.say(line)
        if not len(self.store.split("validation")):
            self.reporter.say(
                f"store {self.store.path} has no validation documents: nothing to validate"
            )
        if self.step >= self.config.steps:
            self.reporter.say(f"{self.run.folder}: all {self.config.steps} steps are done already")

    def _check_skips(self, figures: dict[str, float]) -> None:
        in_a_row = self.learner.skips_in_a_row
        if in_a_row:
            self.reporter.say(
                f"step {self.step} skipped: {figures['nats']:.6g} nats in all, gradient norm "
                f"{figures['gradient_norm']:.3g}"
            )
        if in_a_row >= MOST_SKIPS:
            self.checkpoints.wait()
            saved = [str(self.checkpoints.path(step)) for step in self.checkpoints.steps()]
            raise ValueError(
                f"{in_a_row} steps in a row, up to step {self.step}, had a loss or gradient that "
                f"is not finite: lower the learning rate (peak={self.config.optimizer.peak}) or "
                f"clip; {f'the last checkpoint is {saved[-1]}' if saved else 'no checkpoint yet'}"
            )

    def _log(self) -> None:
        """At each interval the meter starts again; a run that ends between two keeps its sums."""
        signs = gates(self.learner.model)
        epoch = self.learner.batches.walker.epochs_in(self.step)
        about = {"epoch": epoch, "skipped": self.learner.skipped}
        record = {"step": self.step, **self.meter.record(), **signs, **about}
        self.reporter.record(record)
        shown = [shown_figures(record), *[f"{name} {value:.2f}" for name, value in signs.items()]]
        self.reporter.bar.set_postfix_str(", ".join(shown))
        if self.step % self.execution.log_every == 0:
            self.meter = Meter()

    def _validate(self) -> Evaluation:
        """Validates, and keeps the weights if they are the best so far."""
        learner, documents = self.learner, self.store.split("validation")
        result = validate(learner.model, learner.forward, documents, self.config, self.group)
        if not result.predictions:
            return result
        shares = attention_to_memory(learner.model, learner.forward, documents, self.config)
        self.reporter.record(
            {
                "step": self.step,
                **shares,
                "validation_loss": result.loss,
                "validation_perplexity": result.perplexity,
                "validation_bits_per_byte": result.bits_per_byte,
            }
        )
        self.reporter.say(
            f"step {self.step}: validation loss {result.loss:.4f}, perplexity "
            f"{result.perplexity:.2f}, {result.bits_per_byte:.3f} bits per byte"
            + (f", {shares['past']:.0%} of self-attention to the past" if "past" in shares else "")
        )
        if result.loss < self.best:
            self.best = result.loss
            learner.write_weights(self.run.folder / BEST)
        return result


def is_of_step(weights: Path, step: int) -> bool:
    return weights.exists() and read_header(weights).get("step") == str(step)


class Interruption:
    """Ctrl-C and SIGTERM end the run after the current step and a checkpoint; twice, at once."""

    def __enter__(self) -> "Interruption":
        self.wanted = False
        self.signal: int = signal.SIGINT
        self.before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # not in the main thread
                self.before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        if self.wanted:
            raise KeyboardInterrupt("interrupted", number)
        self.wanted, self.signal = True, number
