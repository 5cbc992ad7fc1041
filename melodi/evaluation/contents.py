"""What a memory file holds, without the model that it belongs to.

Norms are the mean lengths of the vectors in the slots that hold something. Where a layer has a
FIFO they are also given by age: age 1 is the last whole window.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from melodi.files import read_header
from melodi.layers.frame import Layer, LayerMemory
from melodi.memory import MemoryState
from melodi.memory_file import VERSION
from melodi.model import LanguageModel


def contents(path: str | Path) -> dict[str, Any]:
    """Everything that can be said of a memory file, as plain values."""
    path = Path(path)
    state, place = MemoryState.load_with_place(path)
    header, config = read_header(path), state.config
    with torch.device("meta"):
        stack = LanguageModel(config).stack
    return {
        "path": str(path),
        "bytes": path.stat().st_size,
        "version": VERSION,
        "stored_as": "bf16" if "dtypes" in header else str(state.dtype).removeprefix("torch."),
        "rows": state.batch_size,
        "tokens": state.tokens_B.tolist(),
        "windows": state.windows_B.tolist(),
        "open_tokens": state.open_B.tolist(),
        "floats_per_document": state.num_floats(),
        "expects_next": place is not None and bool(place.known_B.all()),
        "text_digests": None if place is None else list(place.digests),
        "tokenizer_digest": None if place is None else place.tokenizer,
        "config_digest": header["config_digest"],
        "weights_digest": header["weights_digest"],
        "config": config.to_dict(),
        "layers": [described(layer, state) for layer in stack],
    }


def described(layer: Layer[LayerMemory], state: MemoryState) -> dict[str, Any]:
    """One layer: the size and the norm of each thing that it carries, and norms by age."""
    memory = state.layers[layer.index]
    fields: tuple[str, ...] = getattr(memory, "_fields")  # noqa: B009
    found: dict[str, Any] = {"layer": layer.index, "kind": state.config.layers[layer.index]}
    carried = []
    for name, tensor in zip(fields, memory, strict=True):
        if not tensor[0].numel():
            continue
        newest_first = [
            vectors_newest_first(tensor[row], name, layer, windows)
            for row, windows in enumerate(state.windows_B.tolist())
        ]
        queued = layer.entries_per_window and is_queue(name)
        about: dict[str, Any] = {
            "name": name,
            "shape": list(tensor.shape[1:]),
            "norm": mean_norm(newest_first),
        }
        if queued:
            about["norm_by_age"] = norms_by_age(newest_first, layer.entries_per_window)
        carried.append(about)
    return {**found, "carried": carried}


def is_queue(field: str) -> bool:
    """Memories are named by their axes: a FIFO has M slots."""
    return field.rpartition("_")[2] in ("BHME", "BMD")


def vectors_newest_first(
    tensor: Tensor, field: str, layer: Layer[LayerMemory], windows: int
) -> Tensor:
    """The lengths of the vectors that one row holds: (slots,) or, for sums, as they come."""
    norms = tensor.double().norm(dim=-1)
    norms = norms.mean(0) if norms.dim() == 2 else norms
    if not windows:
        return norms[:0] if norms.dim() else norms.new_zeros(0)
    if layer.entries_per_window and is_queue(field):
        filled = min(windows * layer.entries_per_window, len(norms))
        return norms.flip(0)[:filled]
    flat = norms.reshape(-1)
    return flat[flat > 0]  # a slot that nothing was written to holds zeros


def mean_norm(rows: list[Tensor]) -> float | None:
    whole = torch.cat(rows)
    return float(whole.mean()) if len(whole) else None


def norms_by_age(rows: list[Tensor], per_window: int) -> list[float]:
    """Age 1 first; over the rows that are old enough."""
    parts = [row.split(per_window) if len(row) else () for row in rows]
    oldest = max(map(len, parts))
    return [
        float(torch.cat([part[age] for part in parts if len(part) > age]).mean())
        for age in range(oldest)
    ]
