"""Two processes with half the rows each take the same steps as one process with all rows."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from zoo import KINDS

from melodi.config import ModelConfig
from melodi.config.training import Execution, OptimizerConfig, TrainConfig
from melodi.data.prepare import prepare
from melodi.data.store import TokenStore
from melodi.run import Run
from melodi.training.distributed import processes
from melodi.training.trainer import train

pytestmark = pytest.mark.slow


def configs(kind: str, steps: int) -> tuple[ModelConfig, TrainConfig]:
    train_config = TrainConfig(
        optimizer=OptimizerConfig("adafactor", peak=1e-2, floor=1e-3, warmup=2),
        steps=steps,
        horizon=6,
        rows=4,
        turns=2,
        segment_windows=2,
        accumulate=1,
        validate_every=3,
        validation_tokens=60,
        save_every=3,
    )
    # The few features of ARMT's narrow keys are mostly zero, and so is what its queries learn from:
    # of gradients of 1e-15 Adafactor makes whole steps. Wider keys have gradients above rounding.
    return replace(KINDS[kind], vocab_size=257, associative_width=8), train_config


def work(
    kind: str,
    sharding: str,
    steps: int,
    store: str,
    run: str,
    resume: bool,
    precision: str = "fp32",
) -> None:
    """What each process does; also run alone, as the reference."""
    torch.set_num_threads(1)
    model, config = configs(kind, steps)
    config = replace(config, precision=precision)  # type: ignore[arg-type]
    with processes("cpu") as group:
        execution = Execution(sharding=sharding)  # type: ignore[arg-type]
        train(run, TokenStore.open(store), model, config, execution, group, resume)


def fail_first(fails: bool) -> None:
    """Work that only the first process does, and that may fail."""
    with processes("cpu") as group:
        done: list[int] = []

        def first() -> None:
            done.append(group.rank)
            if fails:
                raise FileNotFoundError("gone")

        words = "gone" if group.first else "the first process has failed"
        with pytest.raises((ValueError, OSError), match=words) if fails else nullcontext():
            group.on_first(first)
        assert done == ([0] if group.first else [])
        assert group.total(1) == [2]  # none has gone on without the other


def launch(world: int, *args: object, function: str = "work") -> None:
    """The same work under torchrun's environment, without its agent."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 500)}
    code = f"import test_distributed as t; t.{function}(*{args!r})"
    ranks = []
    for rank in range(world):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        env = {**os.environ, **rendezvous, **place, "PYTHONPATH": str(Path(__file__).parent)}
        ranks.append(subprocess.Popen([sys.executable, "-c", code], env=env))
    assert [process.wait() for process in ranks] == [0] * world


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(12):
        (folder / f"{i:02}.txt").write_text(f"{i} the book remembers the reader " * (1 + i % 4))
    prepare([folder], folder / "store", tokenizer="bytes", workers=1)
    return str(folder / "store")


def assert_close(ours: Path, theirs: Path) -> None:
    a, b = load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors")
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=2e-6, msg=name)
    last = "checkpoints/step-00000006/trainer.json"
    assert (
        json.loads((ours / last).read_text())["rows"]
        == json.loads((theirs / last).read_text())["rows"]
    )


def gates(run: Path) -> list[float]:
    """The mean gates that were logged last."""
    last = [record for record in Run(run).read_metrics() if "loss" in record][-1]
    return [value for name, value in last.items() if name.startswith("gate/")]


@pytest.mark.parametrize(
    ("kind", "sharding"),
    [
        *[
            ("melodi", "ddp"),
            ("melodi", "fsdp"),
            ("block-recurrent", "ddp"),
            ("memorizing", "fsdp"),
        ],
        *[("rmt", "ddp"), ("autocompressor", "fsdp"), ("infini", "ddp"), ("armt", "fsdp")],
        ("compressive-convolution", "ddp"),
    ],
)
def test_two_processes_equal_one(kind: str, sharding: str, store: str, tmp_path: Path) -> None:
    """Gradients of the one mean loss, metrics and validation reduced, rows shared out; and the
    checkpoint of two processes resumes in one, with memory and data positions intact."""
    work(kind, "ddp", 6, store, str(tmp_path / "one"), False)
    launch(2, kind, sharding, 6, store, str(tmp_path / "two"), False)
    assert_close(tmp_path / "one", tmp_path / "two")
    assert gates(tmp_path / "two") == pytest.approx(gates(tmp_path / "one"), abs=1e-6)
    assert bool(gates(tmp_path / "one")) == (kind in ("melodi", "memorizing", "infini"))

    launch(2, kind, sharding, 3, store, str(tmp_path / "both"), False)
    work(kind, "ddp", 6, store, str(tmp_path / "both"), True)
    assert_close(tmp_path / "one", tmp_path / "both")


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_the_same_world_resumes_bit_for_bit(sharding: str, store: str, tmp_path: Path) -> None:
    """Two processes that stop and resume end with the weights of two that never stopped."""
    launch(2, "melodi", sharding, 6, store, str(tmp_path / "whole"), False)
    launch(2, "melodi", sharding, 3, store, str(tmp_path / "parts"), False)
    launch(2, "melodi", sharding, 6, store, str(tmp_path / "parts"), True)
    a, b = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_halves_are_gathered_and_learn_the_same(store: str, tmp_path: Path) -> None:
    """In bf16 two sharded processes, which gather bf16 weights, have the losses of one that casts
    them, as far as bf16 goes; weights and memory are float32 in both."""
    losses = []
    work("melodi", "ddp", 3, store, str(tmp_path / "one"), False, "bf16")
    launch(2, "melodi", "fsdp", 3, store, str(tmp_path / "two"), False, "bf16")
    for run in (tmp_path / "one", tmp_path / "two"):
        last = Run(run).read_metrics()[-1]
        losses.append(last["validation_loss"])
        files = [run / "model.safetensors", *run.glob("checkpoints/*/memory-rows-*.safetensors")]
        tensors = [tensor for file in files for tensor in load_file(file).values()]
        assert {tensor.dtype for tensor in tensors} == {torch.float32, torch.int64}
    assert losses[0] == pytest.approx(losses[1], abs=0.02)


@pytest.mark.parametrize("fails", [True, False])
def test_what_the_first_process_does_fails_in_all(fails: bool) -> None:
    launch(2, fails, function="fail_first")
