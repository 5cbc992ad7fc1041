"""`melodi reproduce`: a table or figure of the paper, as a plan or as runs and a report."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from melodi.cli.console import (
    Texts,
    check_at_least,
    check_at_most,
    check_not_given,
    device_named,
    parse,
    print_table,
    use_threads,
)
from melodi.config.training import Precision

if TYPE_CHECKING:
    from melodi.data.store import TokenStore
    from melodi.paper.estimate import Estimate
    from melodi.paper.plan import Settings


MOST_SEEDS = 1000
"""Each is a run of every row."""
OF_RECIPES = [
    "scale",
    "seeds",
    "tokens",
    "split",
    "eval_tokens",
    "rows",
    "list",
    "json",
    "precision",
]
"""What cannot be said where a run is repeated."""


@dataclass
class ReproduceArgs:
    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """baselines, longer-windows, memory-size, coverage, window-size, short-term-layers,
    long-term-layers, branching, copy, long-term-position or systems; or the folder of a run, which
    is then trained once more, in --out, and compared."""
    scale: str = "laptop"
    """laptop: small models with the paper's ratios. paper: its own sizes, tokens and recipe."""
    data: Path | None = None
    """The token store, whose vocabulary all models get; of a run that is repeated its own when not
    given."""
    out: Path = Path("results")
    """The runs are OUT/NAME/ROW-seedK, the report is OUT/NAME/report.html and its Markdown."""
    seeds: int = 1
    """Seeds 1 to N of every row."""
    tokens: int | None = None
    """Training tokens of a run; the scale's when not given."""
    split: Literal["validation", "test"] = "test"
    """The documents of the report."""
    eval_tokens: int | None = None
    """Evaluate on whole documents that hold about this many tokens; on all when not given."""
    rows: Texts = ()
    """Labels of the rows to run; all when not given."""
    list: bool = False
    """Show the plan and its cost, and run nothing."""
    json: bool = False
    """With --list: print a JSON list instead of a table."""
    threads: int | None = None
    """CPU threads; torch's own choice when not given."""
    device: str | None = None
    """cpu, cuda …; the GPU where there is one when not given."""
    precision: Precision = "fp32"
    """Of training and evaluation, the same for all rows. auto: bf16 where this machine is clearly
    faster with it."""


def reproduce(args: list[str]) -> None:
    """A table or figure of the paper: ours beside the paper's numbers.

    What is done is skipped, what was interrupted goes on.

    Example: melodi reproduce baselines --data store --out results --seeds 2

    Example: melodi reproduce baselines --data store --list
    """
    options = parse(ReproduceArgs, reproduce, args)
    check_at_least(1, seeds=options.seeds, tokens=options.tokens, eval_tokens=options.eval_tokens)
    check_at_most(MOST_SEEDS, seeds=options.seeds)
    if options.json and not options.list:
        raise ValueError("--json is for the plan: add --list")
    if options.device is not None:
        device_named(options.device)
    from melodi.paper.recipes import RECIPES
    from melodi.run import Run

    if options.name not in RECIPES and Run(options.name).exists:
        repeat_run(options)
        return
    use_threads(options.threads)
    settings, store = settings_of(options)
    if options.list:
        show_plan(options, settings, store)
    else:
        run_recipe(options, settings, store)


def settings_of(options: ReproduceArgs) -> "tuple[Settings, TokenStore | None]":
    from melodi.data.store import TokenStore
    from melodi.paper.plan import RECIPE, Settings, settings_for
    from melodi.paper.recipes import recipe_named
    from melodi.paper.scales import SCALES
    from melodi.paper.shapes import Shape
    from melodi.precision import resolve
    from melodi.training.distributed import device_of

    recipe_named(options.name)
    if options.scale not in SCALES:
        raise ValueError(f"--scale {options.scale} is unknown: choose one of {', '.join(SCALES)}")
    store = None if options.data is None else TokenStore.open(options.data)
    scale = SCALES[options.scale]
    device = device_of(options.device)
    before = options.out / options.name / RECIPE
    if options.precision == "auto" and before.exists():  # whatever the machine is busy with now
        precision = Settings.read(before.parent).scale.precision
    else:
        precision = resolve(options.precision, device, scale.config(Shape()))
    settings = settings_for(
        options.name,
        replace(scale, precision=precision),
        store,
        tokens=options.tokens,
        seeds=options.seeds,
        split=options.split,
        eval_tokens=options.eval_tokens,
    )
    return settings, store


