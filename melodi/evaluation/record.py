"""What a run's weights are worth, as a record that says what it is about; docs/evaluation.md tells
what each figure means.

Two passes over the documents of a split: with memory kept, and with memory dropped at every window;
with `drops` one more for each memory that can be dropped alone. The record of a whole split of the
run's own store is RUN/eval-SPLIT.json, which reports read. What is of fewer documents, of another
store or in another precision than the run's says so in its name, and replaces nothing else.
"""

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from melodi.config.training import Precision
from melodi.data.store import Documents, TokenStore
from melodi.evaluation.documents import Evaluation, choose, evaluate
from melodi.evaluation.drops import PARTS, without
from melodi.evaluation.intervals import bootstrap, paired
from melodi.evaluation.probes import attention, gates
from melodi.evaluation.tallies import (
    ByPowers,
    PerDocument,
    by_place_in_window,
    by_position,
    by_window,
)
from melodi.files import read_header, write_json
from melodi.model import LanguageModel
from melodi.precision import autocast, resolve
from melodi.run import Run, checksum, other_splits, weights_file


@dataclass
class Pass:
    """What one reading of the chosen documents gave."""

    without: str
    """What it did without: nothing, memory, short_term or long_term."""
    sums: Evaluation
    each: PerDocument
    places: dict[str, ByPowers]
    """Nats by place, in the document and in the window."""
    seconds: float

    @property
    def suffix(self) -> str:
        return "" if self.without == "nothing" else f"_without_{self.without}"

    def figures(self) -> dict[str, Any]:
        found = {
            "perplexity": self.sums.perplexity,
            "bits_per_byte": self.sums.bits_per_byte,
            "perplexity_interval": bootstrap(self.each.nats, self.each.predictions)._asdict(),
            **{name: tally.means() for name, tally in self.places.items()},
        }
        return {f"{name}{self.suffix}": value for name, value in found.items()}


def evaluate_run(
    model: LanguageModel,
    run: Run,
    store: TokenStore,
    split: str = "test",
    rows: int = 8,
    max_tokens: int | None = None,
    drops: bool = False,
    precision: Precision = "fp32",
    weights: str | None = None,
) -> dict[str, Any]:
    """The record of a model that `load(run, weights)` gave; each pass has a bar where there is a
    terminal."""
    device, config = model.embedding.weight.device, model.config
    found = resolve(precision, device, config)
    for name, value in (("rows", rows), ("max_tokens", max_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    about = described(
        run, store, split, max_tokens, weights
    )  # now: a training may put new weights there
    documents = store.split(split)
    chosen = choose(documents, max_tokens)
    if not chosen:
        raise ValueError(f"the {split} split of {store.path} is empty: choose another")
    segment_windows, rows = run.configs()[1].segment_windows, min(rows, len(chosen))
    read = Reading(documents, chosen, rows, segment_windows)
    with autocast(found, device):
        passes = [read(model, "nothing"), read(model, "memory")]
        for part in PARTS if drops else ():
            left = without(model, part)
            if left is not None:
                passes.append(read(left, part))
        shares = attention(model, documents, chosen)
    return {
        **about,
        "precision": found,
        **figures(passes),
        "gates": gates(model),
        "attention": shares,
        "speed": speed(passes[0], rows, device),
        "per_document": per_document(documents, chosen, passes),
    }


@dataclass
class Reading:
    """Which documents are read, and how."""

    documents: Documents
    chosen: list[int]
    rows: int
    segment_windows: int

    def __call__(self, model: LanguageModel, lacking: str) -> Pass:
        """`model` lacks already what `lacking` names; only "memory" is dropped here, at every
        window."""
        tokens = int(sum(self.documents.lengths[i] for i in self.chosen))
        window = model.config.window
        each = PerDocument(len(self.documents))
        places = {
            "by_position": by_position(),
            "by_place_in_window": by_place_in_window(window),
            "by_window": by_window(window),
        }
        kept = lacking == "nothing"
        label = "memory kept" if kept else f"without {lacking.replace('_', '-')}"
        start = time.perf_counter()
        with tqdm(total=tokens, desc=label, unit="tok", unit_scale=True, disable=None) as bar:
            sums = evaluate(
                model,
                self.documents,
                self.chosen,
                rows=self.rows,
                segment_windows=self.segment_windows,
                with_memory=lacking != "memory",
                progress=bar.update,
                tallies=[each, *places.values()],
            )
        return Pass(lacking, sums, each, places, time.perf_counter() - start)


def described(
    run: Run, store: TokenStore, split: str, max_tokens: int | None, weights: str | None
) -> dict[str, Any]:
    """Which documents were read, and with which weights."""
    file = weights_file(run.folder, weights)
    others = other_splits(run.read_config()["data"], store)
    step = read_header(file).get("step")
    return {
        "split": split,
        "store": str(store.path.resolve()),
        "own_store": not {"train", split} & set(others),
        "documents_checksum": checksum(store, split),
        "max_tokens": max_tokens,
        "weights": file.name,
        "step": None if step is None else int(step),
    }


def figures(passes: list[Pass]) -> dict[str, Any]:
    """Of all passes, the first of which kept everything; "worth" is what the others lost by it, in
    nats per prediction."""
    kept = passes[0]
    found: dict[str, Any] = {
        "documents": kept.sums.documents,
        "tokens": kept.sums.tokens,
        "predictions": kept.sums.predictions,
        "bytes": kept.sums.bytes,
    }
    for one in passes:
        found |= one.figures()
    found["worth"] = {
        one.without: paired(one.each.nats, kept.each.nats, kept.each.predictions)._asdict()
        for one in passes[1:]
    }
    return found


def speed(kept: Pass, rows: int, device: torch.device) -> dict[str, Any]:
    """How fast whole documents were read here; not what the hardware can do, which bench tells."""
    return {
        "tokens_per_second": kept.sums.predictions / kept.seconds,
        "tokens": kept.sums.predictions,
        "seconds": kept.seconds,
        "rows": rows,
        "device": str(device),
        "threads": torch.get_num_threads(),
    }


def per_document(
    documents: Documents, chosen: list[int], passes: list[Pass]
) -> list[dict[str, Any]]:
    """The sums of each document that was read, in the order of the split."""
    return [
        {
            "document": i,
            "predictions": int(passes[0].each.predictions[i]),
            "bytes": int(documents.num_bytes[i]),
            **{f"nats{one.suffix}": float(one.each.nats[i]) for one in passes},
        }
        for i in chosen
    ]


def write_record(run: Run, record: dict[str, Any]) -> Path:
    """Writes the record to the place that it deserves, and says where that is."""
    store = None if record["own_store"] else named_store(Path(record["store"]))
    precision = None if record["precision"] == run.configs()[1].precision else record["precision"]
    path = run.folder / record_name(record["split"], record["max_tokens"], store, precision)
    write_json(path, record)
    return path


def named_store(path: Path) -> str:
    """The folder's name, and a few digits of its place: many stores are called alike."""
    return f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:6]}"


def record_name(
    split: str,
    max_tokens: int | None = None,
    store: str | None = None,
    precision: str | None = None,
) -> str:
    """The file of a record: of so many tokens of a split, all when not given, and, where they are
    not those of the run, of which store and in which precision."""
    tokens = None if max_tokens is None else f"{max_tokens}-tokens"
    said = "".join(f"-{part}" for part in (tokens, store, precision) if part)
    return f"{'partial-' if tokens or store else ''}eval-{split}{said}.json"
