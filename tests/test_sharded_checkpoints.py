"""Checkpoints of a sharded model: written behind, whole or absent, taken over by any number."""

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from test_distributed import assert_close, launch, work
from tiny_runs import ALONE, CONFIG, flip, make_store, model_config, same, start, weights

from melodi.config.training import Execution
from melodi.data.store import TokenStore
from melodi.files import read_tensors, write_tensors
from melodi.run import Run
from melodi.training.checkpoint import Checkpoints, damage
from melodi.training.distributed import Processes, processes
from melodi.training.learner import Learner
from melodi.training.trainer import Trainer


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return make_store(tmp_path_factory.mktemp("store"))


@contextlib.contextmanager
def one_sharded_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    """The only one of its world, and sharded nevertheless."""
    with monkeypatch.context() as patch:
        place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**place, "MASTER_PORT": str(30000 + os.getpid() % 500)}.items():
            patch.setenv(name, value)
        with processes("cpu") as group:
            yield group


def resumed(folder: Path, store: TokenStore, group: Processes, sharding: str) -> Trainer:
    run = Run(folder)
    model, config, _ = run.configs()
    execution = Execution(sharding=sharding)  # type: ignore[arg-type]
    trainer = Trainer(run, store, model, config, execution, group)
    trainer.restore()
    return trainer


