"""Recipes: every point of the paper, in its ratios; runs that resume, are skipped, and repeat."""

import json
import math
import os
import shlex
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import printed, refused

from melodi.cli import main
from melodi.config import PRESETS, sandwich
from melodi.data.prepare import prepare
from melodi.data.store import TokenStore
from melodi.files import locked, read_json, write_json
from melodi.paper import estimate, figures, numbers, reproduce
from melodi.paper.plan import Planned, configs_of, plan, settings_for, slug, state_of
from melodi.paper.recipe import EQUAL, Row
from melodi.paper.recipes import RECIPES
from melodi.paper.scales import LAPTOP, PAPER, SCALES, Scale, parameters, spread
from melodi.training.learner import Learner
from melodi.training.trainer import Trainer

TINY = replace(
    LAPTOP,
    name="tiny",
    width=16,
    num_heads=2,
    layers=3,
    counted_layers=4,
    window=8,
    queue=4,
    rows=2,
    segment_windows=2,
    tokens=64,
    ablation_tokens=64,
)
"""Two steps of two rows: what makes a recipe a matter of seconds."""
DRAWN = ("baselines", "coverage", "window-size", "long-term-layers", "copy")
"""One recipe for each kind of axis; the others are not drawn here, to save time."""


@pytest.fixture
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "plotting", lambda: None)


