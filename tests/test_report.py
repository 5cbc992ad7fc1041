"""The report of a recipe: what holds of what the paper claims, and no number without a run."""

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from test_cli import printed, refused
from test_reproduce import TINY

from melodi.paper.plan import Settings, plan
from melodi.paper.recipe import Claim
from melodi.paper.recipes import RECIPES
from melodi.paper.report import main_table, places_table, write_report
from melodi.paper.results import gather
from melodi.paper.verdicts import Noise, judge, judge_all, noise_of, scatter_of, squares_of

CHECKSUM = "0" * 32
DOCUMENTS = 30
Effect = Callable[[str, int], float | None]
"""Of a row's label and a seed: how many nats per token it has more; None: not run."""


def make_recipe(out: Path, name: str, effect: Effect, seeds: int = 1, documents: int = 0) -> Path:
    """A recipe folder with records as runs leave them, made up: documents differ much from each
    other, and from row to row only by the effect and a little noise."""
    settings = Settings(name, TINY, 257, seeds=seeds, train_checksum=CHECKSUM)
    settings.write(out / name)
    random = np.random.default_rng(0)
    loss, count = random.normal(3.0, 0.5, DOCUMENTS), random.integers(100, 2000, DOCUMENTS)
    for one in plan(settings, out):
        more = effect(one.row.label, one.seed)
        if more is None:
            continue
        one.folder.mkdir(parents=True)
        data = {"path": "store", "tokenizer_digest": "", "train_checksum": CHECKSUM}
        config = {"preset": None, "model": one.model.to_dict(), "data": data}
        config["train"] = dataclasses.asdict(one.train)
        (one.folder / "config.json").write_text(json.dumps(config))
        lines = [
            {"step": step, "loss": 4.0 - step, "tokens": 10, "tokens_per_second": 5.0}
            for step in range(1, one.train.steps + 1)
        ]
        lines.append({"step": one.train.steps, "validation_loss": 3.0})
        metrics = "".join(f"{json.dumps(line)}\n" for line in lines)
        (one.folder / "metrics.jsonl").write_text(metrics)
        noise = random.normal(0.0, 0.01, DOCUMENTS)
        nats = (loss + more + noise) * count
        record = {
            "perplexity": math.exp(nats.sum() / count.sum()),
            "bits_per_byte": 1.0,
            "perplexity_without_memory": 100.0 * one.seed,
            "max_tokens": None,
            "step": one.train.steps,
            "by_place_in_window": places(one.model.window, more),
            "by_position": places(4 * one.model.window, more),
            "per_document": [
                {"document": i + documents, "predictions": int(count[i]), "nats": float(nats[i])}
                for i in range(DOCUMENTS)
            ],
        }
        (one.folder / "eval-test.json").write_text(json.dumps(record))
    return out / name


def places(last: int, more: float) -> list[dict[str, float]]:
    """Tallies of a record by place, in buckets that double: the effect is at the first place."""
    first = [1 << i for i in range(last.bit_length())]
    return [{"first": i, "nats": 3.0 + more * (i == 1), "predictions": 9} for i in first]


def marks(folder: Path) -> list[str]:
    return [verdict.mark for verdict in judge_all(gather(folder))]


def with_branching(gain: float) -> Effect:
    return lambda label, seed: 0.0 if "no branching" in label else -gain


@pytest.mark.parametrize(
    ("gain", "mark"), [(0.1, "✓"), (-0.1, "✗"), (0.0, "undecided")], ids=["yes", "no", "open"]
)
def test_an_ordering_is_decided_by_its_interval(tmp_path: Path, gain: float, mark: str) -> None:
    """✓ and ✗ where the paired difference is clear, undecided where it is not: although the
    documents differ ten times more than the rows."""
    folder = make_recipe(tmp_path, "branching", with_branching(gain), seeds=2)
    verdicts = judge_all(gather(folder))
    assert [verdict.mark for verdict in verdicts] == [mark, mark]
    for verdict in verdicts:
        assert verdict.difference is not None
        assert verdict.difference.value == pytest.approx(-gain, abs=0.02)
        low, _, high = verdict.difference
        assert low is not None
        assert high is not None
        assert high - low < 0.03