def test_sharded_and_whole_take_over_from_each_other(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is whole, then sharded, then whole again ends with the weights of one that never
    stopped; what is sharded has no file of whole weights but those for use."""
    start(tmp_path / "never", store).run_all()
    trainer = start(tmp_path / "run", store)
    for _ in range(2):
        trainer.learner.take_step()
    trainer.save()
    with one_sharded_process(monkeypatch) as group:
        trainer = resumed(tmp_path / "run", store, group, "fsdp")
        assert trainer.learner.sharded
        assert trainer.step == 2
        for _ in range(3):
            trainer.learner.take_step()
        trainer.save(last=True)
        for_use = {name: t.full_tensor() for name, t in trainer.learner.model.state_dict().items()}
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000005"
    names = json.loads((checkpoint / "checksums.json").read_text()).keys()
    assert names == {
        *("memory-rows-000000-000003.safetensors", "memory-rows-000004-000007.safetensors"),
        *("sharded/shard-00001-model-00001-of-00001.safetensors", "trainer.json"),
    }
    assert same(weights(tmp_path / "run"), for_use)
    trainer = resumed(tmp_path / "run", store, ALONE, "ddp")
    assert trainer.step == 5
    trainer.run_all()
    a, b = weights(tmp_path / "run"), weights(tmp_path / "never")
    assert all(torch.allclose(a[name], b[name], rtol=0, atol=2e-6) for name in a)


@pytest.mark.parametrize("wound", ["cut", "flipped", "gone"])
def test_a_damaged_shard_is_noticed(
    wound: str,
    store: TokenStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The checkpoint before it is used, with one line, as with whole ones."""
    trainer = start(tmp_path / "run", store)
    trainer.learner.take_step()
    trainer.save()
    with one_sharded_process(monkeypatch) as group:
        trainer = resumed(tmp_path / "run", store, group, "fsdp")
        trainer.learner.take_step()
        trainer.save(last=True)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert damage(checkpoint) is None
    (shard,) = (checkpoint / "sharded").iterdir()
    if wound == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif wound == "flipped":
        flip(shard)
    else:
        shard.unlink()
    capsys.readouterr()
    assert resumed(tmp_path / "run", store, ALONE, "ddp").step == 1
    said = capsys.readouterr().err.splitlines()
    assert sum("is damaged (" in line and "set aside for the" in line for line in said) == 1
    assert checkpoint.with_suffix(".damaged").is_dir()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """Until all is written there is no checkpoint; the next one waits for it."""
    checkpoints, may_end = Checkpoints(tmp_path, keep=1), threading.Event()
    order = []

    def slow(folder: Path, _: Processes) -> None:
        may_end.wait(60)
        (folder / "trainer.json").write_text("{}")
        (folder / "sharded" / "a").write_text("a")
        order.append(folder.name)

    checkpoints.write_behind(1, slow, ALONE)
    assert checkpoints.steps() == []
    assert (tmp_path / "step-00000001.partial").is_dir()
    may_end.set()
    checkpoints.write_behind(2, slow, ALONE)
    checkpoints.wait()
    assert order == ["step-00000001.partial", "step-00000002.partial"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002"]
    assert damage(checkpoints.path(2)) is None


def test_a_part_that_fails_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """The failure is one line, said at the next save or at the end."""
    checkpoints = Checkpoints(tmp_path, keep=2)

    def good(folder: Path, _: Processes) -> None:
        for name in ("trainer.json", "model.safetensors", "optimizer.safetensors"):
            (folder / name).write_text("{}")

    def full(folder: Path, _: Processes) -> None:
        (folder / "trainer.json").write_text("{}")
        raise OSError(28, "No space left on device", str(folder))

    checkpoints.write(1, good, ALONE)
    checkpoints.write_behind(2, full, ALONE)
    with pytest.raises(OSError, match=r"step-00000002 was not written: .*No space left on device"):
        checkpoints.wait()
    checkpoints.wait()
    assert checkpoints.newest_whole(print) == 1


def test_tensors_are_written_one_by_one(tmp_path: Path) -> None:
    """Of any type and shape, as safetensors that others read, each asked for once and by name."""
    kinds = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.float64]
    tensors = {f"x{i}": torch.arange(3 * i + 1).to(kind) for i, kind in enumerate(kinds)}
    tensors |= {"none": torch.zeros(0, 4), "one": torch.tensor(2.5), "t": torch.randn(3, 5).T}
    asked = []

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(tensor)
        return tensor

    path = tmp_path / "tensors"
    write_tensors(path, tensors, {"step": "4"}, whole)
    assert [t.shape for t in asked] == [tensors[name].shape for name in sorted(tensors)]
    assert same(load_file(path), tensors)
    header, read = read_tensors(path)
    assert header == {"step": "4"}
    assert same(read, tensors)
    with safe_open(path, framework="pt") as file:
        assert len(file.metadata()["checksum"]) == 32
    flip(path)
    with pytest.raises(ValueError, match="its checksum differs"):
        read_tensors(path)


def test_layers_travel_in_halves(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 the weights that a layer computes with are bf16, the embedding beside the layers is
    not, and what is stored, reduced and remembered is float32."""
    seen: dict[str, set[torch.dtype]] = {"layer": set(), "embedding": set()}
    with one_sharded_process(monkeypatch) as group:
        config = replace(CONFIG, precision="bf16")
        execution = Execution(sharding="fsdp")
        learner = Learner(model_config(), store.split("train"), config, execution, group)
        layer, embedding = learner.model.layers[0], learner.model.embedding
        forward = layer.forward

        def noted(*args: object) -> object:
            seen["layer"] |= {parameter.dtype for parameter in layer.parameters()}
            seen["embedding"].add(embedding.weight.dtype)
            return forward(*args)

        monkeypatch.setattr(layer, "forward", noted)
        figures = learner.take_step()
        assert seen == {"layer": {torch.bfloat16}, "embedding": {torch.float32}}
        stored = [*learner.model.parameters(), *learner.optimizer.state_dict()["state"][0].values()]
        assert {tensor.dtype for tensor in stored} == {torch.float32}
        assert {t.dtype for s in learner.states for m in s.layers for t in m} == {torch.float32}
    alone = Learner(model_config(), store.split("train"), config, Execution(), ALONE)
    assert figures["nats"] == pytest.approx(alone.take_step()["nats"], rel=1e-3)


@pytest.mark.slow
def test_two_processes_take_over_from_one_and_give_back(
    store: TokenStore, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One whole process, then two that are sharded, whose last checkpoint is damaged in the shard
    of one, then one again, from the checkpoint of the two before that."""
    path = str(store.path)
    work("melodi", "ddp", 6, path, str(tmp_path / "one"), False)
    work("melodi", "ddp", 2, path, str(tmp_path / "run"), False)
    launch(2, "melodi", "fsdp", 6, path, str(tmp_path / "run"), True)
    assert_close(tmp_path / "one", tmp_path / "run")
    last = tmp_path / "run" / "checkpoints" / "step-00000006"
    shards = sorted((last / "sharded").iterdir())
    assert [shard.name[:11] for shard in shards] == ["shard-00001", "shard-00002"]
    assert (last.with_name("step-00000003") / "sharded").is_dir()
    flip(shards[1])
    capfd.readouterr()
    work("melodi", "ddp", 6, path, str(tmp_path / "run"), True)
    assert "after step 3" in capfd.readouterr().err
    assert_close(tmp_path / "one", tmp_path / "run")
