"""Training: exact to resume, whatever kills it; many processes take the same step as one."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import ALONE, CONFIG, flip, make_store, model_config, same, start, weights
from zoo import KINDS

import melodi
from melodi.config.training import Execution, OptimizerConfig
from melodi.data.prepare import prepare
from melodi.data.store import Documents, TokenStore
from melodi.evaluation.documents import Evaluation, choose, evaluate
from melodi.evaluation.tallies import by_position
from melodi.training.checkpoint import Checkpoints
from melodi.training.distributed import Processes
from melodi.training.learner import Learner
from melodi.training.reporting import Meter
from melodi.training.trainer import Trainer, train


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return make_store(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("kind", ["melodi", "block-recurrent", "memorizing"])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_resuming_equals_never_stopping(
    kind: str, optimizer: str, store: TokenStore, tmp_path: Path
) -> None:
    """Law 10: weights, optimizer, memory, data position and metrics, bit for bit."""
    config = replace(
        CONFIG, optimizer=OptimizerConfig(optimizer, peak=1e-2, floor=1e-3, warmup=2), accumulate=2
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, store, model_config(kind), config, Execution(), ALONE)
    train(parts, store, model_config(kind), replace(config, steps=3, horizon=8), Execution(), ALONE)
    for steps in (5, 8):
        longer = replace(config, steps=steps, horizon=8)
        train(parts, store, model_config(kind), longer, Execution(), ALONE, resume=True)
    assert same(weights(whole), weights(parts))
    last = "checkpoints/step-00000008"
    for name in ("optimizer.safetensors", "memory-rows-000000-000001.safetensors"):
        assert same(load_file(whole / last / name), load_file(parts / last / name))
    ours, theirs = (json.loads((run / last / "trainer.json").read_text()) for run in (whole, parts))
    assert ours["rows"] == theirs["rows"]
    assert losses(whole) == losses(parts)


def losses(run: Path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        (r["step"], r["validation_loss"])
        for r in records
        if r["step"] in (6, 8) and "validation_loss" in r
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_changes_no_step(kind: str, store: TokenStore) -> None:
    """Rows in one part or in four give the same gradients, in a segment in which some rows start a
    document and others go on."""
    grads = []
    for parts in (1, 4):
        config = replace(CONFIG, accumulate=parts)
        model = replace(model_config(kind), dropout=0.0)
        learner = Learner(model, store.split("train"), config, Execution(), ALONE)
        batch = learner.batches.next()
        _, learner.states = learner._gradients(batch)
        while batch.starts_B.all() or not batch.starts_B.any():
            batch = learner.batches.next()
        learner.model.zero_grad()
        learner._gradients(batch)
        grads.append([p.grad for p in learner.model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_a_damaged_checkpoint_is_passed_over(
    store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Truncated or changed files are noticed by checksum; the checkpoint before is used."""
    run = tmp_path / "run"
    train(run, store, model_config(), CONFIG, Execution(), ALONE)
    expected = weights(run)
    newest = run / "checkpoints" / "step-00000008" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-10])
    older = run / "checkpoints" / "step-00000006" / "optimizer.safetensors"
    flip(older)
    train(run, store, model_config(), CONFIG, Execution(), ALONE, resume=True)
    said = capsys.readouterr().err
    assert "step-00000008 is damaged (model.safetensors does not match" in said
    assert "step-00000006 is damaged (optimizer.safetensors does not match" in said
    assert "after step 4" in said
    assert same(weights(run), expected)


def begun(run: Path, step: int) -> bool:
    """Whether a checkpoint of this step or a later one exists, whole or not."""
    names = [path.name for path in run.glob("checkpoints/step-*")]
    return any(int(name[5:13]) >= step for name in names)


@pytest.mark.slow
def test_kill_at_any_moment(store: TokenStore, tmp_path: Path) -> None:
    """kill -9 in the midst of saves, and the run ends with the weights of one that was never
    killed."""
    command = [
        *(sys.executable, "-m", "melodi", "train", "--preset", "laptop-melodi"),
        *("--data", str(store.path), "--steps", "12", "--save-every", "1", "--rows", "4"),
        *("--model.width", "16", "--model.window", "16", "--model.short-term-tokens", "4"),
        *("--validate-every", "5", "--validation-tokens", "50", "--threads", "1"),
    ]
    subprocess.run([*command, "--out", str(tmp_path / "whole")], check=True, capture_output=True)
    resume, kills = [*command, "--out", str(tmp_path / "killed"), "--resume"], 0
    for step in (1, 4, 8):  # as soon as its checkpoint is being written, or is there
        with subprocess.Popen(resume, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and not begun(tmp_path / "killed", step):
                time.sleep(0.001)
            kills += process.poll() is None
            process.kill()
    assert kills
    subprocess.run(resume, check=True, capture_output=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))