def test_seeds_are_pooled(tmp_path: Path) -> None:
    """Two seeds that agree decide together; where one says the opposite, the pool does not."""
    agree = make_recipe(tmp_path / "a", "branching", with_branching(0.1), seeds=2)
    assert marks(agree) == ["✓", "✓"]
    assert {verdict.seeds for verdict in judge_all(gather(agree))} == {2}

    def torn(label: str, seed: int) -> float:
        return 0.0 if "no branching" in label else (-0.3 if seed == 1 else 0.05)

    verdicts = judge_all(gather(make_recipe(tmp_path / "b", "branching", torn, seeds=2)))
    assert [verdict.mark for verdict in verdicts] == ["undecided", "undecided"]
    assert verdicts[0].why == "seed 2 says the opposite"
    assert verdicts[0].difference is not None
    assert verdicts[0].difference.sign == -1


@pytest.mark.parametrize(("gain", "mark"), [(0.2, "undecided"), (0.3, "✓"), (-0.3, "✗")])
def test_one_seed_decides_only_what_is_large(tmp_path: Path, gain: float, mark: str) -> None:
    """Documents that agree say nothing of how another run of a row would differ."""
    verdicts = judge_all(gather(make_recipe(tmp_path, "branching", with_branching(gain))))
    assert [verdict.mark for verdict in verdicts] == [mark, mark]
    assert ("one seed" in verdicts[0].why) == (mark == "undecided")


def test_a_difference_must_be_larger_than_runs_scatter(tmp_path: Path) -> None:
    """Seeds that agree decide nothing where runs of the same table scatter by as much; and where
    the other rows say that runs scatter little, one seed decides what is larger."""

    def scattered(scatter: float) -> Effect:
        random = np.random.default_rng(1)
        gains = {"ST+LT, branching": 0.03, "ST, branching": 0.03}
        return lambda label, seed: scatter * float(random.normal()) - gains.get(label, 0.0)

    found = {}
    for scatter in (0.001, 0.03):
        folder = make_recipe(tmp_path / str(scatter), "branching", scattered(scatter), seeds=2)
        noise = noise_of(gather(folder))
        assert noise is not None
        assert noise.freedom == 3
        assert noise.deviation == pytest.approx(scatter, rel=0.9, abs=0.005)
        found[scatter] = {verdict.mark for verdict in judge_all(gather(folder))}
    assert found == {0.001: {"✓"}, 0.03: {"undecided"}}

    def once(label: str, seed: int) -> float | None:
        if label == "ST, branching":
            return -0.03 if seed == 1 else None
        return 0.001 * seed * len(label)

    folder = make_recipe(tmp_path / "once", "branching", once, seeds=2)
    (verdict,) = (v for v in judge_all(gather(folder)) if v.claim.better[0] == "ST, branching")
    assert (verdict.mark, verdict.seeds) == ("✓", 1)


GAIN = Claim(("a", "c"), ("b", "b"), "")


def test_equal_rows_are_seldom_put_in_order() -> None:
    """Of tables of six equal rows with two seeds, about one in twenty has a given pair in order."""
    random = np.random.default_rng(0)
    wrong = wrong_gains = 0
    for _ in range(2000):
        nats = random.normal(0, 0.02, (6, 2)) + random.normal(0, 0.1, (1, 2))
        noise = scatter_of([dict(enumerate(row)) for row in nats])
        assert noise is not None
        wrong += abs((nats[0] - nats[1]).mean()) > noise.bound(seeds=2)
        # Of a gain, n0 - n1 compared with n1 - n2, the middle row counts twice.
        gain = (nats[0] - 2 * nats[1] + nats[2]).mean()
        wrong_gains += abs(gain) > noise.bound(2, squares_of(GAIN))
    assert 0.03 < wrong / 2000 < 0.07
    assert 0.03 < wrong_gains / 2000 < 0.07


def test_seeds_may_be_missing() -> None:
    """Noise is found from what rows have in common, wherever there is enough of it."""
    whole = [{1: 1.0, 2: 1.3}, {1: 2.0, 2: 2.1}]
    noise = scatter_of(whole)
    assert noise is not None
    # The differences between seeds, 0.3 and 0.1, differ by 0.2: twice the deviation of one run.
    assert (noise.deviation, noise.freedom) == (pytest.approx(0.1), 1)
    assert scatter_of([*whole, {2: 5.0, 3: 7.0}, {3: 1.0}]) == Noise(pytest.approx(0.1), 1)
    assert scatter_of([{1: 1.0, 2: 1.3}, {2: 2.0, 3: 2.1}]) is None


