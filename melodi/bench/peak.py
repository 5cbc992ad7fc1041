"""Peak memory of one piece of work, in a process of its own: what it adds to what was there.

This file is also what that process runs: it is told what to do in JSON, and prints megabytes.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from melodi.bench import full_attention
from melodi.bench.alternatives import ALTERNATIVES
from melodi.bench.machine import peak_mb, status_mb
from melodi.bench.sizes import Size
from melodi.bench.subjects import read_document, train_on_document
from melodi.config import ModelConfig
from melodi.model import LanguageModel
from melodi.precision import autocast

GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
"""glibc gives what is freed back to the system: otherwise the holes in its heap, which differ from
run to run and grow for a while, count as memory of the model."""


def peak_of(name: str, work: str, length: int, size: Size, timeout: float) -> float:
    """Megabytes that this work adds, `length` tokens in each row. Work is "train", or "read", for
    full attention also "chunks"; an alternative can only train, on one segment."""
    order = {
        "name": name,
        "work": work,
        "length": length,
        "rows": size.rows,
        "segment_windows": size.segment_windows,
        "precision": size.precision,
        "models": {key: model.to_dict() for key, model in size.models.items()},
        "threads": torch.get_num_threads(),
    }
    done = subprocess.run(
        [sys.executable, "-m", "melodi.bench.peak", json.dumps(order)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **GIVING_BACK, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no words"])[-1]
        raise RuntimeError(f"the process for {name} failed: {last}")
    return float(done.stdout.split()[-1])


def work_of(order: dict[str, Any]) -> Callable[[], object]:
    """What is to be measured, ready to run: the model is there."""
    models = {name: ModelConfig.from_dict(values) for name, values in order["models"].items()}
    size = Size(models, order["rows"], order["segment_windows"], order["precision"])
    name, work, length = order["name"], order["work"], order["length"]
    if name in models:
        model = LanguageModel(models[name])
        if work == "train":
            return lambda: train_on_document(model, size.rows, length, size.segment)
        return lambda: read_document(model, length, size.segment)
    if name == full_attention.NAME:
        c = size.reference
        llama = full_attention.make_llama(c)
        if work == "train":
            return lambda: full_attention.train_whole(llama, c, size.rows, length)
        if work == "chunks":
            return lambda: full_attention.read_in_chunks(llama, c, length, size.segment)
        return lambda: full_attention.read_whole(llama, c, length)
    train = ALTERNATIVES[name][1](size, 1).train
    assert train is not None
    return train


def main(order: dict[str, Any]) -> None:
    torch.set_num_threads(order["threads"])
    run = work_of(order)
    warm = torch.ones(64, 64)
    (warm @ warm).sum().item()
    with contextlib.suppress(OSError):  # on Linux the peak can start anew
        Path("/proc/self/clear_refs").write_text("5")
    before = status_mb("VmRSS") or peak_mb()
    with autocast(order["precision"], torch.device("cpu")):
        run()
    print(peak_mb() - before)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
