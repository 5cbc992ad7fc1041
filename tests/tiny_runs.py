"""A small store, a small model and a short training: what the tests of runs share."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from zoo import KINDS

from melodi.config import ModelConfig
from melodi.config.training import Execution, OptimizerConfig, TrainConfig
from melodi.data.prepare import prepare
from melodi.data.store import TokenStore
from melodi.run import Run
from melodi.training.distributed import Processes
from melodi.training.trainer import Trainer

ALONE = Processes(0, 1, torch.device("cpu"))
CONFIG = TrainConfig(
    optimizer=OptimizerConfig("adamw", peak=1e-2, floor=1e-3, warmup=2),
    steps=8,
    rows=4,
    turns=2,
    segment_windows=2,
    validate_every=3,
    validation_tokens=100,
    save_every=2,
)


def make_store(folder: Path) -> TokenStore:
    """Documents of very different lengths, as bytes."""
    random = np.random.default_rng(0)
    for i in range(24):
        words = random.choice(["melodi", "reads", "a", "book", "and", "remembers"], 4 + 9 * (i % 7))
        (folder / f"{i:02}.txt").write_text(f"{i} " + " ".join(words))
    return prepare([folder], folder / "store", tokenizer="bytes", workers=1)


def model_config(kind: str = "melodi", **changes: object) -> ModelConfig:
    return replace(KINDS[kind], vocab_size=257, dropout=0.1, **changes)


def start(folder: Path, store: TokenStore, **changes: object) -> Trainer:
    """A new run that has not taken a step."""
    config = replace(CONFIG, **changes)
    run = Run(folder)
    run.create(model_config(), config, store)
    return Trainer(run, store, model_config(), config, Execution(), ALONE)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def flip(path: Path, place: int = -1) -> None:
    """Changes one bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
