"""`melodi train`: a preset, changed by flags, and a token store to a run folder."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from melodi.cli.console import UNPREFIXED, device_named, parse, parse_known, use_threads, wants_help
from melodi.config import ModelConfig, preset
from melodi.config.training import Execution, TrainConfig, recipe

if TYPE_CHECKING:
    from melodi.data.store import TokenStore
    from melodi.evaluation.documents import Evaluation


@dataclass
class TrainStart:
    """What decides the defaults of all other flags."""

    preset: str | None = None
    """Sizes and recipe of a new run; melodi memory lists all. Its defaults are shown below."""
    data: Path | None = None
    """The token store; of a run that is resumed its own when not given."""
    out: Path = Path("run")
    """The run folder."""
    resume: bool = False
    """Continue the run in --out if there is one."""


@dataclass(kw_only=True)
class TrainArgs(TrainStart):
    train: Annotated[TrainConfig, UNPREFIXED]
    model: ModelConfig
    execution: Annotated[Execution, UNPREFIXED] = field(default_factory=Execution)
    threads: int | None = None
    """CPU threads; torch's own choice when not given."""
    device: str | None = None
    """cpu, cuda, cuda:1 …; the GPU where there is one when not given."""


def train(args: list[str]) -> None:
    """Preset and token store to run folder.

    Example: melodi train --preset laptop-melodi --data store --out runs/books --steps 300
    """
    start, others = parse_known(TrainStart, args)
    if wants_help(others):
        name = start.preset or "laptop-melodi"
        parse(TrainArgs, train, args, TrainArgs(train=recipe(name), model=preset(name)))
    default = defaults(start)
    options = parse(TrainArgs, train, args, default)
    use_threads(options.threads)
    if options.device is not None:
        device_named(options.device)
    from melodi.run import Run
    from melodi.training.distributed import processes
    from melodi.training.trainer import train as train_run

    run = Run(options.out)
    store = run.open_store(options.data) if default.resume else open_store(options.data)
    with processes(options.device) as group:
        result = train_run(
            options.out,
            store,
            options.model,
            options.train,
            options.execution,
            group,
            resume=default.resume,
            preset=start.preset,
        )
        if group.first:
            print(closing_line(options.out, options.train.steps, result))


def closing_line(folder: Path, steps: int, result: "Evaluation") -> str:
    if not result.predictions:
        return f"{folder}: {steps} steps done"
    return (
        f"{folder}: {steps} steps, validation perplexity {result.perplexity:.2f}, "
        f"{result.bits_per_byte:.3f} bits per byte"
    )


def defaults(start: TrainStart) -> TrainArgs:
    """Of a run that goes on, its own configs; of a new one those of the preset, with the vocabulary
    of the store. `resume` says which of the two it is."""
    from melodi.run import Run

    run = Run(start.out)
    if start.resume and run.exists:
        model, config, _ = run.configs()
        return TrainArgs(train=config, model=model, resume=True)
    if start.preset is None:
        raise ValueError("--preset is missing: melodi memory lists all presets")
    model = preset(start.preset)
    model = replace(model, vocab_size=open_store(start.data).vocab_size)
    return TrainArgs(train=recipe(start.preset), model=model)


def open_store(path: Path | None) -> "TokenStore":
    from melodi.data.store import TokenStore

    if path is None:
        raise ValueError("--data is missing: make a store with melodi prepare --out STORE")
    return TokenStore.open(path)
