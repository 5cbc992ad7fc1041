"""A recipe from its first run to its last: what is done is skipped, what was interrupted goes on.

Each run is trained by the trainer of `melodi train` and evaluated as `melodi eval` does it. Several
processes may work on one recipe: a run that another works on is left to it.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from melodi.config.training import Execution
from melodi.data.store import TokenStore
from melodi.evaluation.record import evaluate_run, write_record
from melodi.files import locked, read_object
from melodi.paper.plan import (
    RECIPE,
    Planned,
    Settings,
    changed_meaning,
    check,
    plan,
    state_of,
    step_of,
)
from melodi.paper.results import check_same, gather
from melodi.run import Run, check_documents, load
from melodi.training.distributed import Processes
from melodi.training.trainer import train

Say = Callable[[str], object]


def reproduce(
    settings: Settings,
    store: TokenStore,
    out: Path,
    group: Processes,
    labels: Sequence[str] = (),
    say: Say = print,
) -> list[str]:
    """Makes every run of the rows with these labels, or of all. Gives what was not made, and why:
    a run that another process works on, or whose training failed, does not stop the others."""
    say = say if group.first else (lambda line: None)
    planned = plan(settings, out, labels)
    # All are looked at before the first is trained, those of other rows too.
    for one in plan(settings, out):
        check(one, settings)
    group.on_first(lambda: check_same_evaluation(settings, out, labels))
    group.on_first(lambda: note(settings, out / settings.recipe))
    # What the report would refuse is refused before hours of training.
    group.on_first(lambda: check_same(gather(out / settings.recipe).evaluated))
    left: list[str] = []
    for number, one in enumerate(planned, 1):
        title = f"{settings.recipe} {number}/{len(planned)}: {one.row.label}, seed {one.seed}"
        if group.any(group.first and is_busy(one.folder)):
            left.append(f"{title}: another process is working on it")
            say(left[-1])
        elif group.any(group.first and state_of(one, settings) == "done"):
            say(f"{title}: done already")
        else:
            say(f"{title}: {one.folder}")
            try:
                with told_how_to_go_on(title):
                    make(one, settings, store, group)
            except (ValueError, OSError, RuntimeError, MemoryError) as error:
                if group.world > 1:  # the others may not have failed, and wait for this process
                    raise
                left.append(f"{title}: {error or 'out of memory'}")
                say(left[-1])
    return left


def check_same_evaluation(settings: Settings, out: Path, labels: Sequence[str]) -> None:
    """Refuses to evaluate these rows on other documents than the rest of the table."""
    folder = out / settings.recipe
    if not (folder / RECIPE).exists():
        return
    before = Settings.read(folder)
    if (before.split, before.eval_tokens) == (settings.split, settings.eval_tokens):
        return
    for one in plan(replace(settings, seeds=max(settings.seeds, before.seeds)), out):
        redone = (not labels or one.row.label in labels) and one.seed <= settings.seeds
        if not redone and one.run.started and state_of(one, before) == "done":
            tokens = "" if before.eval_tokens is None else f" --eval-tokens {before.eval_tokens}"
            raise ValueError(
                f"{one.folder} was evaluated with --split {before.split}{tokens or ' alone'}: give "
                "the same, or no --rows, so that all rows of the report have the same documents"
            )


def note(settings: Settings, folder: Path) -> None:
    """Says what the runs have in common; seeds of an earlier command stay in the report."""
    before = Settings.read(folder).seeds if (folder / RECIPE).exists() else 0
    replace(settings, seeds=max(settings.seeds, before)).write(folder)


def make(planned: Planned, settings: Settings, store: TokenStore, group: Processes) -> None:
    """Trains a run as far as it is not trained, then evaluates it."""
    if not group.any(group.first and state_of(planned, settings) == "trained"):
        train(
            planned.folder,
            store,
            planned.model,
            planned.train,
            Execution(),
            group,
            resume=planned.run.exists,
        )
    group.on_first(
        lambda: evaluate_folder(planned.run, store, settings.split, settings.eval_tokens, group)
    )


def evaluate_folder(
    run: Run, store: TokenStore, split: str, max_tokens: int | None, group: Processes
) -> dict[str, Any]:
    """The record of a trained run, which is also written into its folder."""
    store.verify(split)
    with locked(run.folder):
        model = load(run.folder).to(group.device)
        precision = run.configs()[1].precision
        record = evaluate_run(model, run, store, split, max_tokens=max_tokens, precision=precision)
        bad = [one["document"] for one in record["per_document"] if not math.isfinite(one["nats"])]
        if bad:
            raise ValueError(
                f"{run.folder} gives no finite loss on {split} document {bad[0]}: its training has "
                "failed, so it is left without a record"
            )
        write_record(run, record)
    return record


def repeat(
    folder: Path, out: Path, store: TokenStore, group: Processes
) -> list[tuple[str, float, float]]:
    """Trains the run of a folder once more, in another one, and evaluates it on the same
    documents: file name, perplexity then and perplexity now of every record."""
    run, again = Run(folder), Run(out)
    if out.resolve() == folder.resolve():
        raise ValueError(f"--out {out} is the run itself: choose another folder")
    if changed := changed_meaning(run):
        commit = run.environment().get("commit")
        raise ValueError(f"{folder} is {changed}: check out its commit, {commit}, to repeat it")
    model, config, data = run.configs()
    check_documents(store, data)
    if (step := step_of(run)) < config.steps:
        raise ValueError(
            f"{folder} stands at step {step} of {config.steps}: train it to its end first, with "
            f"melodi train --out {folder} --resume"
        )
    found = {
        path.name: read_object(path, "split", "max_tokens", "perplexity")
        for path in sorted(folder.glob("*eval-*.json"))
    }
    precision = config.precision
    records = {
        name: record
        for name, record in found.items()
        if record.get("own_store", True) and record.get("precision", precision) == precision
    }
    if not records:
        raise ValueError(
            f"{folder} has no evaluation on its own store to compare with: melodi eval {folder}"
        )
    pairs = []

    def compare() -> None:
        for name, record in records.items():
            now = evaluate_folder(again, store, record["split"], record["max_tokens"], group)
            pairs.append((name, record["perplexity"], now["perplexity"]))

    with told_how_to_go_on(str(out)):
        train(out, store, model, config, Execution(), group, resume=again.exists)
        group.on_first(compare)
    return pairs


def made_otherwise(run: Run, again: Run) -> str:
    """What a repeated run was made with that the first was not, in words."""
    then, now = run.environment(), again.environment()
    changes = [
        f"{key} {then.get(key, 'unknown')} then, {now.get(key)} now"
        for key in ("cpu", "capability", "cpu_threads", "cuda", "torch", "commit")
        if then.get(key, "unknown") != now.get(key)
    ]
    if not changes:
        return "the machine, its threads, torch and the commit are the same"
    return (
        f"{'; '.join(changes)}. Where sums are rounded otherwise, a training ends elsewhere, as "
        "one with another seed does"
    )


def is_busy(folder: Path) -> bool:
    """Whether a process works in the folder now."""
    if not folder.exists():
        return False
    try:
        with locked(folder):
            return False
    except ValueError:
        return True


@contextlib.contextmanager
def told_how_to_go_on(title: str) -> Iterator[None]:
    """Ctrl-C ends in order, whatever was going on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        how = stop.args[0].partition(":")[0] if stop.args else "interrupted"
        signal = stop.args[1:]
        raise KeyboardInterrupt(f"{title}: {how}; the same command goes on", *signal) from None