def test_only_seeds_that_both_rows_have_are_compared(tmp_path: Path) -> None:
    """A seed that only one row has, and whose documents were harder, changes no difference."""

    def harder(label: str, seed: int) -> float | None:
        if "no branching" in label:
            return 0.3 if seed == 1 else None
        return 0.0 if seed == 1 else 5.0

    results = gather(make_recipe(tmp_path, "branching", harder, seeds=2))
    for verdict in judge_all(results):
        assert verdict.difference is not None
        assert verdict.difference.value == pytest.approx(-0.3, abs=0.02)
        assert (verdict.mark, verdict.seeds) == ("✓", 1)
    found = results.difference(results["ST+LT, branching"], results["ST+LT, no branching"])
    assert found is not None
    assert found.value == pytest.approx(-0.3, abs=0.02)


def test_equal_rows_are_equal_within_bounds(tmp_path: Path) -> None:
    """“As good as” is ✓ if the whole interval is within the bounds, ✗ only if none of it is."""
    gains = {"layer 5": 0.0, "layer 6": 0.1, "layer 7": 0.0099, "layer 9": -0.1}
    effect = lambda label, _: gains.get(label, 0.0)  # noqa: E731
    folder = make_recipe(tmp_path, "long-term-position", effect, seeds=2)
    found = {v.claim.better[0]: v.mark for v in judge_all(gather(folder))}
    assert found == {
        "layer 5": "✓",
        "layer 6": "✗",
        "layer 7": "undecided",
        "layer 9": "✗",
        "layer 10": "✓",
        "layer 11": "✓",
    }


def test_equal_by_chance_is_not_equal(tmp_path: Path) -> None:
    """Where runs of the same table scatter by more than what counts as equal, two that are alike
    show nothing."""
    random = np.random.default_rng(0)

    def scattered(label: str, seed: int) -> float:
        by_chance = 0.0 if label in ("layer 5", "layer 6", "layer 8") else random.normal(0, 0.05)
        return by_chance + 0.03 * (label == "layer 6")

    folder = make_recipe(tmp_path, "long-term-position", scattered, seeds=2)
    found = {v.claim.better[0]: v for v in judge_all(gather(folder))}
    for alike_or_not in ("layer 5", "layer 6"):
        assert found[alike_or_not].mark == "undecided"
        assert "may be chance" in found[alike_or_not].why


def test_equal_on_average_is_not_equal(tmp_path: Path) -> None:
    """Two seeds that differ in opposite directions are not “as good as” because they cancel."""
    apart = lambda label, seed: (0.1 if seed == 1 else -0.1) * (label == "layer 5")  # noqa: E731
    folder = make_recipe(tmp_path, "long-term-position", apart, seeds=2)
    (verdict,) = (v for v in judge_all(gather(folder)) if v.claim.better[0] == "layer 5")
    assert (verdict.mark, verdict.why) == ("undecided", "seed 1, 2 says the opposite")


def test_gains_of_one_seed_need_twice_the_distance(tmp_path: Path) -> None:
    """Four runs that each are off by a little can make a gain look large."""
    off = {"8 windows": -0.05, "32 windows": 0.05, "128 windows": -0.05}
    level = "32 to 128 windows gain less than 8 to 32"
    for times, expected in ((1, "undecided"), (-3, "✓")):
        effect = lambda label, _: times * off.get(label, 0.0)  # noqa: B023, E731
        folder = make_recipe(tmp_path / expected, "coverage", effect)
        found = {v.claim.words: v for v in judge_all(gather(folder))}
        assert found[level].mark == expected
        assert found[level].difference is not None
        assert abs(found[level].difference.value) > 0.15


def test_rows_without_a_common_seed_are_not_compared(tmp_path: Path) -> None:
    """However far apart they are."""
    each = lambda label, seed: float(seed) if ("no" in label) == (seed == 1) else None  # noqa: E731
    folder = make_recipe(tmp_path, "branching", each, seeds=2)
    verdicts = judge_all(gather(folder))
    assert {v.mark for v in verdicts} == {"undecided"}
    assert verdicts[0].why == "no seed that all of its rows have"
    rows = {row[0]: row for row in main_table(gather(folder)).rows}
    assert "–" in rows["ST, no branching"][4:]


def test_the_first_row_stands_in_for_the_reference(tmp_path: Path) -> None:
    """Where the row that all are compared with is not there, another is, and the page says so."""
    some = lambda label, _: None if label == "Melodi S128+L64" else 0.0  # noqa: E731
    folder = make_recipe(tmp_path, "baselines", some)
    write_report(folder)
    page = (folder / "report.md").read_text()
    assert "less those of Transformer-XL, paired" in page
    assert "Of 12 claims about perplexity" in page
    assert "claims about memory, which is counted and needs no run, " in page