def test_a_kill_in_the_middle_of_a_save(store: TokenStore, tmp_path: Path) -> None:
    """What was half written is ignored, and cleared away by the next save."""
    trainer = start(tmp_path / "run", store)
    trainer.run_all()
    half = tmp_path / "run" / "checkpoints" / "step-00000010.partial"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    again = Trainer(trainer.run, store, model_config(), CONFIG, Execution(), ALONE)
    again.restore()
    assert again.step == 8
    again.save()
    assert not half.exists()


def test_the_last_few_checkpoints_are_kept(store: TokenStore, tmp_path: Path) -> None:
    start(tmp_path / "run", store, save_every=1).run_all()
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000006", "step-00000007", "step-00000008"]


def test_a_full_disk_leaves_the_last_checkpoint(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that fails is an OSError, and resuming goes on from the save before."""
    trainer = start(tmp_path / "run", store)
    for _ in range(2):
        trainer.learner.take_step()
    trainer.save()

    def full_disk(path: Path, *_: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    trainer.learner.take_step()
    with monkeypatch.context() as broken:
        broken.setattr(melodi.training.snapshot, "write_tensors", full_disk)
        with pytest.raises(OSError, match="No space left"):
            trainer.save()
    again = Trainer(trainer.run, store, model_config(), CONFIG, Execution(), ALONE)
    again.restore()
    assert again.step == 2


def test_ctrl_c_saves_and_stops(store: TokenStore, tmp_path: Path) -> None:
    """One SIGINT ends the run after the step with a checkpoint; resuming completes it."""
    start(tmp_path / "whole", store).run_all()
    trainer = start(tmp_path / "run", store)
    take_step = trainer.learner.take_step

    def interrupted_step() -> dict[str, float]:
        if trainer.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return take_step()

    trainer.learner.take_step = interrupted_step  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt, match="stopped after step 5"):
        trainer.run_all()
    train(tmp_path / "run", store, model_config(), CONFIG, Execution(), ALONE, resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "run"))


def test_steps_that_are_not_finite_are_skipped(store: TokenStore, tmp_path: Path) -> None:
    """Weights and memory stay as they were, the skip is counted, and after five the run stops with
    the last good checkpoint intact."""
    trainer = start(tmp_path / "run", store, save_every=9)
    learner = trainer.learner
    learner.take_step()
    trainer.save()
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    gradients = learner._gradients

    def poisoned(*args: object) -> object:
        result = gradients(*args)
        next(iter(learner.model.parameters())).grad.fill_(float("nan"))
        return result

    learner._gradients = poisoned  # type: ignore[method-assign]
    learner.take_step()
    assert learner.skipped == 1
    assert same(before, learner.model.state_dict())
    assert all(t.isfinite().all() for state in learner.states for m in state.layers for t in m)
    with pytest.raises(ValueError, match=r"5 steps in a row, up to step 6.*step-00000001"):
        trainer.run_all()
    assert Checkpoints(tmp_path / "run" / "checkpoints", keep=3).newest_whole(print) == 1


def test_a_run_goes_on_after_a_skip(store: TokenStore, tmp_path: Path) -> None:
    """A checkpoint that is written between a skip and the next line of metrics can be resumed; the
    line is of the steps that were taken."""
    trainer = start(tmp_path / "run", store)
    for nats in (float("nan"), 8.0):
        step = trainer.learner.take_step()
        trainer.meter.add({**step, "nats": nats, "predictions": 4})
    trainer.save()
    again = Trainer(trainer.run, store, model_config(), CONFIG, Execution(), ALONE)
    again.restore()
    assert again.meter.record()["loss"] == 2.0
    again.meter.add(again.learner.take_step())
    assert math.isfinite(again.meter.record()["loss"])
    assert math.isnan(Meter().record()["loss"])


REFUSED = {
    "already holds a run": lambda run, store: train(
        run, store, model_config(), CONFIG, Execution(), ALONE
    ),
    "beyond the schedule of this run, which ends at step 8": lambda run, store: train(
        run, store, model_config(), replace(CONFIG, steps=20), Execution(), ALONE, resume=True
    ),
    "rows=8 differs from the run's 4": lambda run, store: train(
        run, store, model_config(), replace(CONFIG, rows=8), Execution(), ALONE, resume=True
    ),
    "the model differs": lambda run, store: train(
        run, store, model_config(branching=False), CONFIG, Execution(), ALONE, resume=True
    ),
    "vocab_size=23 is too small": lambda run, store: train(
        run / "new", store, KINDS["melodi"], CONFIG, Execution(), ALONE
    ),
    "accumulate=3 does not divide": lambda run, store: train(
        run / "new", store, model_config(), replace(CONFIG, accumulate=3), Execution(), ALONE
    ),
    "rows=4 cannot be shared by 3": lambda *_: Processes(0, 3, torch.device("cpu")).share(4),
}


@pytest.fixture(scope="module")
def finished(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    train(run, store, model_config(), CONFIG, Execution(), ALONE)
    return run


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message: str, finished: Path, store: TokenStore) -> None:
    """Nothing is overwritten or continued differently, and the line says why."""
    with pytest.raises(ValueError, match=message):
        REFUSED[message](finished, store)


def test_other_documents_are_refused(finished: Path, tmp_path: Path) -> None:
    """A run is resumed on the documents that it began with, not on others of the same tokenizer."""
    (tmp_path / "other.txt").write_text("another book " * 9)
    other = prepare([tmp_path / "other.txt"], tmp_path / "store", tokenizer="bytes", workers=1)
    with pytest.raises(ValueError, match=r"has other documents \(train, .*\) than the run began"):
        train(finished, other, model_config(), CONFIG, Execution(), ALONE, resume=True)


def test_what_is_left_of_a_run_is_not_trained_over(
    finished: Path, store: TokenStore, tmp_path: Path
) -> None:
    """Without its checkpoints a run cannot go on, and is not begun anew over its weights and
    losses; one that was killed before its first checkpoint begins again."""
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    shutil.rmtree(copy / "checkpoints")
    before = {path.name: path.read_bytes() for path in copy.iterdir() if path.is_file()}
    resume = (copy, store, model_config(), CONFIG, Execution(), ALONE, True)
    with pytest.raises(
        ValueError, match=r"was trained, to step \d+, and has no checkpoint to go on"
    ):
        train(*resume)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="put them back, or begin a new run"):
        train(*resume)
    del before["model.safetensors"]
    after = {path.name: path.read_bytes() for path in copy.iterdir() if path.is_file()}
    after.pop(".lock", None)
    before.pop(".lock", None)
    assert after == before
    (copy / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n')
    train(*resume)
    assert (copy / "model.safetensors").read_bytes() == (
        finished / "model.safetensors"
    ).read_bytes()


def test_training_learns_and_the_gate_moves(store: TokenStore, tmp_path: Path) -> None:
    """The loss falls, and the memory's vital signs are reported."""
    config = replace(CONFIG, steps=30, validate_every=30, save_every=30)
    train(tmp_path / "run", store, model_config(), config, Execution(log_every=5), ALONE)
    records = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    steps = [record for record in records if "loss" in record]
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    assert steps[-1]["gate/1"] != steps[0]["gate/1"]
    assert 0 <= steps[-1]["data_share"] < 1
    assert 0 < records[-1]["past"] < 1


def test_execution_changes_no_step(store: TokenStore, tmp_path: Path) -> None:
    """Windows computed again give the same weights; TensorBoard is written where asked for."""
    config = replace(CONFIG, steps=3)
    train(tmp_path / "plain", store, model_config(), config, Execution(), ALONE)
    execution = Execution(checkpoint_windows=True, tensorboard=True)
    train(tmp_path / "again", store, model_config(), config, execution, ALONE)
    a, b = weights(tmp_path / "plain"), weights(tmp_path / "again")
    for name in a:
        torch.testing.assert_close(a[name], b[name])
    assert list((tmp_path / "again" / "tensorboard").iterdir())


def test_bf16_keeps_weights_and_memory_in_float32(store: TokenStore, tmp_path: Path) -> None:
    trainer = start(tmp_path / "run", store, precision="bf16", steps=3)
    trainer.run_all()
    learner = trainer.learner
    tensors = [*learner.model.parameters(), *learner.states[0].layers[1]]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    exact = start(tmp_path / "exact", store, steps=3)
    exact.run_all()
    for a, b in zip(learner.model.parameters(), exact.learner.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.05)


@pytest.mark.slow
def test_compiled_layers_train_alike(store: TokenStore, tmp_path: Path) -> None:
    """`--compile` ends with the weights of eager training, up to rounding."""
    config = replace(CONFIG, steps=2, validate_every=9, save_every=9)
    model = replace(model_config(), dropout=0.0, layers=("long",))
    train(tmp_path / "eager", store, model, config, Execution(), ALONE)
    train(tmp_path / "compiled", store, model, config, Execution(compile=True), ALONE)
    a, b = weights(tmp_path / "eager"), weights(tmp_path / "compiled")
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-4)