@pytest.fixture(autouse=True)
def _tiny_scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(SCALES, "tiny", TINY)
    monkeypatch.setattr(estimate, "ROWS", 1)
    monkeypatch.setattr(estimate, "WINDOWS", 1)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def make_store(folder: Path, word: str = "book") -> TokenStore:
    for i in range(9):
        (folder / f"{i}.txt").write_text(f"{i} a {word} and " * (2 + i % 3))
    return prepare([folder], folder / "store", tokenizer="bytes", workers=1)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return make_store(tmp_path_factory.mktemp("books"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All recipes write here, so that rows which they have in common are trained once."""
    return tmp_path_factory.mktemp("results")


def command(name: str, store: TokenStore, out: Path, more: str = "") -> str:
    flags = f"--scale tiny --data '{store.path}' --out '{out}' --threads 1 --device cpu"
    return f"reproduce {name} {flags} {more}"


def last_line(capsys: pytest.CaptureFixture[str], command: str) -> str:
    """What a command that has trained something ends with, when something else went wrong."""
    with pytest.raises(SystemExit) as end:
        main(shlex.split(command))
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def planned_at(name: str, scale: Scale) -> list[Planned]:
    return plan(settings_for(name, scale, None), Path("nowhere"))


def row_named(name: str, label: str, scale: Scale = LAPTOP) -> Planned:
    return next(one for one in planned_at(name, scale) if one.row.label == label)


def all_rows() -> list[tuple[str, Row]]:
    return [(name, row) for name, recipe in RECIPES.items() for row in recipe.rows]


def test_every_recipe_has_every_point() -> None:
    """The grids of the paper's tables and figures are complete, at both scales."""
    labels = {name: [row.label for row in recipe.rows] for name, recipe in RECIPES.items()}
    counts = {name: len(rows) for name, rows in labels.items()}
    assert counts == {
        "baselines": 6 + 1 + 6,
        "longer-windows": 13,
        "memory-size": 5 * 4 + 3,
        "coverage": 7,
        "window-size": 6 * 3,
        "short-term-layers": 5,
        "long-term-layers": 1 + 2 * 3,
        "branching": 4,
        "copy": 6,
        "long-term-position": 7,
        "systems": 12,
    }
    sizes = {(row.shape.short, row.shape.long) for row in RECIPES["memory-size"].rows[:20]}
    assert sizes == {(s, m) for s in (8, 32, 64, 128, 192) for m in (0, 32, 64, 96)}
    for scale in (LAPTOP, PAPER):
        covered = [one.model.long_term_windows for one in planned_at("coverage", scale)]
        assert covered == [2, 4, 8, 16, 32, 64, 128]
        window = scale.window
        found = {one.model.window for one in planned_at("window-size", scale)}
        assert found == {window, window // 2, window // 4}
        longer = {one.model.window for one in planned_at("longer-windows", scale)}
        assert longer == {window, 2 * window, 4 * window, 6 * window}
        layers = [one.model.layers for one in planned_at("short-term-layers", scale)]
        assert [sum(kind in ("short", "long") for kind in kinds) for kinds in layers] == [
            *[1, 2, 4, 7, 13]
        ]
        assert layers[2] == sandwich(13, long_term=(8,), short_term=(0, 4, 8, 12))
        places = [one.model.layers.index("long") for one in planned_at("long-term-position", scale)]
        assert places == [5, 6, 7, 8, 9, 10, 11]
        many = [
            sum(kind == "long" for kind in one.model.layers)
            for one in planned_at("long-term-layers", scale)
        ]
        assert many == [0, 1, 2, 3, 1, 2, 3]
    assert spread(1, 13) == [0]
    assert spread(7, 13) == [0, 2, 4, 6, 8, 10, 12]


def test_the_paper_scale_is_the_papers() -> None:
    """At the scale of the paper the rows are its models, trained as it says."""
    for suffix, end in (("", ""), (", 12 layers", "-12")):
        for label, preset in {
            "Transformer-XL": "transformer-xl",
            "Block-Recurrent": "block-recurrent",
            "Memorizing": "memorizing",
            "Melodi S192+L32": "melodi-s192-l32",
            "Melodi S128+L64": "melodi-s128-l64",
            "Melodi S192+L96": "melodi-s192-l96",
        }.items():
            row = row_named("baselines", label + suffix, PAPER)
            assert row.model == PRESETS[f"paper-{preset}{end}"]
            assert (row.train.steps, row.train.rows) == (500_000, 32)
            assert row.train.segment_windows * row.model.window == 4096
    assert row_named("copy", "S64+L64, copied", PAPER).train.steps == 200_000
    longest = row_named("longer-windows", "Transformer-XL, window 3072", PAPER)
    assert longest.train.segment_windows * longest.model.window == 6144
    half = row_named("window-size", "Melodi S128+L64, window 256", PAPER).model
    assert (half.short_term_tokens, half.long_term_tokens, half.long_term_windows) == (64, 32, 256)


def test_memory_floats_are_the_papers() -> None:
    """The memory columns of Tables 3, 5 and 6, exactly."""
    floats = {
        (name, one.row.label): sum(one.model.memory_floats())
        for name in ("baselines", "longer-windows")
        for one in planned_at(name, PAPER)
    }
    expected = {
        ("baselines", "Transformer-XL"): 13_631_488,
        ("baselines", "Block-Recurrent"): 13_107_200,
        ("baselines", "Memorizing"): 147_849_216,
        ("baselines", "Melodi S192+L32"): 10_944_512,
        ("baselines", "Melodi S128+L64"): 18_481_152,
        ("baselines", "Melodi S192+L96"): 27_721_728,
        ("baselines", "Melodi S192+L96, 12 layers"): 27_525_120,
        ("baselines", "Block-Recurrent, 12 layers"): 12_058_624,
        ("longer-windows", "Transformer-XL, window 3072"): 81_788_928,
        ("longer-windows", "Block-Recurrent, window 2048"): 50_855_936,
        ("longer-windows", "Memorizing, window 2048"): 188_743_680,
    }
    assert {key: floats[key] for key in expected} == expected


def test_the_laptop_is_a_scale_model() -> None:
    """S/W and L/W are the paper's in every row that has at least one such token; memory between
    systems is, up to a tenth; gradients flow from one window to another, and a step has as many
    tokens as of any other row, up to a fifteenth. Half the window covers as much history."""
    for name in RECIPES:
        for small, large in zip(planned_at(name, LAPTOP), planned_at(name, PAPER), strict=True):
            for field in ("short_term_tokens", "long_term_tokens"):
                ours, papers = getattr(small.model, field), getattr(large.model, field)
                exact = papers * small.model.window / large.model.window
                assert ours == (max(exact, 1) if papers else 0), small.row.label
            assert small.train.segment_windows >= 2
            step = small.train.rows * small.train.segment_windows * small.model.window
            assert step in (1920, 2048), small.row.label
    for one in planned_at("window-size", LAPTOP):
        slots = one.model.long_term_tokens * one.model.long_term_windows
        whole = LAPTOP.config(replace(one.row.shape, window=512))
        assert slots == whole.long_term_tokens * whole.long_term_windows, one.row.label
    labels = [row.label for row in RECIPES["baselines"].rows[:6]]

    def ratios(scale: Scale) -> list[float]:
        floats = [sum(row_named("baselines", x, scale).model.memory_floats()) for x in labels]
        return [one / floats[0] for one in floats]

    assert ratios(LAPTOP) == pytest.approx(ratios(PAPER), rel=0.1)


@pytest.mark.parametrize("name", RECIPES)
def test_rows_have_equal_parameters_and_tokens(name: str) -> None:
    """At laptop scale the rows of one depth are within 3 % of each other in parameters, whatever
    the vocabulary, and all rows within a step of each other in tokens."""
    for vocab_size in (512, 8192):
        settings = replace(settings_for(name, LAPTOP, None), vocab_size=vocab_size)
        by_depth: dict[int, list[int]] = {}
        for row in RECIPES[name].rows:
            model, _ = configs_of(settings, row, 1)
            assert model.vocab_size == vocab_size
            by_depth.setdefault(row.shape.depth, []).append(parameters(model))
        assert all(max(counts) / min(counts) < 1.03 for counts in by_depth.values())
    wanted = LAPTOP.ablation_tokens if RECIPES[name].ablation else LAPTOP.tokens
    for one in planned_at(name, LAPTOP):
        step = one.tokens / one.train.steps
        assert abs(one.tokens - wanted) <= step / 2


def test_systems_are_equal_at_the_papers_scale_too() -> None:
    counts = [parameters(one.model) for one in planned_at("systems", PAPER)]
    assert max(counts) / min(counts) < 1.03


def test_labels_name_rows() -> None:
    """Claims and references are about rows that are there, and folders have names of their own."""
    for recipe in RECIPES.values():
        labels = [row.label for row in recipe.rows]
        assert len({slug(label) for label in labels}) == len(labels)
        assert recipe.reference in labels
        for claim in recipe.claims:
            assert {*claim.better, *claim.worse} <= set(labels)
            assert len(claim.better) == len(claim.worse)
            assert claim.where


def test_the_papers_numbers_bear_out_its_claims() -> None:
    """A slip of the pen in a table would show here: on PG-19 with the T5 vocabulary, of which the
    text speaks, every claimed ordering holds in the numbers."""
    checked = 0
    for recipe in RECIPES.values():
        for claim in recipe.claims:
            sides = [
                [recipe.row(label).paper.get(numbers.T5) for label in side]
                for side in (claim.better, claim.worse)
            ]
            if claim.kind == "memory" or not all(isinstance(v, float) for s in sides for v in s):
                continue
            better, worse = (sum(math.log(v) for v in side) for side in sides)
            checked += 1
            if claim.kind == "equal":
                assert abs(better - worse) <= EQUAL, claim.words
            else:
                assert better < worse, claim.words
    assert checked == 12 + 24 + 2 + 3 + 6


def test_figures_have_no_numbers() -> None:
    """What the paper shows only in pictures has no value here."""
    for name in ("memory-size", "coverage", "window-size", "short-term-layers", "long-term-layers"):
        assert not any(row.paper for row in RECIPES[name].rows)
    assert all(row.paper for row in RECIPES["longer-windows"].rows)
    assert numbers.LONGER_WINDOWS["Memorizing", 2048] == {numbers.T5: "not stable"}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs(
    name: str,
    store: TokenStore,
    shared: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the plan to the report, every row."""
    if name not in DRAWN:
        monkeypatch.setattr(figures, "plotting", lambda: None)
    printed(capsys, command(name, store, shared))
    settings = settings_for(name, TINY, store)
    runs = plan(settings, shared)
    assert len(runs) == len(RECIPES[name].rows)
    assert {state_of(one, settings) for one in runs} == {"done"}
    page = (shared / name / "report.md").read_text()
    for one in runs:
        record = read_json(one.folder / "eval-test.json")
        assert f"| {one.row.label} |" in page
        assert f"{record['perplexity']:.4f}" in page
    assert "not run" not in page
    assert (shared / name / "figure.png").exists() == (name in DRAWN)


def test_list_runs_nothing(
    store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan has every run with what it costs, and leaves no trace."""
    out = tmp_path / "out"
    listed = json.loads(printed(capsys, command("copy", store, out, "--seeds 2 --list --json")))
    assert [row["seed"] for row in listed] == [1] * 6 + [2] * 6
    for row in listed:
        assert row["state"] == "new"
        assert row["tokens"] == 64
        assert min(row["parameters"], row["floats"], row["flops"], row["hours"]) > 0
    (one,) = (x for x in planned_at("copy", TINY) if x.row.label == "S64+L64, mixed")
    settings = settings_for("copy", TINY, store)
    flops = estimate.training_flops(one)
    assert estimate.estimate(one, settings, None, flops).hours == pytest.approx(1 / 3600)
    more = estimate.estimate(one, settings, store, flops).hours
    reading = estimate.reading_flops(one, settings, store, flops)
    assert more == pytest.approx((1 + reading / flops) / 3600)
    assert reading > 0
    text = printed(capsys, "reproduce baselines --scale paper --list --device cpu")
    assert "196,376,936" in text
    assert "13 runs" in text
    assert not out.exists()


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Ctrl-C while a step is taken."""
    take_step = Learner.take_step

    def interrupted(self: Learner) -> Any:
        figures = take_step(self)
        if self.step == step:
            os.kill(os.getpid(), signal.SIGINT)
        return figures

    monkeypatch.setattr(Learner, "take_step", interrupted)


@pytest.mark.usefixtures("_no_pictures")
def test_an_interrupted_recipe_goes_on(
    store: TokenStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C ends in order and says how to go on; then the numbers are those of a recipe that never
    stopped; and a row repeated from its folder has them, too."""
    rows = "--rows 'ST, branching' 'ST+LT, branching'"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1)
        with pytest.raises(SystemExit) as end:
            main(shlex.split(command("branching", store, tmp_path / "a", rows)))
    assert end.value.code == 128 + signal.SIGINT
    told = capsys.readouterr().err.splitlines()[-1]
    assert "ST, branching, seed 1: stopped after step 1; the same command goes on" in told
    listed = json.loads(
        printed(capsys, command("branching", store, tmp_path / "a", "--list --json"))
    )
    assert [row["state"] for row in listed] == ["new", "begun", "new", "new"]
    printed(capsys, command("branching", store, tmp_path / "a", rows))
    assert "done already" in printed(capsys, command("branching", store, tmp_path / "a", rows))
    printed(capsys, command("branching", store, tmp_path / "b", "--rows 'ST, branching'"))
    page = (tmp_path / "a" / "branching" / "report.md").read_text()
    first, second = (
        read_json(tmp_path / x / "branching/st-branching-seed1/eval-test.json") for x in "ab"
    )
    assert first["per_document"] == second["per_document"]
    assert "2 of 4 rows evaluated" in page
    run = tmp_path / "a" / "branching" / "st-branching-seed1"
    text = printed(capsys, f"reproduce '{run}' --out '{tmp_path}/again' --device cpu")
    assert text.endswith(": the same\n")


@pytest.mark.usefixtures("_no_pictures")
def test_rows_in_common_are_trained_once(
    store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of another recipe in the same folder is used if it is the same in everything."""
    printed(capsys, command("branching", store, tmp_path, "--rows 'ST+LT, branching'"))
    text = printed(capsys, command("systems", store, tmp_path, "--rows 'Melodi S128+L64'"))
    assert "done already" in text
    page = (tmp_path / "systems" / "report.md").read_text()
    assert "branching/st-lt-branching-seed1" in page
    settings = settings_for("systems", TINY, store)
    for other in (replace(settings, tokens=128), replace(settings, train_checksum="other")):
        assert plan(other, tmp_path)[0].folder == tmp_path / "systems" / "melodi-s128-l64-seed1"


@pytest.mark.usefixtures("_no_pictures")
def test_a_run_of_another_process_is_left_to_it(
    store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes can share a recipe."""
    folder = tmp_path / "branching" / "st-branching-seed1"
    folder.mkdir(parents=True)
    rows = "--rows 'ST, branching' 'ST+LT, branching'"
    with locked(folder):
        line = last_line(capsys, command("branching", store, tmp_path, rows))
    assert "without 1 runs: branching 1/2: ST, branching, seed 1: another process is" in line
    assert (folder.parent / "st-lt-branching-seed1" / "eval-test.json").exists()


@pytest.mark.usefixtures("_no_pictures")
@pytest.mark.parametrize("failure", [ValueError, torch.OutOfMemoryError])
def test_a_run_that_fails_does_not_stop_the_others(
    failure: type[Exception],
    store: TokenStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A training that diverges, or has no room, is told at the end, and the other rows are
    there."""
    check_skips = Trainer._check_skips

    def diverges(self: Trainer, figures: dict[str, float]) -> None:
        if "no-branching" in str(self.run.folder):
            raise failure("5 steps in a row had a loss that is not finite")
        check_skips(self, figures)

    monkeypatch.setattr(Trainer, "_check_skips", diverges)
    rows = "--rows 'ST, no branching' 'ST, branching'"
    line = last_line(capsys, command("branching", store, tmp_path, rows))
    assert "ST, no branching, seed 1: 5 steps in a row had a loss that is not finite" in line
    page = (tmp_path / "branching" / "report.md").read_text()
    assert "1 of 4 rows evaluated" in page


@pytest.mark.usefixtures("_no_pictures")
def test_other_runs_are_refused(
    store: TokenStore,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A folder is not continued with other tokens, sizes or documents, nor by another row's run."""
    rows = "--rows 'ST, branching'"
    printed(capsys, command("branching", store, tmp_path, rows))
    line = refused(capsys, command("branching", store, tmp_path, f"{rows} --tokens 128"))
    assert "holds another run (its steps is 2, not 4)" in line
    # Also where the run is of a row that was not asked for.
    others = "--rows 'ST+LT, branching' --tokens 128"
    assert "holds another run" in refused(capsys, command("branching", store, tmp_path, others))
    assert "holds another run" in refused(
        capsys, command("branching", store, tmp_path, f"{rows} --tokens 128 --list")
    )
    other = make_store(tmp_path_factory.mktemp("others"), "poem")
    assert "other training documents" in refused(capsys, command("branching", other, tmp_path))
    monkeypatch.setitem(SCALES, "tiny", replace(TINY, width=32))
    assert "its width is 16, not 32" in refused(capsys, command("branching", store, tmp_path))


@pytest.mark.usefixtures("_no_pictures")
def test_a_dialect_that_has_changed_is_another_run(
    store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What "default" meant is kept with a run; one in which it meant something else is not put into
    a table with those of today, and not repeated as if it could be."""
    line = command("branching", store, tmp_path, "--rows 'ST, branching'")
    printed(capsys, line)
    path = tmp_path / "branching" / "st-branching-seed1" / "config.json"
    config = read_json(path)
    assert config["answers"]["bias_start"] == "near"
    config["answers"]["bias_start"] = "zero"
    path.write_text(json.dumps(config))
    told = "a version in which dialect 'default' had another bias_start"
    assert told in refused(capsys, line)
    again = f"reproduce '{path.parent}' --out '{tmp_path}/again'"
    assert f"{told}: check out its commit" in refused(capsys, again)
    systems = settings_for("systems", TINY, store)
    assert plan(systems, tmp_path)[0].folder.parent.name == "systems"
    del config["answers"]
    path.write_text(json.dumps(config))
    assert "did not say what dialect 'default' meant" in refused(capsys, line)


@pytest.mark.usefixtures("_no_pictures")
def test_all_rows_are_evaluated_on_the_same_documents(
    store: TokenStore,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A part of the rows is not evaluated on other documents than the rest, and a record of another
    store is not taken for one of the recipe's."""
    one, two = "--rows 'ST, branching'", "--rows 'ST, branching' 'ST+LT, branching'"
    printed(capsys, command("branching", store, tmp_path, f"{two} --eval-tokens 20"))
    line = refused(capsys, command("branching", store, tmp_path, one))
    assert "was evaluated with --split test --eval-tokens 20: give the same" in line
    assert "done already" in printed(
        capsys, command("branching", store, tmp_path, f"{one} --eval-tokens 20")
    )
    run = tmp_path / "branching" / "st-branching-seed1"
    other = make_store(tmp_path_factory.mktemp("others"), "poem")
    printed(capsys, f"eval '{run}' --data '{other.path}' --max-tokens 20 --device cpu")
    text = printed(capsys, command("branching", store, tmp_path, f"{one} --eval-tokens 20"))
    assert "done already" in text
    assert read_json(run / "partial-eval-test-20-tokens.json")["own_store"]


@pytest.mark.usefixtures("_no_pictures")
def test_held_out_documents_are_part_of_a_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store with the same training documents and others to test on is another: its rows are not
    compared with those of the first, and its record does not take their place."""
    stores = []
    for name, word in (("a", "book"), ("b", "poem")):
        for split in ("train", "validation", "test"):
            folder = tmp_path / name / split
            folder.mkdir(parents=True)
            text = word if split == "test" else "book"
            for i in range(3):
                (folder / f"{i}.txt").write_text(f"{split} {i} a {text} and " * (2 + i))
        made = prepare([tmp_path / name], tmp_path / f"store-{name}", tokenizer="bytes", workers=1)
        stores.append(made)
    one, out = "--rows 'ST, branching'", tmp_path / "out"
    printed(capsys, command("branching", stores[0], out, one))
    run = out / "branching" / "st-branching-seed1"
    before = (run / "eval-test.json").read_text()
    line = refused(capsys, command("branching", stores[1], out))
    assert "holds another run (other held-out documents)" in line
    for made, owner in zip(stores, ("branching", "memory-size"), strict=True):
        settings = settings_for("memory-size", TINY, made)
        (twin,) = (one for one in plan(settings, out) if one.row.label == "S128")
        assert twin.folder.parent.name == owner
    printed(capsys, f"eval '{run}' --data '{stores[1].path}' --device cpu")
    assert (run / "eval-test.json").read_text() == before
    again = f"reproduce '{run}' --data '{stores[1].path}' --out '{tmp_path}/again'"
    assert "has other documents (test) than the run began with" in refused(capsys, again)
    resumed = f"train --out '{run}' --data '{stores[1].path}' --resume"
    assert "has other documents (test)" in refused(capsys, resumed)


@pytest.mark.usefixtures("_no_pictures")
def test_records_of_old_weights_and_of_failures_are_none(
    store: TokenStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A record of another step than the weights' is made anew, and a model whose loss is not finite
    gets none; seeds of an earlier command stay in the report."""
    one = "--rows 'ST, branching'"
    printed(capsys, command("branching", store, tmp_path, f"{one} --seeds 2"))
    run = tmp_path / "branching" / "st-branching-seed1"
    record = run / "eval-test.json"
    whole = read_json(record)
    write_json(record, {**whole, "step": whole["step"] + 1, "perplexity": 1.0})
    printed(capsys, command("branching", store, tmp_path, one))
    assert read_json(record)["perplexity"] == whole["perplexity"]
    assert "st-branching-seed2" in (tmp_path / "branching" / "report.md").read_text()
    record.unlink()
    evaluated = reproduce.evaluate_run

    def failing(*args: Any, **choices: Any) -> dict[str, Any]:
        found = evaluated(*args, **choices)
        found["per_document"][0]["nats"] = math.nan
        return found

    monkeypatch.setattr(reproduce, "evaluate_run", failing)
    line = last_line(capsys, command("branching", store, tmp_path, one))
    assert "gives no finite loss on test document 0" in line
    assert not record.exists()


def test_a_run_is_repeated_as_it_was_made(
    store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is said for recipes is not passed over in silence, and nothing is trained."""
    printed(capsys, command("branching", store, tmp_path, "--rows 'ST, branching'"))
    run = tmp_path / "branching" / "st-branching-seed1"
    for flag in ("--list", "--seeds 2", "--tokens 5", "--split validation", "--precision bf16"):
        line = refused(capsys, f"reproduce '{run}' --out '{tmp_path}/again' {flag}")
        assert f"{flag.split()[0]} is for recipes: a run is repeated as it was made" in line
    assert "is the run itself" in refused(capsys, f"reproduce '{run}' --out '{run}'")
    repeat = f"reproduce '{run}' --out '{tmp_path}/again' --device cpu"
    config, record = run / "config.json", run / "eval-test.json"
    whole = read_json(config), read_json(record)
    write_json(config, {**whole[0], "train": {**whole[0]["train"], "steps": 9}})
    assert "stands at step 2 of 9: train it to its end first" in refused(capsys, repeat)
    write_json(config, whole[0])
    for damage, message in (({}, "lacks 'split'"), ([], "holds no JSON object")):
        write_json(record, damage)
        assert f"eval-test.json is damaged: it {message}" in refused(capsys, repeat)
    assert not (tmp_path / "again").exists()
    write_json(record, {**whole[1], "perplexity": 1.0})
    for environment, words in (
        ({}, "cpu unknown then, "),
        ({"torch": "1.0"}, "torch 1.0 then, "),
        (None, "the machine, its threads, torch and the commit are the same"),
    ):
        if environment is not None:
            write_json(run / "environment.json", environment)
        else:
            shutil.copy(tmp_path / "again" / "environment.json", run)
        with pytest.raises(SystemExit) as end:
            main(shlex.split(repeat))
        assert end.value.code == 1
        told = capsys.readouterr().out
        assert "differs by +" in told
        assert words in told


def test_mistakes_are_one_line(
    store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"--data '{store.path}' --out '{tmp_path}'"
    cases = {
        "reproduce table-3": "recipe 'table-3' is unknown, and no folder of a run: choose one of",
        "reproduce baselins": "recipe 'baselins' is unknown: did you mean 'baselines'?",
        "reproduce runs/lnog": "is unknown, and no folder of a run: choose one of",
        "reproduce copy --scale huge": "--scale huge is unknown: choose one of laptop, paper",
        "reproduce copy": "--data is missing",
        "reproduce copy --json": "--json is for the plan: add --list",
        f"reproduce copy {data} --rows S1": "--rows 'S1' is not in copy: choose from 'S96+L96, cop",
        f"reproduce copy {data} --seeds 0": "--seeds 0 must be at least 1",
        f"reproduce copy {data} --seeds 100000000": "--seeds 100000000 must be at most 1000",
        "reproduce copy --data /none": "/none is no token store",
        "report": "no folder was given",
    }
    for line, expected in cases.items():
        assert expected in refused(capsys, line)
    assert not list(tmp_path.iterdir())
