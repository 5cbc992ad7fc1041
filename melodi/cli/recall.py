"""`melodi recall`: right answers against distance, of tiny models trained here or of runs."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from melodi.cli.console import (
    Paths,
    check_at_least,
    check_not_given,
    parse,
    print_table,
    use_threads,
)
from melodi.files import json_text, read_object, write_json

TaskName = Literal["passkey", "needle", "mqar", "facts", "rewrite", "copy", "forgetting"]
OF_RUNS = ("forgetting", "passkey")
OF_TINY_MODELS = ("presets", "steps", "window", "windows", "facts")
PRESETS = (
    "laptop-melodi",
    "laptop-memorizing",
    "laptop-block-recurrent",
    "laptop-transformer-xl",
    "laptop-no-memory",
)


@dataclass
class RecallArgs:
    task: Annotated[tyro.conf.Positional[TaskName], tyro.conf.arg(metavar="TASK")]
    """passkey, needle, mqar, facts, rewrite, copy, or forgetting (of runs only)."""
    out: Path
    """Folder for the records and the picture (extra: plot); what is there is not made again."""
    presets: tuple[str, ...] = PRESETS
    """Kinds of which tiny models are trained from nothing."""
    run: Paths = ()
    """Run folders to be asked instead, with forgetting and passkey."""
    data: Path | None = None
    """A token store made with the runs' tokenizer; each run's own when not given."""
    split: Literal["train", "validation", "test"] = "test"
    """Which documents of the store, with --run."""
    steps: int = 600
    """Updates of the weights; fewer where nothing is left to learn."""
    rows: int = 32
    """Documents in each step; with --run, documents that are read."""
    window: int = 8
    """Tokens of a window."""
    windows: int = 6
    """Windows of a document."""
    facts: int = 1
    """Facts and questions of a window, where it has several; with more, all kinds learn later."""
    seed: int = 0
    threads: int | None = None
    """CPU threads; torch's own choice when not given."""
    json: bool = False
    """Print a JSON list instead of a table."""


def recall(args: list[str]) -> None:
    """How far back models remember: tiny ones that learn a task here, or runs.

    Example: melodi recall passkey --presets laptop-melodi laptop-no-memory --out recall
    """
    options = parse(RecallArgs, recall, args)
    check_at_least(1, steps=options.steps, rows=options.rows)
    check_at_least(0, seed=options.seed)
    use_threads(options.threads)
    from melodi.drawing import plotting
    from melodi.evaluation.curves import draw_recall

    if options.task == "forgetting" and not options.run:
        raise ValueError("forgetting curves are measured on runs: give one or more with --run")
    if not options.run and not options.presets:
        raise ValueError("--presets names no preset: give one or more, or runs with --run")
    if options.run and options.task not in OF_RUNS:
        raise ValueError(
            f"--run with {options.task}, whose made-up tokens no run has learned: choose one of "
            f"{', '.join(OF_RUNS)}"
        )
    if options.run:
        why = "is for tiny models, and --run asks runs: drop it"
        check_not_given(options, OF_TINY_MODELS, why)
        if options.task == "forgetting":
            check_not_given(options, ("seed",), "changes nothing in forgetting: drop it")
    else:
        check_not_given(options, ("data", "split"), "is for runs: add --run, or drop it")
    folder = options.out / (f"{options.task}-of-runs" if options.run else options.task)
    folder.mkdir(parents=True, exist_ok=True)
    records, failed = (asked_runs(options, folder), []) if options.run else trained(options, folder)
    if options.json:
        print(json_text(records, indent=2))
    elif records:
        print_recall(options.task, records)
    if records and plotting() is not None:
        draw_recall(records, TITLES[options.task], folder.with_suffix(".png"))
    if failed:
        raise ValueError(f"{len(failed)} of the models did not learn: {'; '.join(failed)}")


TITLES = {
    "passkey": "Passkey: a number read k windows ago",
    "needle": "Needle: one key and value among other words",
    "mqar": "Multi-query associative recall",
    "facts": "Facts of one token",
    "rewrite": "Rewrite: the last value of a key",
    "copy": "Copy: a sequence read k windows ago",
    "forgetting": "Forgetting: a window met again after k windows",
}