def test_a_run_can_be_loaded(finished: Path, store: TokenStore) -> None:
    """`load` gives the best weights, in evaluation mode, with the tokenizer."""
    model = melodi.load(finished)
    assert not model.training
    assert same(model.state_dict(), load_file(finished / "best.safetensors"))
    assert model.tokenizer.decode(model.tokenizer.encode("né")) == "né"
    with pytest.raises(FileNotFoundError, match="is not a run folder"):
        melodi.load(finished / "checkpoints")


@pytest.mark.parametrize("kind", ["melodi", "transformer-xl", "no-memory"])
def test_evaluation_counts_every_prediction_once(kind: str, store: TokenStore) -> None:
    """n - 1 predictions a document, tail included, at the nats of each document read alone."""
    torch.manual_seed(0)
    model = melodi.LanguageModel(model_config(kind)).eval()
    documents = store.split("train")
    positions = by_position()
    result = evaluate(model, documents, rows=3, segment_windows=2, tallies=[positions])
    nats, count = 0.0, 0
    for i in range(len(documents)):
        tokens = torch.from_numpy(documents[i].astype(np.int64))[None]
        with torch.inference_mode():
            loss, _ = model.loss(tokens[:, :-1], tokens[:, 1:], model.empty_state(1))
        nats += float(loss) * (tokens.size(1) - 1)
        count += tokens.size(1) - 1
    assert result.predictions == count
    assert result.nats == pytest.approx(nats, rel=1e-5)
    assert result.bytes == int(documents.num_bytes.sum())
    assert sum(bucket["predictions"] for bucket in positions.means()) == count
    dropped = evaluate(model, documents, rows=3, with_memory=False)
    assert dropped.predictions == count
    if kind == "no-memory":
        assert dropped.nats == pytest.approx(nats, rel=1e-5)
    else:
        assert dropped.nats != pytest.approx(nats, rel=1e-5)


