"""The report of a recipe: ours beside the paper's, what holds of what it claims, and the figures.

DIR/NAME/report.html needs no other file; the Markdown has its pictures beside it. Every number
comes from a run folder that is there: a row that has not been run has a dash.
"""

import dataclasses
from itertools import groupby
from pathlib import Path
from typing import Any

from melodi.evaluation.intervals import Interval
from melodi.files import write_text
from melodi.paper.figures import draw_figure, draw_losses, draw_places
from melodi.paper.pages import Block, Heading, Paragraph, Picture, Table, to_html, to_markdown
from melodi.paper.recipe import EQUAL
from melodi.paper.results import Result, Results, RowResult, gather
from melodi.paper.scales import parameters
from melodi.paper.verdicts import BETWEEN_RUNS, Noise, Verdict, judge_all, noise_of
from melodi.training.reporting import duration

NOTHING = "–"
IN_WINDOW = "by_place_in_window"


def write_report(folder: Path) -> list[Path]:
    """The report of what is in a recipe folder, finished or not."""
    place = folder.resolve()  # runs of other recipes are looked for beside it
    results = gather(place)
    blocks = report_blocks(results, place)
    pages = {"report.html": to_html, "report.md": to_markdown}
    for name, render in pages.items():
        write_text(place / name, render(results.recipe.title, blocks))
    return [folder / name for name in pages]


def report_blocks(results: Results, folder: Path) -> list[Block]:
    verdicts = judge_all(results)
    figure, places, losses = (folder / f"{name}.png" for name in ("figure", "places", "losses"))
    blocks: list[Block] = [Paragraph(introduction(results)), main_table(results)]
    blocks += [Paragraph(line) for line in (table_notes(results), *results.recipe.remarks)]
    if draw_figure(results, figure):
        assert results.reference is not None, "a figure has points"
        bars = f"Bars: 95 % interval of the paired difference to {results.reference.row.label}."
        blocks += [Heading("Figure"), Picture(figure, f"{results.recipe.title}. {bars}")]
    if verdicts:
        blocks += [Heading(results.recipe.asked), Paragraph(summary(verdicts))]
        blocks.append(claims_table(verdicts))
        most = max((len(row.evaluated) for row in results.rows), default=0)
        blocks.append(Paragraph(claims_notes(noise_of(results), most)))
    if results.differences_by_place(IN_WINDOW):
        blocks += [Heading("Where rows differ"), places_table(results)]
        if draw_places(results, places):
            blocks.append(Picture(places, "Nats per token to the row that all are compared with."))
    if draw_losses(results, losses):
        blocks += [Heading("Loss"), Picture(losses, "Loss of every run, without its first fifth.")]
    blocks += [Heading("Runs"), runs_table(results, folder)]
    again = f"melodi reproduce DIR/{results.recipe.name}/ROW-seedK --out AGAIN"
    blocks.append(Paragraph(f"{again} trains a run once more, and compares; DIR is where this is."))
    blocks += [Heading("How the rows differ"), differences_table(results)]
    return blocks


def introduction(results: Results) -> str:
    settings, done = results.settings, results.evaluated
    store = Path(settings.store).name if settings.store else NOTHING
    text = f"Scale {settings.scale.name}, store {store} (vocabulary {settings.vocab_size:,}), "
    text += f"{len(done)} of {len(results.rows)} rows evaluated"
    if not done:
        return f"{text}."
    documents = done[0].documents
    predictions = sum(count for _, count in documents)
    return (
        f"{text} on {len(documents)} {settings.split} documents with {predictions:,} predictions."
    )


def main_table(results: Results) -> Table:
    columns = [f"paper: {name}" for name in results.recipe.columns] or ["paper"]
    ours = ["ours", "95 %", "bits per byte", "without memory", "Δ nats", "95 %"]
    costs = ["parameters", "memory floats", "tokens", "time", "seeds"]
    rows = [
        [row.row.label, *paper_cells(row, results), *our_cells(row, results), *cost_cells(row)]
        for row in results.rows
    ]
    return Table(["row", *columns, *ours, *costs], rows)


def paper_cells(row: RowResult, results: Results) -> list[str]:
    values = [row.row.paper.get(name) for name in results.recipe.columns] or [None]
    return [f"{v:.2f}" if isinstance(v, float) else v or NOTHING for v in values]


def our_cells(row: RowResult, results: Results) -> list[str]:
    if not row.evaluated:
        return [progress(row), *[NOTHING] * 5]
    reference = results.reference
    difference = [NOTHING, NOTHING]
    if reference is not None and row is not reference:
        found = results.difference(row, reference)
        difference = difference if found is None else [f"{found.value:+.4f}", ends(found, "+.4f")]
    return [
        f"{row.perplexity.value:.3f}",
        ends(row.perplexity, ".2f"),
        f"{row.bits_per_byte:.4f}",
        f"{row.perplexity_without_memory:.3f}",
        *difference,
    ]


def ends(interval: Interval, form: str) -> str:
    if interval.low is None or interval.high is None:
        return NOTHING
    return f"{interval.low:{form}} to {interval.high:{form}}"


def progress(row: RowResult) -> str:
    """What is known of a row that has no figure yet."""
    if not row.runs:
        return NOTHING
    run = row.runs[0]
    return f"step {run.step} of {run.planned.train.steps}"


def cost_cells(row: RowResult) -> list[str]:
    done = row.evaluated
    seconds = sum(run.seconds for run in done) / max(len(done), 1)
    return [
        f"{parameters(row.model):,}",
        f"{row.floats:,}",
        f"{row.tokens:,}",
        duration(seconds) if done else NOTHING,
        str(len(done)) if done else NOTHING,
    ]


