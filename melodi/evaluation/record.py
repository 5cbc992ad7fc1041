"""What a run's weights are worth, as a record that says what it is about.

Two passes over the documents of a split: with memory kept, and with memory dropped at every window.
The record of a whole split of the run's own store is RUN/eval-SPLIT.json, which reports read. What
is of fewer documents or of another store goes to RUN/partial-eval-SPLIT.json and replaces nothing.
"""

from pathlib import Path
from typing import Any

from tqdm import tqdm

from melodi.data.store import Documents, TokenStore
from melodi.evaluation.documents import Evaluation, choose, evaluate
from melodi.evaluation.tallies import PerDocument
from melodi.files import read_header, write_json
from melodi.model import LanguageModel
from melodi.run import Run, train_checksum, weights_file


def evaluate_run(
    model: LanguageModel,
    run: Run,
    store: TokenStore,
    split: str = "test",
    rows: int = 8,
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """The record of a model that `load` gave; each pass has a bar where there is a terminal."""
    for name, value in (("rows", rows), ("max_tokens", max_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    documents = store.split(split)
    chosen = choose(documents, max_tokens)
    if not chosen:
        raise ValueError(f"the {split} split of {store.path} is empty: choose another")
    tokens = int(sum(documents.lengths[i] for i in chosen))
    results = []
    each = {kept: PerDocument(len(documents)) for kept in (True, False)}
    for kept in (True, False):
        label = "memory kept" if kept else "memory dropped"
        with tqdm(total=tokens, desc=label, unit="tok", unit_scale=True, disable=None) as bar:
            results.append(
                evaluate(
                    model,
                    documents,
                    chosen,
                    rows=min(rows, len(chosen)),
                    segment_windows=run.configs()[1].segment_windows,
                    with_memory=kept,
                    progress=bar.update,
                    tallies=[each[kept]],
                )
            )
    return {
        **described(run, store, split, max_tokens),
        **figures(*results),
        "per_document": per_document(documents, chosen, each[True], each[False]),
    }


def per_document(
    documents: Documents, chosen: list[int], kept: PerDocument, dropped: PerDocument
) -> list[dict[str, Any]]:
    """The sums of each document that was read, in the order of the split."""
    return [
        {
            "document": i,
            "predictions": int(kept.predictions[i]),
            "bytes": int(documents.num_bytes[i]),
            "nats": float(kept.nats[i]),
            "nats_without_memory": float(dropped.nats[i]),
        }
        for i in chosen
    ]


def described(run: Run, store: TokenStore, split: str, max_tokens: int | None) -> dict[str, Any]:
    """Which documents were read, and with which weights."""
    weights = weights_file(run.folder)
    step = read_header(weights).get("step")
    return {
        "split": split,
        "store": str(store.path.resolve()),
        "own_store": train_checksum(store) == run.read_config()["data"]["train_checksum"],
        "max_tokens": max_tokens,
        "weights": weights.name,
        "step": None if step is None else int(step),
    }


def figures(kept: Evaluation, dropped: Evaluation) -> dict[str, Any]:
    return {
        "documents": kept.documents,
        "tokens": kept.tokens,
        "predictions": kept.predictions,
        "bytes": kept.bytes,
        "perplexity": kept.perplexity,
        "bits_per_byte": kept.bits_per_byte,
        "perplexity_without_memory": dropped.perplexity,
        "bits_per_byte_without_memory": dropped.bits_per_byte,
        "by_position": kept.by_position(),
        "by_position_without_memory": dropped.by_position(),
    }


def write_record(run: Run, record: dict[str, Any]) -> Path:
    """Writes the record to the place that it deserves, and says where that is."""
    whole = record["own_store"] and record["max_tokens"] is None
    path = run.folder / f"{'' if whole else 'partial-'}eval-{record['split']}.json"
    write_json(path, record)
    return path
