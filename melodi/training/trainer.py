"""Training: one segment per step, memory detached between segments, exact to resume.

1. Each row walks through a document (data.Walker); where a new one begins, that row forgets.
2. A step is a pure function of the weights, the optimizer, the memory, the data position and the
   step's number: random numbers are drawn anew from (seed, step, rank). So a run that was killed
   and resumed ends with the same weights, bit for bit, as one that never stopped.
3. The loss is the mean over all predictions of all rows of all processes, however they are split.
4. A step whose loss or gradient is not finite is skipped and counted; its memory is dropped.
"""

import contextlib
import signal
import sys
import time
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import tqdm

from melodi.config import ModelConfig
from melodi.config.training import Machinery, TrainConfig
from melodi.data.segments import Segment, Walker
from melodi.data.store import TokenStore
from melodi.evaluation.documents import Evaluation, choose, evaluate
from melodi.evaluation.probes import gates, memory_shares
from melodi.files import read_json, write_json
from melodi.memory import MemoryState
from melodi.model import LanguageModel
from melodi.run import Run, check_same_data, check_store, check_vocabulary, extended
from melodi.sharded import full, shard_like
from melodi.training import checkpoint
from melodi.training.checkpoint import write_tensors
from melodi.training.distributed import Processes, release, spread, without_reduction
from melodi.training.optimizers import flatten_state, make_optimizer, restore_state, schedule

Bar: TypeAlias = "tqdm[Any]"
MOST_SKIPS = 5
"""Steps in a row that may be skipped before the run stops."""
SHARE_WINDOWS = 16
"""Windows of a validation document over which attention to memory is measured."""


def train(
    folder: str | Path,
    store: TokenStore,
    model: ModelConfig,
    config: TrainConfig,
    machinery: Machinery,
    group: Processes,
    resume: bool = False,
) -> Evaluation:
    """Trains a new run, or continues the one in the folder. Gives the last validation."""
    run = Run(folder, machinery.keep)
    if resume:
        own_model, own_config, data = run.configs()
        check_store(store, data["tokenizer_digest"])
        check_same_data(store, data["train_checksum"])
        config = extended(own_config, config)
        if model != own_model:
            raise ValueError(
                f"the model differs from that of {run.folder}: resume without --model flags, or "
                "begin a new run"
            )
    check_vocabulary(model, store)
    if group.first:
        store.verify()
    trainer = Trainer(run, store, model, config, machinery, group)
    if resume:
        trainer.restore()
    elif group.first:
        run.create(model, config, store)
    group.barrier()
    return trainer.run_all()


