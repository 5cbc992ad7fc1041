"""Which runs a recipe is made of, where they are, and how far each has come.

DIR/NAME/ROW-seedK is an ordinary run folder, and DIR/NAME/recipe.json says what all of them have in
common. A row that another recipe in the same DIR has trained already, with the same model, training
and documents, is not trained again: its run folder is used where it is.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from melodi.config import ModelConfig
from melodi.config.checks import from_dict
from melodi.config.training import TrainConfig
from melodi.data.store import TokenStore
from melodi.evaluation.record import record_name
from melodi.files import read_header, read_object, write_json
from melodi.paper.recipe import Recipe, Row
from melodi.paper.recipes import recipe_named
from melodi.paper.scales import Scale
from melodi.run import Run, checksum, held_out_checksums, weights_file
from melodi.training.checkpoint import Checkpoints

RECIPE = "recipe.json"
State = Literal["new", "begun", "trained", "done"]


@dataclass(frozen=True)
class Settings:
    """What all runs of a recipe have in common."""

    recipe: str
    scale: Scale
    vocab_size: int
    tokens: int | None = None
    """Training tokens of a run; the scale's when not given."""
    seeds: int = 1
    """Seeds 1, 2 … of every row."""
    split: str = "test"
    eval_tokens: int | None = None
    """Whole documents of the split are read until they hold so many; all when not given."""
    store: str | None = None
    train_checksum: str | None = None
    held_out_checksums: dict[str, str] = dataclasses.field(default_factory=dict)
    """Of validation and test documents; empty in plans of earlier versions."""

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RECIPE, dataclasses.asdict(self))

    @classmethod
    def read(cls, folder: Path) -> "Settings":
        values = read_object(folder / RECIPE)
        try:
            return from_dict(cls, {**values, "scale": from_dict(Scale, values["scale"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder / RECIPE} is damaged: {error}") from None

    @property
    def record_name(self) -> str:
        """Where a run has its evaluation."""
        return record_name(self.split, self.eval_tokens)


@dataclass(frozen=True)
class Planned:
    """One run: a row and a seed."""

    row: Row
    seed: int
    folder: Path
    model: ModelConfig
    train: TrainConfig

    @property
    def tokens(self) -> int:
        """Of training, padding included."""
        train = self.train
        return train.steps * train.rows * train.segment_windows * self.model.window

    @property
    def run(self) -> Run:
        return Run(self.folder)


def settings_for(name: str, scale: Scale, store: TokenStore | None, **choices: Any) -> Settings:
    if store is None:
        return Settings(name, scale, scale.vocab_size, **choices)
    return Settings(
        name,
        scale,
        store.vocab_size,
        store=str(store.path.resolve()),
        train_checksum=checksum(store, "train"),
        held_out_checksums=held_out_checksums(store),
        **choices,
    )


def plan(
    settings: Settings,
    out: Path,
    labels: Sequence[str] = (),
    exact: bool = True,
    own: Path | None = None,
) -> list[Planned]:
    """The runs of the rows with these labels, or of all, seed by seed: every row is there once
    before any is there twice. A report is not exact about what a dialect meant when other recipes'
    runs were made. `own` is the recipe's folder where it has another name than the recipe."""
    recipe = recipe_named(settings.recipe)
    rows = chosen_rows(recipe, labels)
    trained = known_runs(settings, out, exact)
    planned = []
    for seed in range(1, settings.seeds + 1):
        for row in rows:
            model, train = configs_of(settings, row, seed)
            folder = (own or out / recipe.name) / f"{slug(row.label)}-seed{seed}"
            if not Run(folder).exists:
                answers = dataclasses.asdict(model.answers) if exact else None
                twin = trained.get(identity(model, train, settings.train_checksum, answers))
                folder = twin or folder
            planned.append(Planned(row, seed, folder, model, train))
    return planned


def chosen_rows(recipe: Recipe, labels: Sequence[str]) -> list[Row]:
    known = [row.label for row in recipe.rows]
    for label in labels:
        if label not in known:
            raise ValueError(
                f"--rows {label!r} is not in {recipe.name}: choose from "
                f"{', '.join(repr(one) for one in known)}"
            )
    return [row for row in recipe.rows if not labels or row.label in labels]


def configs_of(settings: Settings, row: Row, seed: int) -> tuple[ModelConfig, TrainConfig]:
    recipe, scale = recipe_named(settings.recipe), settings.scale
    usual = scale.ablation_tokens if recipe.ablation else scale.tokens
    equal = scale.equal or recipe.equal
    return (
        scale.config(row.shape, settings.vocab_size, equal),
        scale.train(row.shape, settings.tokens or usual, seed),
    )


def slug(label: str) -> str:
    """A label as the name of a folder."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower().replace("×", "x")).strip("-")


def identity(
    model: ModelConfig, train: TrainConfig, checksum: str | None, answers: dict[str, Any] | None
) -> str:
    """Equal for two runs that would have the same result."""
    parts = [model.to_dict(), dataclasses.asdict(train), checksum, answers]
    return json.dumps(parts, sort_keys=True)


def known_runs(settings: Settings, out: Path, exact: bool) -> dict[str, Path]:
    """The runs of all recipes in a folder, by identity; without those whose held-out documents are
    others."""
    found: dict[str, Path] = {}
    for config in sorted(out.glob("*/*/config.json")):
        if (config.parent.parent / RECIPE).exists():
            run = Run(config.parent)
            model, train, data = run.configs()
            if other_held_out(data, settings):
                continue
            answers = run.answers() if exact else None
            key = identity(model, train, data["train_checksum"], answers)
            found.setdefault(key, config.parent)
    return found


def other_held_out(data: dict[str, Any], settings: Settings) -> list[str]:
    """The held-out splits of a run that are known to be others than the recipe's."""
    wanted = settings.held_out_checksums
    noted = data.get("held_out_checksums", {})
    return [split for split in wanted if noted.get(split, wanted[split]) != wanted[split]]


def check(planned: Planned, settings: Settings) -> None:
    """Refuses a folder that holds another run than the one that belongs there."""
    if not planned.run.exists:
        return
    model, train, data = planned.run.configs()
    difference = (
        first_difference(model, planned.model)
        or first_difference(train, planned.train)
        or (data["train_checksum"] != settings.train_checksum and "other training documents")
        or (other_held_out(data, settings) and "other held-out documents")
        or changed_meaning(planned.run)
    )
    if difference:
        raise ValueError(
            f"{planned.folder} holds another run ({difference}): give the --scale, --tokens, "
            "--precision and --data that it was made with, or choose another --out"
        )


def changed_meaning(run: Run) -> str:
    """Whether the run's dialect means something else now than when it was begun, in words."""
    dialect = run.configs()[0].dialect
    if run.answers() is None:
        return f"of a version that did not say what dialect {dialect!r} meant"
    odd = [*run.changed_answers()]
    return f"of a version in which dialect {dialect!r} had another {odd[0]}" if odd else ""


def first_difference(ours: Any, wanted: Any) -> str:
    for field in dataclasses.fields(ours):
        have, want = getattr(ours, field.name), getattr(wanted, field.name)
        if have != want:
            return f"its {field.name} is {have}, not {want}"
    return ""


def state_of(planned: Planned, settings: Settings) -> State:
    if not planned.run.started:
        return "new"
    if step_of(planned.run) < planned.train.steps:
        return "begun"
    return "done" if is_evaluated(planned, settings) else "trained"


def step_of(run: Run) -> int:
    """The last step that is on disk: of a checkpoint, or, where weights were left out of a copy of
    the run, of its metrics."""
    if run.checkpoints.exists():
        return max(Checkpoints(run.checkpoints, 1).steps(), default=0)
    steps = [record["step"] for record in run.read_metrics() if "loss" in record]
    return max(steps, default=0)


def is_evaluated(planned: Planned, settings: Settings) -> bool:
    """Whether there is a record of the run's present weights on these documents; the name of its
    file says how many, and in which precision."""
    path = planned.folder / settings.record_name
    if not path.exists():
        return False
    record = read_object(path)
    documents = settings.held_out_checksums.get(settings.split)
    other = documents and record.get("documents_checksum", documents) != documents
    if other or None in [one.get("nats") for one in record.get("per_document", [{}])]:
        return False  # a loss that was not finite is null
    try:
        step = read_header(weights_file(planned.folder)).get("step")
    except FileNotFoundError:
        return True
    return step is None or int(step) == record.get("step")
