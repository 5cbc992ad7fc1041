"""The whole of `melodi bench`: one run, in one process, to one record.

The parts in order: growth (while the process holds nothing else), speed of all models in turn,
whole documents, peak memory. The record has every sample; tables and plots are made of it.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from melodi.bench import full_attention, machine
from melodi.bench.alternatives import ALTERNATIVES, absent, make_alternative
from melodi.bench.measure import (
    Measured,
    Summary,
    Task,
    interleave,
    one_line,
    progress,
    progress_done,
    rate,
    ratio,
    summary,
)
from melodi.bench.peak import peak_of
from melodi.bench.sizes import REFERENCE, Plan, Size
from melodi.bench.subjects import our_subject, random_tokens, read_document, read_on
from melodi.memory import MemoryState
from melodi.model import LanguageModel
from melodi.precision import autocast
from melodi.stream.reader import CHUNK_WINDOWS

Note = Callable[[str], None]
ROOFS = {"train": "roof", "read": "roof", "generate": "bandwidth"}
"""What each speed is a share of."""


def run_bench(size: Size, plan: Plan, wanted: Sequence[str]) -> dict[str, Any]:
    """These parts, as a record for JSON."""
    notes: list[str] = []

    def note(line: str) -> None:
        if line in notes:  # said by an earlier part
            return
        notes.append(line)
        progress_done()
        print(f"melodi: {line}", file=sys.stderr)

    ours, others = chosen(size, plan)
    record: dict[str, Any] = {
        "machine": machine.describe(),
        "plan": asdict(plan),
        "config": {
            "rows": size.rows,
            "segment": size.segment,
            "precision": size.precision,
            "models": {name: size.models[name].to_dict() for name in ours},
        },
        "notes": notes,
        "seconds": {},
    }
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "growth": lambda: growth(size, plan, note),
        "speed": lambda: speed(size, plan, ours, others, note),
        "documents": lambda: documents(size, plan, others, note),
        "peaks": lambda: peaks(size, plan, ours, others, note),
    }
    for part, measure in parts.items():
        record[part] = []
        if part not in wanted:
            continue
        begin = time.perf_counter()
        with autocast(size.precision, torch.device("cpu")):
            record[part] = measure()
        record["seconds"][part] = time.perf_counter() - begin
        progress_done()
        print(f"melodi: {part} took {record['seconds'][part]:.0f} s", file=sys.stderr)
    return record


def chosen(size: Size, plan: Plan) -> tuple[list[str], list[str]]:
    """The models of ours, the reference among them, and the alternatives that are measured."""
    if not plan.models:
        return list(plan.kinds or size.models), list(ALTERNATIVES)
    unknown = set(plan.models) - {*size.models, *ALTERNATIVES}
    if unknown:
        known = ", ".join([*size.models, *ALTERNATIVES])
        raise ValueError(f"no model is called {', '.join(sorted(unknown))}: there are {known}")
    ours = [name for name in size.models if name in (REFERENCE, *plan.models)]
    return ours, [name for name in ALTERNATIVES if name in plan.models]


def growth(size: Size, plan: Plan, note: Note) -> list[dict[str, Any]]:
    """One document, read on and on: cost per token, and memory held, at several places of it.

    The states of all places are kept, and reading on from each is then timed in turn.
    """
    torch.manual_seed(0)
    model = LanguageModel(size.reference).eval()
    tokens_1T = random_tokens(size.reference, 1, size.segment)
    state, read, begin = model.empty_state(1), 0, time.perf_counter()
    places: dict[int, MemoryState] = {}
    rows: list[dict[str, Any]] = []
    for position in plan.positions:
        while read < position:
            if time.perf_counter() - begin > plan.growth_seconds:
                break
            state = read_on(model, tokens_1T, state)
            read += size.segment
            progress(f"reading on: {read:,} tokens")
        if read >= position:
            places[position] = state
            rows.append({"position": position, "resident_mb": machine.resident_mb()})
    tasks = [
        Task(
            str(place),
            "read",
            rate(partial(read_on, model, tokens_1T, kept), size.segment),
            needed=True,
        )
        for place, kept in places.items()
    ]
    found = interleave(tasks, plan.growth_seconds / 4, note, "reading at") if tasks else []
    for row, (_, samples) in zip(rows, found, strict=True):
        row |= {"samples": samples, **figures(summary(samples))}
        row["to_first"] = figures(ratio(samples, found[0].samples))
    return rows


def speed(
    size: Size, plan: Plan, ours: Sequence[str], others: Sequence[str], note: Note
) -> list[dict[str, Any]]:
    """Training, reading and generation of all models, in turn with the roofs of the machine."""
    tasks = machine.tasks(size, plan.buffer_mb)
    for name in ours:
        tasks += our_subject(name, size.models[name], size).tasks(size)
    for name in others:
        progress(f"making {name}")
        subject = make_alternative(name, size, plan.context, note)
        tasks += [] if subject is None else subject.tasks(size)
    found = interleave(tasks, plan.speed_seconds, note, "speed")
    if len(found[0].samples) == 1:
        note("speed: one sample each, no spread and perhaps cold: the ratios mean little")
    return speed_rows(found)


def speed_rows(found: list[Measured]) -> list[dict[str, Any]]:
    samples = {(task.name, task.metric): values for task, values in found}
    rows = []
    for task, values in found:
        row: dict[str, Any] = {"name": task.name, "metric": task.metric, "samples": values}
        row |= {"unit": "tokens/s", **figures(summary(values))}
        if task.name == "machine":
            row |= {"unit": "B/s" if task.metric == "bandwidth" else "op/s", "best": max(values)}
        else:
            row["to_melodi"] = figures(ratio(values, samples[REFERENCE, task.metric]))
        if task.work is not None:
            roof = samples["machine", ROOFS[task.metric]]
            row["work"], row["roof"] = task.work, ROOFS[task.metric]
            row["share"] = figures(ratio([value * task.work for value in values], roof))
        rows.append(row)
    return rows


def documents(size: Size, plan: Plan, others: Sequence[str], note: Note) -> list[dict[str, Any]]:
    """Whole documents, read by ours and, in one piece and in chunks, by full attention."""
    torch.manual_seed(0)
    model = LanguageModel(size.reference).eval()
    at_once = CHUNK_WINDOWS * size.reference.window  # as StreamReader does
    readers: dict[str, Callable[[int], object]] = {
        REFERENCE: lambda length: read_document(model, length, at_once)
    }
    if full_attention.NAME in others:
        if line := absent(full_attention.NAME):
            note(line)
        else:
            more = full_attention.document_readers(size.reference, size.segment)
            readers |= {f"{full_attention.NAME}, {way}": reader for way, reader in more.items()}
    rows: list[dict[str, Any]] = []
    last: dict[str, tuple[int, float]] = {}
    for length in plan.lengths:
        for name in list(readers)[1:]:
            seconds = expected(last.get(name), length)
            if seconds > plan.length_seconds:
                del readers[name]
                note(f"{name}: {length:,} tokens left out, it would take about {seconds:.0f} s")
        tasks = [
            Task(
                name,
                "read",
                rate(partial(reader, length), length),
                optional=name != REFERENCE,
                needed=name == REFERENCE,
            )
            for name, reader in readers.items()
        ]
        found = interleave(tasks, plan.length_seconds, note, f"{length:,} tokens", warm=False)
        for task, samples in found:
            last[task.name] = length, length / summary(samples).median
            ours = ratio(samples, found[0].samples)
            row = {"name": task.name, "length": length, "samples": samples}
            rows.append({**row, **figures(summary(samples)), "to_melodi": figures(ours)})
    return rows


def expected(last: tuple[int, float] | None, length: int) -> float:
    """Seconds for a longer document where cost grows with the square of the length."""
    return 0.0 if last is None else last[1] * (length / last[0]) ** 2


def peaks(
    size: Size, plan: Plan, ours: Sequence[str], others: Sequence[str], note: Note
) -> list[dict[str, Any]]:
    """What work adds to memory: a training step of every model, then documents of every length,
    read and trained on. What takes longest comes last."""
    full = [name for name in others if name == full_attention.NAME]
    both = [REFERENCE, *full]
    wanted = [(name, "train", size.segment) for name in (*both, *ours, *others)]
    for length in plan.lengths:
        wanted += [(REFERENCE, "read", length)]
        wanted += [(name, work, length) for name in full for work in ("read", "chunks")]
    wanted += [(name, "train", length) for length in plan.memory_lengths for name in both]
    rows, begin, failed = [], time.perf_counter(), set()
    for name, work, length in dict.fromkeys(wanted):
        left = plan.peak_seconds - (time.perf_counter() - begin)
        if left < 1 or name in failed:
            continue
        if name in ALTERNATIVES and (line := absent(name)):
            note(line)
            continue
        progress(f"peak memory: {name}, {work} {length:,} tokens")
        try:
            megabytes = peak_of(name, work, length, size, timeout=left)
        except subprocess.TimeoutExpired:
            note(f"{name}: peak memory of {work} with {length:,} tokens left out, no time is left")
            continue
        except RuntimeError as error:
            failed.add(name)
            note(f"{name}: no peak memory, {one_line(error)}")
            continue
        rows.append({"name": name, "work": work, "length": length, "megabytes": megabytes})
    return rows


def figures(found: Summary) -> dict[str, float]:
    return {**asdict(found), "spread": found.spread}