class Trainer:
    """What changes from step to step, and the step."""

    def __init__(
        self,
        run: Run,
        store: TokenStore,
        model_config: ModelConfig,
        config: TrainConfig,
        machinery: Machinery,
        group: Processes,
    ) -> None:
        self.run, self.store, self.config, self.machinery = run, store, config, machinery
        self.group = group
        torch.manual_seed(config.seed)
        self.model = LanguageModel(model_config).to(group.device)
        self.model.checkpoint_windows = machinery.checkpoint_windows
        self.mine = group.share(config.rows)
        if len(self.mine) % config.accumulate:
            raise ValueError(
                f"accumulate={config.accumulate} does not divide the {len(self.mine)} rows of a "
                "process: choose a divisor"
            )
        if machinery.compile:
            self.model.static_shapes = True
            for layer in self.model.layers:
                layer.compile()
        self.reading = spread(self.model, group, machinery.sharding, config.segment_windows)
        self.optimizer = make_optimizer(self.model, config.optimizer)
        length = config.segment_windows * model_config.window
        self.walker = Walker.shuffled(
            store.split("train"), config.rows, length, config.seed, self.mine
        )
        self.part = len(self.mine) // config.accumulate
        self.states = [self.model.empty_state(self.part) for _ in range(config.accumulate)]
        self.step = 0
        self.skipped = 0
        self.skips_in_a_row = 0
        self.best = float("inf")
        self.board = None
        if machinery.tensorboard and group.first:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(run.folder / "tensorboard")

    def run_all(self) -> Evaluation:
        """Steps, logs, validations and checkpoints until the end, or until interrupted."""
        config = self.config
        result = Evaluation()
        if self.step >= config.steps:
            self._say(f"{self.run.folder}: all {config.steps} steps are done already")
        with Interruption() as interrupted, self._progress() as bar:
            meter = Meter()
            while self.step < config.steps:
                meter.add(self.take_step())
                bar.update()
                done = self.step == config.steps
                if self.step % self.machinery.log_every == 0 or done:
                    self._log(meter, bar)
                    meter = Meter()
                if self.step % config.validate_every == 0 or done:
                    result = self._validate()
                stop = self.group.any(interrupted.wanted)
                if self.step % config.save_every == 0 or done or stop:
                    self.save()
                if stop and not done:
                    raise KeyboardInterrupt(
                        f"stopped after step {self.step}: the same command with --resume goes on",
                        interrupted.signal,
                    )
        return result

    def take_step(self) -> dict[str, float]:
        """One segment of every row, and one update of the weights."""
        config = self.config
        self.step += 1
        started = time.perf_counter()
        torch.manual_seed((config.seed << 40) + (self.step << 12) + self.group.rank)
        segment = self.walker.next()
        data_seconds = time.perf_counter() - started
        predictions = self.walker.predictions
        rate = self._set_rate()
        self.model.train()
        nats, states = self._gradients(segment, predictions)
        release(self.reading)
        norm = self._gradient_norm()
        (total,) = self.group.total(nats)
        if torch.isfinite(norm) and total < float("inf"):
            self.optimizer.step()
            self.states, self.skips_in_a_row = states, 0
        else:
            self._skip(total, float(norm))
        self.optimizer.zero_grad(set_to_none=True)
        return {
            "nats": total,
            "predictions": predictions,
            "learning_rate": rate,
            "gradient_norm": float(norm),
            "seconds": time.perf_counter() - started,
            "data_seconds": data_seconds,
        }

    def _gradients(self, segment: Segment, predictions: int) -> tuple[float, list[MemoryState]]:
        """Adds up the gradients of the mean loss over all rows of all processes."""
        states, nats = [], 0.0
        device, part = self.group.device, self.part
        # DDP and FSDP2 average over processes; each contributes its share of the one mean.
        scale = self.group.world / max(predictions, 1)
        for i, state in enumerate(self.states):
            rows = segment.take(slice(i * part, (i + 1) * part))
            self.states[i] = state = state.forget(rows.starts)
            tokens_BT = torch.from_numpy(rows.tokens).to(device)
            targets_BT = torch.from_numpy(rows.targets).to(device)
            bf16 = self.config.precision == "bf16"
            with without_reduction(self.reading, last=i == len(self.states) - 1):
                with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                    nats_BT, state, extra_loss = self.reading(tokens_BT, targets_BT, state)
                    total = nats_BT.sum()
                loss = total * scale
                if extra_loss is not None:
                    loss = loss + extra_loss / len(self.states)
                loss.backward()
            nats += total.item()
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
        return full(norm)

    def _skip(self, nats: float, norm: float) -> None:
        """The weights and the memory stay as they were; the data moves on."""
        self.skipped += 1
        self.skips_in_a_row += 1
        self._say(f"step {self.step} skipped: nats {nats}, gradient norm {norm}")
        if self.skips_in_a_row >= MOST_SKIPS:
            last = self.run.checkpoints.newest(self._say)
            raise ValueError(
                f"{MOST_SKIPS} steps in a row, up to step {self.step}, had a loss or gradient that "
                f"is not finite: lower the learning rate (peak={self.config.optimizer.peak}) or "
                f"clip; the last good checkpoint is {last}"
            )

    def save(self) -> None:
        """Everything that the next step depends on, and the weights for use."""
        weights = self._whole_weights()
        moments = flatten_state(self.optimizer, self.model)

        def fill(folder: Path) -> None:
            for i, state in enumerate(self.states):
                checkpoint.save_rows(folder, self.mine.start + i * self.part, state)
            if self.group.first:
                write_tensors(folder / "model.safetensors", weights)
                write_tensors(folder / "optimizer.safetensors", moments)
                write_json(
                    folder / "trainer.json",
                    {
                        "step": self.step,
                        "rows": self.walker.state_dict(),
                        "skipped": self.skipped,
                        "skips_in_a_row": self.skips_in_a_row,
                        "best": self.best,
                    },
                )

        self.run.checkpoints.write(self.step, fill, self.group.rank, self.group.barrier)
        if self.group.first:
            write_tensors(self.run.folder / "model.safetensors", weights)

    def restore(self) -> None:
        """Goes back to the newest whole checkpoint; to the start if there is none."""
        folder = self.run.checkpoints.newest(self._say)
        self.group.barrier()
        if folder is None:
            self._say(f"{self.run.folder} has no checkpoint yet: starting from the beginning")
            self.run.rewind(0)
            return
        saved = read_json(folder / "trainer.json")
        set_weights(self.model, load_file(folder / "model.safetensors"))
        restore_state(self.optimizer, self.model, load_file(folder / "optimizer.safetensors"))
        first, part = self.mine.start, self.part
        self.states = [
            checkpoint.load_rows(folder, first + i * part, part).to(self.group.device)
            for i in range(self.config.accumulate)
        ]
        self.walker.load_state_dict(saved["rows"])
        self.step, self.best = saved["step"], saved["best"]
        self.skipped, self.skips_in_a_row = saved["skipped"], saved["skips_in_a_row"]
        if self.group.first:
            self.run.rewind(self.step)
        self._say(f"resuming {self.run.folder} after step {self.step}")

    def _validate(self) -> Evaluation:
        """Whole validation documents, shared out over the processes; the best weights are kept."""
        documents = self.store.split("validation")
        chosen = choose(documents, self.config.validation_tokens)
        if not chosen:
            self._say(f"store {self.store.path} has no validation documents: nothing to validate")
            return Evaluation()
        rows = -(-min(len(chosen), 8) // self.group.world) * self.group.world
        result = evaluate(
            self.model,
            documents,
            chosen,
            rows=rows,
            segment_windows=self.config.segment_windows,
            nats=self.reading,
            mine=self.group.share(rows),
        )
        result = Evaluation.from_array(self.group.total(*result.to_array()))
        sample = documents[chosen[0]][: SHARE_WINDOWS * self.model.config.window]
        shares = memory_shares(self.model, sample, self.reading)
        self._record(
            {
                "step": self.step,
                **shares,
                "validation_loss": result.loss,
                "validation_perplexity": result.perplexity,
                "validation_bits_per_byte": result.bits_per_byte,
            }
        )
        self._say(
            f"step {self.step}: validation loss {result.loss:.4f}, perplexity "
            f"{result.perplexity:.2f}, {result.bits_per_byte:.3f} bits per byte"
            + (f", {shares['past']:.0%} of self-attention to the past" if shares else "")
        )
        if result.loss < self.best:
            self.best = result.loss
            weights = self._whole_weights()
            if self.group.first:
                write_tensors(self.run.folder / "best.safetensors", weights)
        return result

    def _whole_weights(self) -> dict[str, Tensor]:
        """Every process must ask at the same time."""
        return {name: full(tensor) for name, tensor in self.model.state_dict().items()}

    def _log(self, meter: "Meter", bar: Bar) -> None:
        signs = gates(self.model)
        record = {"step": self.step, **meter.record(), **signs, "skipped": self.skipped}
        self._record(record)
        shown = [f"loss {record['loss']:.3f}", f"{record['tokens_per_second']:,.0f} tok/s"]
        shown += [f"{name} {value:.2f}" for name, value in signs.items()]
        bar.set_postfix_str(", ".join(shown))

    def _record(self, record: dict[str, Any]) -> None:
        if not self.group.first:
            return
        self.run.log(record)
        if self.board is not None:
            for name, value in record.items():
                self.board.add_scalar(name, value, self.step)

    def _say(self, line: str) -> None:
        if self.group.first:
            tqdm.write(line, file=sys.stderr)

    def _progress(self) -> Bar:
        return tqdm(
            total=self.config.steps,
            initial=self.step,
            desc="train",
            unit="step",
            disable=None if self.group.first else True,
            dynamic_ncols=True,
        )


class Meter:
    """Sums over the steps between two lines of metrics."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.steps = 0
        self.last: dict[str, float] = {}

    def add(self, step: dict[str, float]) -> None:
        for name, value in step.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.steps += 1
        self.last = step

    def record(self) -> dict[str, float]:
        sums, seconds = self.sums, max(self.sums["seconds"], 1e-9)
        return {
            "loss": sums["nats"] / max(sums["predictions"], 1),
            "learning_rate": self.last["learning_rate"],
            "gradient_norm": sums["gradient_norm"] / self.steps,
            "tokens": int(sums["predictions"]),
            "tokens_per_second": sums["predictions"] / seconds,
            "data_share": sums["data_seconds"] / seconds,
        }


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


def set_weights(model: LanguageModel, tensors: dict[str, Tensor]) -> None:
    """Copies whole tensors into parameters that may be sharded."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(shard_like(tensors[name], parameter))
