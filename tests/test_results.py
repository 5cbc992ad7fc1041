"""The committed results: every report, and the README's table, say what the run folders hold."""

import re
from pathlib import Path

import pytest

from melodi.paper import report
from melodi.paper.pages import markdown
from melodi.paper.results import Results, counts, gather
from melodi.paper.verdicts import judge_all, seed_differences

ROOT = Path(__file__).parents[1]
FOLDERS = [path.parent for path in sorted((ROOT / "results").glob("*/*/recipe.json"))]
NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?")


def same(ours: str, theirs: str) -> bool:
    """Whether two lines say the same. The last digit behind a point may be rounded the other way:
    another processor adds up in another order."""
    if NUMBER.sub("#", ours).split() != NUMBER.sub("#", theirs).split():
        return False
    for a, b in zip(NUMBER.findall(ours), NUMBER.findall(theirs), strict=True):
        digits = len(a.partition(".")[2])
        distance = abs(float(a.replace(",", "")) - float(b.replace(",", "")))
        if distance > (1.01 * 10**-digits if digits else 0):
            return False
    return True


def test_the_same_but_for_the_last_digit() -> None:
    assert same("| a | 1,024 | -0.123 |", "| a | 1,024 | -0.124 |")
    for other in ("| a | 1,025 | -0.123 |", "| a | 1,024 | -0.125 |", "| b | 1,024 | -0.123 |"):
        assert not same("| a | 1,024 | -0.123 |", other)


def tables(results: Results, folder: Path) -> list[str]:
    """The lines of all tables of a report."""
    found = [report.main_table(results)]
    if verdicts := judge_all(results):
        found.append(report.claims_table(verdicts))
    if results.differences_by_place(report.IN_WINDOW):
        found.append(report.places_table(results))
    found += [report.runs_table(results, folder), report.differences_table(results)]
    return [line for table in found for line in markdown(table).splitlines()]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_committed_reports_are_those_of_their_runs(folder: Path) -> None:
    """Every number and every verdict of a report follows from the run folders beside it."""
    ours = tables(gather(folder), folder)
    text = (folder / "report.md").read_text()
    theirs = [line for line in text.splitlines() if line.startswith("|")]
    assert len(ours) == len(theirs)
    assert [pair for pair in zip(ours, theirs, strict=True) if not same(*pair)] == []


def main_rows() -> dict[str, str]:
    """The README's table of results as the runs have it, line by line."""
    found = {}
    for name in ("systems", "baselines"):
        results = gather(ROOT / "results" / "math" / name)
        cache = results["Transformer-XL"]
        for row in results.evaluated:
            seeds = [f"{run.record['perplexity']:.2f}" for run in row.evaluated if run.record]
            dropped = f"{row.perplexity_without_memory:.2f}" if row.floats else ""
            to = seed_differences([row], [cache], counts(row.documents)) if row is not cache else {}
            mean = f"{sum(to.values()) / len(to):+.3f}" if to else ""
            cells = [f"{row.floats:,}", f"{row.perplexity.value:.2f}", ", ".join(seeds), dropped]
            cells += [mean, ", ".join(f"{nats:+.3f}" for nats in to.values())]
            found[row.row.label] = f"| {' | '.join([row.row.label, *cells])} |"
    return found


def test_the_table_in_the_readme_is_that_of_the_runs() -> None:
    """Every run of the two recipes is in the table, and no other number is."""
    _, _, below = (ROOT / "README.md").read_text().partition("| | memory floats | perplexity |")
    table, _, _ = below.partition("\n\n")
    theirs = {line.split(" | ")[0].strip("| "): line for line in table.splitlines()[2:]}
    ours = main_rows()
    assert theirs.keys() == ours.keys()
    assert [(ours[row], line) for row, line in theirs.items() if not same(ours[row], line)] == []


def lines_below(heading: str) -> list[list[str]]:
    """The cells of a table of the README, whose head begins with these words, without the head."""
    _, _, below = (ROOT / "README.md").read_text().partition(heading)
    assert below, f"the README has no table {heading!r}"
    table = below.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def verdict_in_words(results: Results, better: str, worse: str) -> str:
    """Mark, pooled difference, and that of each seed, as the README says them."""
    (verdict,) = (
        v
        for v in judge_all(results)
        if (v.claim.better, v.claim.worse, v.claim.kind) == ((better,), (worse,), "better")
    )
    assert verdict.difference is not None
    rows = [results[better]], [results[worse]]
    each = seed_differences(*rows, counts(rows[0][0].documents)).values()
    seeds = ", ".join(f"{nats:+.3f}" for nats in each)
    return f"{verdict.mark} {verdict.difference.value:+.3f} ({seeds})"


def test_the_claims_in_the_readme_are_those_of_the_runs() -> None:
    """No ✓ that a report does not give, and no number that is not its own."""
    tables = [gather(ROOT / "results" / name / "baselines") for name in ("math", "books")]
    lines = lines_below("| claim of Table 3 |")
    for claim, *cells in lines:
        better, worse = claim.partition(",")[0].split(" is better than ")
        names = [f"Melodi {name}" if name[0] == "S" else name for name in (better, worse)]
        ours = [verdict_in_words(results, *names) for results in tables]
        assert [pair for pair in zip(ours, cells, strict=True) if not same(*pair)] == []
    assert len(lines) == 5


def test_the_ablations_in_the_readme_are_those_of_the_runs() -> None:
    """Every perplexity of a recipe that a line names is of one of its rows."""
    lines = lines_below("| claim | perplexity here |")
    assert len(lines) >= 4
    for claim, cells, _ in lines:
        found = re.search(r"\((results/[^)]*)/report.md\)", claim)
        assert found is not None
        rows = gather(ROOT / found[1]).evaluated
        ours = {f"{row.perplexity.value:.2f}" for row in rows}
        theirs = re.findall(r"\d+\.\d\d", cells)
        assert theirs
        assert [one for one in theirs if not any(same(one, other) for other in ours)] == []
