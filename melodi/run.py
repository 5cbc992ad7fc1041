"""A run is a folder that can be repeated, resumed and compared; this file knows what is in it.

    config.json        the resolved model and training configs, and which store
    environment.json   versions, machine, commit
    metrics.jsonl      one JSON object per line
    checkpoints/       what is needed to go on, the last few (checkpoint.py)
    best.safetensors   weights with the lowest validation loss
    model.safetensors  weights at the last checkpoint
    tokenizer.*        a copy of the store's

Everything that the result depends on is in `ModelConfig` and `TrainConfig`; `Machinery` is how it
is carried out.
"""

import dataclasses
import json
import platform
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import melodi
from melodi.config import ModelConfig
from melodi.config.training import OptimizerConfig, TrainConfig
from melodi.data.store import TokenStore
from melodi.files import read_json, write_json, write_text
from melodi.training.checkpoint import Checkpoints


class Run:
    """The files of a run."""

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        self.folder = Path(folder)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", keep)

    @property
    def exists(self) -> bool:
        return (self.folder / "config.json").exists()

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def create(self, model: ModelConfig, train: TrainConfig, store: TokenStore) -> None:
        if self.exists:
            raise ValueError(
                f"{self.folder} already holds a run: continue it with --resume, or choose "
                "another --out"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        store.tokenizer.save(self.folder)
        write_json(self.folder / "environment.json", environment())
        write_json(
            self.folder / "config.json",
            {
                "model": model.to_dict(),
                "train": dataclasses.asdict(train),
                "data": {
                    "path": str(store.path.resolve()),
                    "tokenizer_digest": store.manifest["tokenizer_digest"],
                    "train_checksum": train_checksum(store),
                },
            },
        )

    def configs(self) -> tuple[ModelConfig, TrainConfig, dict[str, Any]]:
        if not self.exists:
            raise FileNotFoundError(f"{self.folder} is not a run folder: it has no config.json")
        config = read_json(self.folder / "config.json")
        train = dict(config["train"])
        optimizer = OptimizerConfig(
            **{**train.pop("optimizer"), "betas": tuple(config["train"]["optimizer"]["betas"])}
        )
        return (
            ModelConfig.from_dict(config["model"]),
            TrainConfig(optimizer=optimizer, **train),
            config["data"],
        )

    def log(self, record: dict[str, Any]) -> None:
        with self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def rewind(self, step: int) -> None:
        """Drops the metrics of steps that will be taken again."""
        if self.metrics.exists():
            lines = self.metrics.read_text().splitlines()
            kept = [line for line in lines if _step_of(line) <= step]
            write_text(self.metrics, "".join(f"{line}\n" for line in kept))


def extended(ours: TrainConfig, wanted: TrainConfig) -> TrainConfig:
    """The config of a run that goes on: only the steps may change, and only within the schedule."""
    horizon = ours.horizon or ours.steps
    if wanted.steps > horizon:
        raise ValueError(
            f"--steps {wanted.steps} goes beyond the schedule of this run, which ends at step "
            f"{horizon}: a run of {wanted.steps} steps would have had other learning rates from "
            f"the start; begin a new one, with --horizon if it is to stop on the way"
        )
    wanted = replace(wanted, horizon=horizon)
    for field in dataclasses.fields(TrainConfig):
        before, after = (
            getattr(config, field.name) for config in (replace(ours, horizon=horizon), wanted)
        )
        if before != after and field.name != "steps":
            raise ValueError(
                f"{field.name}={after} differs from the run's {before}: resume without it, or "
                "begin a new run"
            )
    return wanted


def check_store(store: TokenStore, digest: str) -> None:
    if store.manifest["tokenizer_digest"] != digest:
        raise ValueError(
            f"store {store.path} was made with another tokenizer than the run "
            f"({store.manifest['tokenizer_digest']}, not {digest}): give the run's own store"
        )


def check_same_data(store: TokenStore, checksum: str) -> None:
    if train_checksum(store) != checksum:
        raise ValueError(
            f"store {store.path} holds other training documents than the run began with: give the "
            "run's own store"
        )


def train_checksum(store: TokenStore) -> str:
    return str(store.manifest["splits"]["train"]["checksums"]["tokens"])


def check_vocabulary(model: ModelConfig, store: TokenStore) -> None:
    if model.vocab_size < store.vocab_size:
        raise ValueError(
            f"vocab_size={model.vocab_size} is too small for store {store.path}, which has "
            f"{store.vocab_size} tokens: set it to {store.vocab_size}"
        )


def environment() -> dict[str, Any]:
    """What the run was made with."""
    return {
        "melodi": melodi.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.platform(),
        "cpu_threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _commit() -> str | None:
    """The commit of a source checkout, with a plus where it has been changed."""
    here = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run(
            [*here, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run([*here, "status", "--porcelain"], capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _step_of(line: str) -> int:
    """The step of a line of metrics; a line cut short by a kill belongs to none."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return sys.maxsize