def table_notes(results: Results) -> str:
    reference = results.reference
    to = results.recipe.reference if reference is None else reference.row.label
    return (
        "Rows are named by the paper's sizes; the last table has those of this scale. "
        "Ours: perplexity, the nats of each document averaged over seeds; interval: bootstrap over "
        f"documents. Δ nats: nats per token less those of {to}, paired over documents and over the "
        "seeds that both rows have; below zero is better. Without memory: memory dropped at every "
        "window, all seeds. Time: training steps of one run. The paper's numbers are of other "
        "corpora, sizes and vocabularies: only orderings can be compared."
    )


def summary(verdicts: list[Verdict]) -> str:
    words = {
        "✓": "hold",
        "✗": "do not hold",
        "undecided": "are undecided",
        "not run": "have not been run",
    }

    def counted(what: str, some: list[Verdict]) -> str:
        marks = [verdict.mark for verdict in some]
        parts = [f"{marks.count(mark)} {word}" for mark, word in words.items() if mark in marks]
        return f"Of {len(some)} claims about {what} {', '.join(parts)}."

    memory = [verdict for verdict in verdicts if verdict.claim.kind == "memory"]
    losses = [verdict for verdict in verdicts if verdict.claim.kind != "memory"]
    about = (("perplexity", losses), ("memory, which is counted and needs no run,", memory))
    return " ".join(counted(what, some) for what, some in about if some)


def claims_table(verdicts: list[Verdict]) -> Table:
    rows = []
    for verdict in verdicts:
        found, seeds = verdict.difference, str(verdict.seeds) if verdict.seeds else NOTHING
        figures = [f"{found.value:+.4f}", ends(found, "+.4f")] if found else [NOTHING, NOTHING]
        why = verdict.why or NOTHING
        claim = verdict.claim
        rows.append([verdict.mark, claim.words, claim.where, why, *figures, seeds])
    return Table(["", "claim", "where", "remark", "Δ nats", "95 %", "seeds"], rows, words=4)


def claims_notes(noise: Noise | None, seeds: int) -> str:
    """seeds: of the row that has most of them."""
    if noise is None:
        between = (
            "Rows have too few seeds in common, so how runs of one row differ is not known "
            f"here, and is taken to be up to {BETWEEN_RUNS} nats, which is more than has been "
            "seen. "
        )
    else:
        bounds = [f"{noise.bound(n):.3f} ({n})" for n in range(1, seeds + 1)]
        between = (
            f"Runs that differ in their seed alone scatter by {noise.deviation:.4f} nats here (one "
            "standard deviation, taken to be the same for all rows, what rows and seeds have in "
            f"common taken off; {noise.freedom} degrees of freedom), which makes a difference of, "
            f"in nats (by number of seeds), {', '.join(bounds)} for one claim in twenty. "
        )
    return (
        "✓ and ✗: the paired difference, pooled over seeds, is larger than documents and runs "
        "together make it by chance for one claim in twenty, and no seed says the opposite. Other "
        "documents would change it within the 95 % interval, other runs as seeds do; the two are "
        f"added as squares. {between}"
        "A table of many claims may well have one mark that is chance. "
        f"“As good as” is ✓ within {EQUAL} nats, about {EQUAL:.0%} of perplexity, chance included."
    )


def places_table(results: Results) -> Table:
    """Nats per token to the reference by place in the window, in buckets that double."""
    found = results.differences_by_place(IN_WINDOW)
    reference = results.reference
    assert reference is not None, "there is nothing to compare without it"
    first = sorted({place for _, by in found for place in by})
    last = [*[place - 1 for place in first[1:]], reference.model.window]
    columns = [f"{a}" if a == b else f"{a} to {b}" for a, b in zip(first, last, strict=True)]
    rows = [[row.row.label, *[f"{by[place]:+.3f}" for place in first]] for row, by in found]
    return Table([f"to {reference.row.label}, at token", *columns], rows)


def runs_table(results: Results, folder: Path) -> Table:
    rows = [run_cells(run, folder) for row in results.rows for run in row.runs]
    outcome, made = ["perplexity", "of step"], ["trained to", "tokens", "time", "commit", "folder"]
    return Table(["row", "seed", *outcome, *made], rows)


def run_cells(run: Result, folder: Path) -> list[str]:
    planned, commit = run.planned, run.environment.get("commit") or NOTHING
    dirty = "+" if commit.endswith("+") else ""
    return [
        planned.row.label,
        str(planned.seed),
        f"{run.record['perplexity']:.4f}" if run.record else NOTHING,
        str(run.record["step"]) if run.record else NOTHING,
        f"{run.step} of {planned.train.steps}",
        f"{planned.tokens * run.step // planned.train.steps:,}",
        duration(run.seconds),
        commit[:9] + dirty if commit != NOTHING else commit,
        str(planned.folder.relative_to(folder.parent)),
    ]


def differences_table(results: Results) -> Table:
    """The fields of the configs, and of what a step reads, in which rows differ."""
    configs = [{**dataclasses.asdict(row.model), **row.steps} for row in results.rows]
    names = [name for name in configs[0] if len({str(config[name]) for config in configs}) > 1]
    rows = [
        [row.row.label, *[shown(config[name]) for name in names]]
        for row, config in zip(results.rows, configs, strict=True)
    ]
    return Table(["row", *names], rows)


def shown(value: Any) -> str:
    """A value of a config; of layers, runs of the same kind as one."""
    if isinstance(value, tuple | list):
        parts = [(kind, len(list(same))) for kind, same in groupby(value)]
        return ", ".join(f"{count} × {kind}" if count > 1 else str(kind) for kind, count in parts)
    return str(value)