def test_evaluations_add_up() -> None:
    """The parts of all processes, added, are the evaluation of one process in every field, also
    documents without a prediction and rows that never get one; and an array holds all of it."""
    torch.manual_seed(0)
    model = melodi.LanguageModel(model_config()).eval()
    random = np.random.default_rng(0)
    documents = Documents.in_memory([random.integers(0, 257, n) for n in (70, 1, 9, 30, 0, 2)])
    documents.num_bytes[:] = [100, 3, 20, 50, 2, 5]
    for chosen in (None, [0, 1, 3]):
        whole = evaluate(model, documents, chosen, rows=8)
        parts = [evaluate(model, documents, chosen, 8, mine=range(i, i + 2)) for i in (0, 2, 4, 6)]
        together = sum(parts, Evaluation())
        assert whole.documents == (6 if chosen is None else 3)
        assert whole.bytes == (180 if chosen is None else 153)
        assert parts[-1].documents == 0
        for field in dataclasses.fields(Evaluation):
            expected, found = (getattr(result, field.name) for result in (whole, together))
            assert type(found) is type(expected)
            np.testing.assert_allclose(found, expected, rtol=1e-6)
        again = Evaluation.from_array(whole.to_array().tolist())
        assert again == whole


def test_training_verifies_the_tokens(store: TokenStore, tmp_path: Path) -> None:
    """A store that is damaged is not trained on, and no run is begun."""
    bad = Path(shutil.copytree(store.path, tmp_path / "store"))
    tokens = bytearray((bad / "train.tokens").read_bytes())
    tokens[7] ^= 1
    (bad / "train.tokens").write_bytes(tokens)
    with pytest.raises(ValueError, match=r"train.tokens is damaged"):
        train(tmp_path / "run", TokenStore.open(bad), model_config(), CONFIG, Execution(), ALONE)
    assert not (tmp_path / "run").exists()


def test_training_without_validation_documents(tmp_path: Path) -> None:
    """A store with one document trains, says that there is nothing to validate on, and loads."""
    (tmp_path / "only.txt").write_text("a single document " * 9)
    lone = prepare([tmp_path / "only.txt"], tmp_path / "store", tokenizer="bytes", workers=1)
    train(tmp_path / "run", lone, model_config(), CONFIG, Execution(), ALONE)
    assert same(melodi.load(tmp_path / "run").state_dict(), weights(tmp_path / "run"))


def test_choose_takes_whole_documents(store: TokenStore) -> None:
    documents = store.split("train")
    assert choose(documents, None) == list(range(len(documents)))
    assert choose(documents, 1) == [0]
    chosen = choose(documents, int(documents.lengths[:3].sum()))
    assert chosen == [0, 1, 2]