def run_recipe(options: ReproduceArgs, settings: "Settings", store: "TokenStore | None") -> None:
    from melodi.paper.report import write_report
    from melodi.paper.reproduce import reproduce as reproduce_recipe
    from melodi.training.distributed import processes

    if store is None:
        raise ValueError("--data is missing: make a store with melodi prepare --out STORE")
    if not len(store.split(settings.split)):
        raise ValueError(f"store {store.path} has no {settings.split} documents: choose --split")
    with processes(options.device) as group:
        left = reproduce_recipe(settings, store, options.out, group, options.rows)
        if not group.first:
            return
        for path in write_report(options.out / settings.recipe):
            print(path)
    if left:
        raise ValueError(f"the report is without {len(left)} runs: {'; '.join(left)}")


def repeat_run(options: ReproduceArgs) -> None:
    """With as many threads as the run had, which decide how sums are rounded. Exit code 1 says, as
    that of diff does, that something differs."""
    from melodi.paper.reproduce import made_otherwise, repeat
    from melodi.run import Run
    from melodi.training.distributed import processes

    run = Run(options.name)
    check_not_given(options, OF_RECIPES, "is for recipes: a run is repeated as it was made")
    use_threads(options.threads or run.environment().get("cpu_threads"))
    store = run.open_store(options.data)
    differs = False
    with processes(options.device) as group:
        for name, before, now in repeat(run.folder, options.out, store, group):
            same = "the same" if now == before else f"differs by {now - before:+.3g}"
            print(f"{name}: perplexity {before} in {run.folder}, {now} in {options.out}: {same}")
            differs = differs or now != before
    if differs:
        print(made_otherwise(run, Run(options.out)))
        sys.exit(1)


def show_plan(options: ReproduceArgs, settings: "Settings", store: "TokenStore | None") -> None:
    from melodi.files import json_text
    from melodi.paper.estimate import calibrate, estimate, measured_speed
    from melodi.paper.plan import check, plan
    from melodi.training.distributed import device_of

    planned = plan(settings, options.out, options.rows)
    for one in planned if store else ():
        check(one, settings)
    measured = measured_speed(planned)
    speed = measured or calibrate(device_of(options.device), settings.scale.precision)
    costs = [estimate(one, settings, store, speed) for one in planned]
    if options.json:
        print(json_text([cost.to_dict() for cost in costs], indent=2))
        return
    print_plan(settings, costs)
    source = "runs of this plan" if measured else "a short calibration on this machine"
    print(f"rough: at {speed / 1e9:,.1f} GFLOP/s, the speed of {source}")
    if store is None:
        print(f"vocabulary {settings.vocab_size:,}; give --data for that of your store")


def print_plan(settings: "Settings", costs: "list[Estimate]") -> None:
    from melodi.paper.recipes import recipe_named
    from melodi.training.reporting import duration

    dicts = [cost.to_dict() for cost in costs]
    columns = ["row", "seed", "parameters", "floats", "steps", "tokens", "TFLOP", "time", "state"]
    rows = [
        [
            row["row"],
            str(row["seed"]),
            *[f"{row[key]:,}" for key in ("parameters", "floats", "steps", "tokens")],
            f"{row['flops'] / 1e12:,.3g}",
            duration(3600 * row["hours"]),
            f"step {row['step']}" if row["state"] == "begun" else row["state"],
        ]
        for row in dicts
    ]
    title = recipe_named(settings.recipe).title
    print_table(f"{title}; scale {settings.scale.name}", columns, rows)
    print(
        f"{len(dicts)} runs, {sum(row['flops'] for row in dicts) / 1e12:,.3g} TFLOP in all, "
        f"about {duration(3600 * sum(row['hours'] for row in dicts))} left"
    )