def trained(options: RecallArgs, folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """One record for each preset, in FOLDER/PRESET.json, made where there is none; and which have
    failed, and why: that does not stop the others."""
    from melodi.config import preset
    from melodi.evaluation.tasks import Sizes, task
    from melodi.run import environment
    from melodi.training.tiny import OPTIMIZER, tiny_config

    chosen = task(options.task, Sizes(options.window, options.windows, facts=options.facts))
    planned = []
    for name in options.presets:
        config = tiny_config(preset(name), chosen)
        settings = {
            "task": options.task,
            "sizes": dataclasses.asdict(chosen.sizes),
            "model": config.to_dict(),
            "optimizer": dataclasses.asdict(OPTIMIZER),
            "steps": options.steps,
            "rows": options.rows,
            "seed": options.seed,
            "enough": ENOUGH,
            "asked": ASKED,
        }
        path = folder / f"{name}.json"
        planned.append((name, config, settings, path, finished(path, settings)))
    found, failed = [], []
    for name, config, settings, path, record in planned:
        if record is None:
            try:
                result = learned(name, config, chosen, options)
            except ValueError as error:
                failed.append(f"{name}: {error}")
                continue
            record = {"name": name, "settings": settings, "made_with": environment(), **result}
            write_json(path, record)
        found.append(record)
    return found, failed


def finished(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """What was made before with the same settings."""
    if not path.exists():
        return None
    record = read_object(path)
    if json_text(record.get("settings")) != json_text(settings):
        raise ValueError(
            f"{path} was made with other settings: choose another --out, or remove the file"
        )
    return record


def learned(name: str, config: Any, chosen: Any, options: RecallArgs) -> dict[str, Any]:
    """Trains a tiny model and asks it."""
    from tqdm import tqdm

    from melodi.evaluation.recall import accuracy
    from melodi.training.tiny import learn

    with tqdm(total=options.steps, desc=name, unit="step", disable=None) as bar:

        def shown(step: int, loss: float) -> None:
            bar.set_postfix_str(f"{loss:.3f} nats", refresh=False)
            bar.update()

        result = learn(
            config,
            chosen,
            steps=options.steps,
            rows=options.rows,
            seed=options.seed,
            enough=ENOUGH,
            progress=shown,
        )
    return {
        "parameters": result.model.num_parameters,
        "memory_floats": sum(config.memory_floats()),
        "steps": len(result.losses),
        "losses": means(result.losses, 50),
        "chance": chosen.chance,
        "curve": accuracy(result.model, chosen, rows=ASKED),
    }


ENOUGH = 0.01
"""Nats per answer at which nothing is left to learn."""
ASKED = 2048
"""Documents whose questions are counted: the farthest are asked least."""


def means(losses: Sequence[float], parts: int) -> list[float]:
    """The losses in so many parts, each as its mean."""
    size = max(-(-len(losses) // parts), 1)
    blocks = [losses[i : i + size] for i in range(0, len(losses), size)]
    return [sum(block) / len(block) for block in blocks]


def asked_runs(options: RecallArgs, folder: Path) -> list[dict[str, Any]]:
    """One record for each run, in FOLDER/RUN.json, made where there is none."""
    from melodi.evaluation.recall import CANDIDATES, forgetting, passkey_in_text
    from melodi.files import checksum as weights_checksum
    from melodi.files import read_header
    from melodi.run import Run, checksum, environment, load, run_folder, weights_file

    planned = []
    for path in options.run:
        run = Run(run_folder(path))
        store = run.open_store(options.data)
        settings = {
            "task": options.task,
            "step": read_header(weights_file(run.folder)).get("step"),
            "weights_checksum": weights_checksum(weights_file(run.folder)),
            "split": options.split,
            "documents_checksum": checksum(store, options.split),
            "rows": options.rows,
            "seed": options.seed,
        }
        place = folder / f"{'-'.join(path.resolve().parts[1:])}.json"
        planned.append((path, store, settings, place, finished(place, settings)))
    found = []
    for path, store, settings, place, record in planned:
        if record is None:
            store.verify(options.split)
            model, documents = load(path), store.split(options.split)
            record = {"name": str(path), "settings": settings, "made_with": environment()}
            if options.task == "forgetting":
                record["curve"] = forgetting(model, documents, rows=options.rows)
            else:
                curve = passkey_in_text(model, documents, rows=options.rows, seed=options.seed)
                record |= {"curve": curve, "chance": 1 / CANDIDATES}
            write_json(place, record)
        found.append(record)
    return found


def print_recall(task: str, records: list[dict[str, Any]]) -> None:
    distances = sorted({point["distance"] for record in records for point in record["curve"]})
    figure = "nats per token saved" if task == "forgetting" else "right answers"
    print_table(
        f"{TITLES[task]} ({figure}, by number of windows since)",
        ["", *map(str, distances)],
        [
            *[[record["name"], *cells(record, distances)] for record in records],
            *chance(records, distances),
            *asked(records, distances),
        ],
    )


def chance(records: list[dict[str, Any]], distances: Sequence[int]) -> list[list[str]]:
    """What guessing would give, where answers are right or wrong."""
    found = {record.get("chance") for record in records}
    return [["chance", *[f"{one:.2f}"] * len(distances)] for one in found if one is not None]


def asked(records: list[dict[str, Any]], distances: Sequence[int]) -> list[list[str]]:
    """How many questions are behind each share, where all models were asked the same."""
    counts = {tuple(point.get("questions", 0) for point in record["curve"]) for record in records}
    found = counts.pop()
    same = not counts and all(found) and len(found) == len(distances)
    return [["questions", *[f"{count:,}" for count in found]]] if same else []


def cells(record: dict[str, Any], distances: Sequence[int]) -> list[str]:
    points = {point["distance"]: point for point in record["curve"]}
    return [cell(points[distance]) if distance in points else "" for distance in distances]


def cell(point: dict[str, Any]) -> str:
    if "accuracy" in point:
        return f"{point['accuracy']:.2f}"
    return f"{point['remembered']['value']:.3f}"