def test_chance_is_that_of_the_seeds_and_rows_of_a_claim(tmp_path: Path) -> None:
    """Two seeds decide what is too small for one; a comparison of gains, in which a row stands
    twice, needs more than one of two rows."""
    folder = make_recipe(tmp_path, "branching", with_branching(0.1), seeds=2)
    results = gather(folder)
    order = results.recipe.claims[0]
    for factor, mark in ((0.8, "✓"), (1.2, "undecided")):
        noise = Noise(factor * 0.1 / Noise(1.0, 3).bound(2), 3)
        assert noise.bound(1) > 0.11
        assert judge(order, results, noise).mark == mark
    a, b, c = ("ST, branching", "ST, no branching", "ST+LT, no branching")
    gains = Claim((a, c), (b, b), "")
    noise = Noise(0.8 * 0.1 / Noise(1.0, 3).bound(2, 6), 3)
    assert judge(gains, results, noise).mark == "✓"
    assert judge(gains, results, Noise(1.5 * noise.deviation, 3)).mark == "undecided"
    assert 1.5 * noise.bound(2, 2) < 0.1


def test_where_rows_differ(tmp_path: Path) -> None:
    """Nats by place in the window are those of a row less those of the reference, averaged over the
    seeds that both have; rows without memory, or with another window, have no part in it."""
    effects = {"Transformer-XL": 0.2, "Memorizing": 0.1, "Melodi S128+L64": 0.4, "no memory": 9.0}

    def effect(label: str, seed: int) -> float | None:
        one = effects.get(label)
        return None if one is None or (label, seed) == ("Memorizing", 2) else seed * one

    results = gather(make_recipe(tmp_path, "baselines", effect, seeds=2))
    found = {row.row.label: by for row, by in results.differences_by_place("by_place_in_window")}
    assert found.keys() == {"Transformer-XL", "Memorizing"}
    assert found["Transformer-XL"] == pytest.approx({1: -0.3, 2: 0.0, 4: 0.0, 8: 0.0})
    assert found["Memorizing"] == pytest.approx({1: -0.3, 2: 0.0, 4: 0.0, 8: 0.0})
    table = places_table(results)
    assert table.columns == ["to Melodi S128+L64, at token", "1", "2 to 3", "4 to 7", "8"]
    assert list(table.rows[0]) == ["Transformer-XL", "-0.300", "+0.000", "+0.000", "+0.000"]

    windows = gather(make_recipe(tmp_path, "window-size", lambda label, _: 0.0))
    labels = [row.row.label for row, _ in windows.differences_by_place("by_position")]
    assert labels
    assert all(label.endswith("window 512") for label in labels)


def test_memory_dropped_is_a_mean_of_nats(tmp_path: Path) -> None:
    """As perplexity with memory is."""
    results = gather(make_recipe(tmp_path, "branching", with_branching(0.1), seeds=2))
    assert results["ST, branching"].perplexity_without_memory == pytest.approx(math.sqrt(20_000))


