"""The model that ships with the package: found without a name, whole, and small."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from test_cli import _same_threads, folder, printed, refused
from test_cli_read import QUICK

import melodi
from melodi import run as runs
from melodi.files import read_tensors

__all__ = ["_same_threads", "folder"]

ROOT = Path(__file__).parents[1]
LARGEST = 8_000_000
"""Bytes of a package that nobody minds to install."""


@pytest.fixture(scope="module")
def half(folder: Path) -> Path:
    """A tiny run as it would be shipped, its weights in two bytes a number."""
    spec = importlib.util.spec_from_file_location("ship_run", ROOT / "tools" / "ship_run.py")
    assert spec is not None
    assert spec.loader is not None
    ship_run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ship_run)
    place: Path = ship_run.ship(folder / "run", folder / "shipped" / "laptop-melodi", bf16=True)
    return place


@pytest.fixture
def shipped(half: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The package with that run in it, used from a folder that has no run."""
    monkeypatch.setattr(runs, "SHIPPED", half)
    monkeypatch.chdir(tmp_path)
    return half


def test_two_bytes_are_read_as_four(folder: Path, half: Path) -> None:
    """Weights stored as bf16 are float32 in the model, and the run's own but for their rounding."""
    _, stored = read_tensors(half / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    ours, theirs = melodi.load(folder / "run"), melodi.load(half)
    for name, weight in theirs.named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, ours.get_parameter(name).bfloat16().float())


def test_it_can_be_evaluated_on_texts_of_ones_own(
    folder: Path, shipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store is prepared with its vocabulary by naming it."""
    line = refused(capsys, "eval laptop-melodi --device cpu")
    assert "prepare one with --tokenizer and this run" in line
    printed(capsys, f"prepare {folder}/books --out {tmp_path}/own --tokenizer laptop-melodi")
    line = f"eval laptop-melodi --data {tmp_path}/own {QUICK} --json"
    assert json.loads(printed(capsys, line))["perplexity"] > 1


def test_nothing_of_the_machine_is_shipped(folder: Path, half: Path) -> None:
    """Paths of the run's maker are left out; the tokenizer comes along."""
    for path in half.glob("*.json"):
        assert str(folder) not in path.read_text()
    assert melodi.load(half).tokenizer.vocab_size == 257


def test_without_a_run_the_shipped_one_is_used(
    shipped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`read`, `generate`, `export` and `load` find it, by its name or without any."""
    Path("book.txt").write_text("It was the best of times. " * 9)
    record = json.loads(printed(capsys, f"read book.txt --save book.memory --json {QUICK}"))
    assert record["run"] == "laptop-melodi"
    assert math.isfinite(record["perplexity"])
    named = json.loads(printed(capsys, f"read book.txt --run laptop-melodi --json {QUICK}"))
    assert named["nats"] == record["nats"]
    assert printed(capsys, f"read book.txt {QUICK}").startswith("laptop-melodi: 1 document\n")
    text = printed(capsys, f"generate --memory book.memory --max-tokens 3 --seed 1 {QUICK}")
    assert text.endswith("\n")
    assert printed(capsys, f"generate --prompt It --max-tokens 1 {QUICK}").startswith("It")
    ours, theirs = melodi.load("laptop-melodi"), melodi.load(shipped)
    assert torch.equal(ours.embedding.weight, theirs.embedding.weight)


def test_it_is_evaluated_by_its_name(
    folder: Path, shipped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On any store with its tokenizer; the record that it came with stays as it is."""
    before = sorted((path, path.stat().st_mtime_ns) for path in shipped.iterdir())
    data = folder / "store"
    record = json.loads(printed(capsys, f"eval laptop-melodi --data {data} --json {QUICK}"))
    assert math.isfinite(record["perplexity"])
    assert sorted((path, path.stat().st_mtime_ns) for path in shipped.iterdir()) == before


def test_a_folder_of_that_name_comes_first(shipped: Path) -> None:
    """What is named is a path wherever there is one, so that one's own run is never passed over."""
    Path("laptop-melodi").mkdir()
    with pytest.raises(FileNotFoundError, match="laptop-melodi is not a run folder"):
        melodi.load("laptop-melodi")


def test_a_copy_without_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One line says that there is none, and what to give instead."""
    monkeypatch.setattr(runs, "SHIPPED", tmp_path / "shipped" / "laptop-melodi")
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("It was")
    for command in ("read book.txt", "generate", "generate --run laptop-melodi"):
        assert "no model is in this copy of melodi" in refused(capsys, f"{command} {QUICK}")
    with pytest.raises(ValueError, match="give --run RUN"):
        melodi.load("laptop-melodi")


@pytest.mark.skipif(not runs.SHIPPED.exists(), reason="this copy of melodi has no model")
def test_the_model_in_the_package() -> None:
    """The shipped run loads, is no larger than it may be, and was evaluated."""
    assert sum(path.stat().st_size for path in runs.SHIPPED.rglob("*")) <= LARGEST
    assert melodi.load("laptop-melodi").num_parameters > 0
    assert list(runs.SHIPPED.glob("*eval-*.json"))