def test_a_report_of_the_folder_that_one_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of other recipes are found beside it, however the folder is named."""
    make_recipe(tmp_path, "baselines", lambda label, _: 0.0)
    folder = make_recipe(tmp_path, "systems", lambda label, _: None)
    write_report(folder)
    page = (folder / "report.md").read_text()
    assert "Transformer-XL | 1 |" in page
    monkeypatch.chdir(folder)
    write_report(Path())
    assert (folder / "report.md").read_text() == page


def test_gains_are_compared(tmp_path: Path) -> None:
    """A claim about two gains: the queue helps until 32 windows and then levels off, or not."""

    def levelling(label: str, seed: int) -> float:
        return -0.1 * min(math.log2(int(label.split()[0])), 5)

    def going_on(label: str, seed: int) -> float:
        return -0.01 * int(label.split()[0])

    level = "32 to 128 windows gain less than 8 to 32"
    for effect, expected in ((levelling, "✓"), (going_on, "✗")):
        folder = make_recipe(tmp_path / expected, "coverage", effect, seeds=2)
        found = {v.claim.words: v.mark for v in judge_all(gather(folder))}
        assert found[level] == expected
        assert found["32 windows better than 16 windows"] == "✓"


def test_memory_is_counted(tmp_path: Path) -> None:
    """Claims about memory need no run; those about perplexity say what is missing."""
    folder = make_recipe(tmp_path, "baselines", lambda label, _: None)
    verdicts = judge_all(gather(folder))
    assert {v.mark for v in verdicts if v.claim.kind == "better"} == {"not run"}
    assert verdicts[0].why == "not run: Melodi S192+L32, Transformer-XL"
    assert "✓" in {v.mark for v in verdicts if v.claim.kind == "memory"}
    assert "✗" not in {v.mark for v in verdicts if v.claim.kind == "memory"}
    results = gather(folder)
    eight = Claim(("Melodi S128+L64",), ("Memorizing",), "", kind="memory", times=8.0)
    for times, mark in ((8.0, "✓"), (8.5, "✗")):  # it has 8.00 times less
        assert judge(dataclasses.replace(eight, times=times), results, None).mark == mark
    kept = "at the paper's sizes, which this scale does not keep"
    assert any(kept in v.why for v in verdicts if v.mark == "undecided")


def test_a_folder_of_another_name_is_reported_by_itself(tmp_path: Path) -> None:
    """Runs that were put aside are not mixed with those made since under the recipe's name."""
    make_recipe(tmp_path, "branching", with_branching(0.5)).rename(tmp_path / "branching-old")
    make_recipe(tmp_path, "branching", lambda label, _: 9.0 if label[:3] == "ST," else None)
    assert marks(tmp_path / "branching-old") == ["✓", "✓"]


def test_other_documents_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that were evaluated on other documents are not compared."""
    both = [
        make_recipe(tmp_path / x, "branching", with_branching(0), documents=n)
        for x, n in (("a", 0), ("b", 5))
    ]
    (both[1] / "st-branching-seed1").rename(tmp_path / "aside")
    (both[0] / "st-branching-seed1").rename(both[1] / "st-branching-seed1")
    assert "were evaluated on different documents" in refused(capsys, f"report '{both[1]}'")


def test_texts_and_dialects_that_differ_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Documents of equal lengths may be others, and a dialect of one name may have been another;
    what an earlier version did not note is not held against a run."""
    folder = make_recipe(tmp_path, "branching", with_branching(0.1))
    write_report(folder)
    names = ("st-branching-seed1", "st-no-branching-seed1")
    for file, key, values, words in (
        ("eval-test.json", "documents_checksum", ("a", "b"), "evaluated on different documents"),
        ("config.json", "answers", ({"gate": "head"}, None), "'default' meant different things"),
    ):
        paths = [folder / name / file for name in names]
        before = [path.read_text() for path in paths]
        for path, value in zip(paths, values, strict=True):
            path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
        assert words in refused(capsys, f"report '{folder}'")
        for path, text in zip(paths, before, strict=True):
            path.write_text(text)
    one = folder / names[0] / "eval-test.json"
    one.write_text(json.dumps({**json.loads(one.read_text()), "documents_checksum": "a"}))
    write_report(folder)


def test_documents_and_runs_are_one_chance(tmp_path: Path) -> None:
    """A difference must be larger than what both make of it together, and not only than each; and
    scatter that is not a number is no proof."""
    folder = make_recipe(tmp_path, "branching", with_branching(0.01), seeds=2)
    results = gather(folder)
    claim = results.recipe.claims[0]
    found = judge(claim, results, Noise(1e-9, 3)).difference
    assert found is not None
    assert found.high is not None
    size, documents = abs(found.value), found.high - found.value
    assert documents < size
    between = math.sqrt(size**2 - documents**2)  # with the documents just as large
    for factor, mark in ((0.95, "✓"), (1.05, "undecided"), (math.nan, "undecided")):
        noise = Noise(factor * between / Noise(1.0, 3).bound(2), 3)
        assert judge(claim, results, noise).mark == mark
        assert math.isnan(factor) or noise.bound(2) < size


def of_number(label: str) -> int:
    return int(label.split()[-1])


WORTH = {"Melodi S128+L64": 0.0, "Melodi S192+L32": 0.01, "Memorizing": 0.02}
SHAPES: dict[str, Effect] = {
    "window-size": lambda label, _: (
        WORTH.get(label.split(", ")[0], 0.3)
        + math.log2(512 / of_number(label)) * (0.03 if label.split(", ")[0] in WORTH else 0.2)
    ),
    "short-term-layers": lambda label, _: {1: 0.6, 2: 0.4, 4: 0.1}.get(int(label.split()[0]), 0.0),
    "coverage": lambda label, _: {2: 1.0, 4: 0.97, 8: 0.8, 16: 0.55, 32: 0.3, 64: 0.27, 128: 0.25}[
        int(label.split()[0])
    ],
    "copy": lambda label, _: 0.2 * ("copied" in label),
}
"""Curves as the paper draws them."""


@pytest.mark.parametrize("name", SHAPES)
def test_curves_of_the_papers_shape_bear_out_its_claims(tmp_path: Path, name: str) -> None:
    """All of them are ✓ there, and the orderings among them ✗ where everything is turned around."""
    folder = make_recipe(tmp_path / "a", name, SHAPES[name], seeds=2)
    assert set(marks(folder)) == {"✓"}
    turned: Effect = lambda label, seed: -(SHAPES[name](label, seed) or 0.0)  # noqa: E731
    verdicts = judge_all(gather(make_recipe(tmp_path / "b", name, turned, seeds=2)))
    assert {v.mark for v in verdicts if v.claim.kind == "better"} == {"✗"}


def test_no_number_without_a_run(tmp_path: Path) -> None:
    """A row that has not been run, or not to its end, has dashes in all columns of ours."""
    pytest.importorskip("matplotlib")
    folder = make_recipe(tmp_path, "copy", lambda label, _: 0.0 if label[:3] == "S96" else None)
    begun = folder / "s64-l64-mixed-seed1"
    begun.mkdir()
    for name in ("config.json", "eval-test.json"):
        (begun / name).write_text((folder / "s96-l96-mixed-seed1" / name).read_text())
    (begun / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n')
    table = main_table(gather(folder))
    first = table.columns.index("ours")
    rows = {row[0]: row[first : first + 6] for row in table.rows}
    assert re.fullmatch(r"\d+\.\d{3}", rows["S96+L96, mixed"][0])
    assert rows["S64+L64, mixed"] == ["step 1 of 2", *["–"] * 5]
    for label in ("S64+L64, copied", "S32+L32, mixed", "S32+L32, copied"):
        assert rows[label] == ["–"] * 6
    assert [row[1] for row in table.rows] == [
        *["11.00", "10.92", "11.36", "11.08"],
        "11.42",
        "11.25",
    ]


def test_figures_of_the_paper_are_dashes(tmp_path: Path) -> None:
    folder = make_recipe(tmp_path, "long-term-layers", lambda label, _: 0.0)
    table = main_table(gather(folder))
    assert table.columns[1] == "paper"
    assert {row[1] for row in table.rows} == {"–"}


class Page(HTMLParser):
    """Whether every tag is closed, and where the page points to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.places: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.places += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_needs_no_other_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """report.html holds its pictures; the Markdown has them beside it; both have every row and
    claim, and come from `melodi report DIR`."""
    pytest.importorskip("matplotlib")
    folder = make_recipe(tmp_path, "window-size", lambda label, _: 0.01 * len(label), seeds=2)
    paths = [f"{folder}/report.html", f"{folder}/report.md"]
    assert printed(capsys, f"report '{tmp_path}'").splitlines() == paths
    page = Page()
    page.feed(text := (folder / "report.html").read_text())
    assert not page.open
    assert len(page.places) == 3
    assert all(place.startswith("data:image/png;base64,") for place in page.places)
    assert "://" not in re.sub(r"base64,[^\"]*", "", text)
    words = " ".join(page.words)
    markdown = (folder / "report.md").read_text()
    for row in RECIPES["window-size"].rows:
        assert row.label in words
        assert row.label in markdown
    for claim in RECIPES["window-size"].claims:
        assert claim.words in words
        assert claim.words in markdown
    for name in re.findall(r"!\[[^]]*\]\((.*?)\)", markdown):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    for table in re.findall(r"(?:^\|.*\n)+", markdown, re.M):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_a_report_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables need no plots."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = make_recipe(tmp_path, "branching", with_branching(0.3))
    html, markdown = write_report(folder)
    assert "<img" not in html.read_text()
    assert "Of 2 claims about perplexity 2 hold." in markdown.read_text()


def test_damaged_recipes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_recipe(tmp_path, "branching", with_branching(0.3))
    (folder / "recipe.json").write_text('{"recipe": "branching"}')
    assert "recipe.json is damaged" in refused(capsys, f"report '{folder}'")
