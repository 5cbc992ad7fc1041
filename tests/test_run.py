"""Run folders: what is refused, what damage is noticed, and what a run says of itself."""

import json
import os
import pickle
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import ALONE, CONFIG, flip, make_store, model_config, same, start, weights

import melodi
from melodi import run as run_module
from melodi.config.checks import from_dict
from melodi.config.training import Execution, OptimizerConfig, TrainConfig
from melodi.data.prepare import prepare
from melodi.data.store import TokenStore
from melodi.evaluation.record import evaluate_run, write_record
from melodi.files import locked, write_text
from melodi.run import Run
from melodi.training import reporting
from melodi.training.distributed import device_of
from melodi.training.learner import Learner
from melodi.training.trainer import Trainer, train


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return make_store(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def trained(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, not to be changed."""
    run = tmp_path_factory.mktemp("runs") / "run"
    train(run, store, model_config(), CONFIG, Execution(keep=2), ALONE, preset="tiny")
    return run


@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Path:
    """A finished run, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def resume(run: Path, store: TokenStore, **changes: object) -> None:
    train(run, store, model_config(), replace(CONFIG, **changes), Execution(), ALONE, resume=True)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


BAD = [
    *[(Execution(), {name: bad}) for name in ("keep", "log_every") for bad in (0, -1)],
    *[
        (CONFIG, {name: bad})
        for name in ("steps", "rows", "turns", "segment_windows", "accumulate", "save_every")
        for bad in (0, -3, 1.5, "8", None, True)
    ],
    *[(CONFIG, {name: 0}) for name in ("validate_every", "validation_tokens", "horizon")],
    *[(CONFIG, {"clip": bad}) for bad in (-1.0, float("nan"), float("inf"), "1", None)],
    *[(CONFIG, {"seed": bad}) for bad in (-1, 1 << 24, 0.5)],
    (CONFIG, {"rows": 10**9}),
    (CONFIG, {"precision": "fp8"}),
    (CONFIG, {"optimizer": None}),
    (Execution(), {"sharding": "tensor"}),
    (Execution(), {"compile": 1}),
    *[(CONFIG.optimizer, {"peak": bad}) for bad in (0.0, -1.0, float("nan"), float("inf"), "1")],
    *[(CONFIG.optimizer, {"warmup": bad}) for bad in (-1, 2.5)],
    *[(CONFIG.optimizer, {"betas": bad}) for bad in ((0.9,), (0.9, float("nan")), 0.9)],
    *[(CONFIG.optimizer, {"weight_decay": bad}) for bad in (-0.1, float("nan"))],
]


@pytest.mark.parametrize(("config", "change"), BAD, ids=[str(change) for _, change in BAD])
def test_bad_values_are_refused_by_name(config: object, change: dict[str, object]) -> None:
    """Zero, negative, not finite, or of another type: refused when the config is made."""
    (name,) = change
    with pytest.raises(ValueError, match=rf"\b{name}=.* (must be|is unknown|is not between)"):
        replace(config, **change)  # type: ignore[type-var]


def test_any_seed_and_step_that_is_allowed_can_be_used(store: TokenStore) -> None:
    """The largest of both fit into the 64 bits that torch takes."""
    config = replace(CONFIG, seed=(1 << 24) - 1, steps=(1 << 28) - 1)
    learner = Learner(model_config(), store.split("train"), config, Execution(), ALONE)
    learner.step = config.steps - 1
    learner.take_step()


def test_configs_survive_json() -> None:
    """What is written comes back equal; no field is unknown, and none is missing."""
    values = json.loads(json.dumps(CONFIG, default=vars))
    assert from_dict(TrainConfig, values) == CONFIG
    with pytest.raises(ValueError, match="has no field 'step': did you mean 'steps'"):
        from_dict(TrainConfig, {**values, "step": 3})
    with pytest.raises(ValueError, match="OptimizerConfig lacks the field 'peak'"):
        from_dict(OptimizerConfig, {"name": "adamw"})


DAMAGED_CONFIGS = {
    "is not JSON": lambda config: "",
    "lacks 'model'": lambda config: "[]",
    "lacks 'train'": lambda config: json.dumps({"model": config["model"]}),
    "lacks 'data.path'": lambda config: json.dumps({**config, "data": []}),
    "lacks the field 'width'": lambda config: json.dumps(
        {**config, "model": {k: v for k, v in config["model"].items() if k != "width"}}
    ),
    "ModelConfig has no field 'wdith'": lambda config: json.dumps(
        {**config, "model": {**config["model"], "wdith": 3}}
    ),
    "must be an object": lambda config: json.dumps({**config, "train": []}),
    "TrainConfig has no field 'stpes'": lambda config: json.dumps(
        {**config, "train": {**config["train"], "stpes": 3}}
    ),
    "OptimizerConfig has no field 'rate'": lambda config: json.dumps(
        {**config, "train": {**config["train"], "optimizer": {"rate": 1}}}
    ),
    "steps='8' must be a whole number": lambda config: json.dumps(
        {**config, "train": {**config["train"], "steps": "8"}}
    ),
}


@pytest.mark.parametrize("message", DAMAGED_CONFIGS)
def test_a_damaged_config_is_named(message: str, finished: Path) -> None:
    path = finished / "config.json"
    path.write_text(DAMAGED_CONFIGS[message](json.loads(path.read_text())))
    with pytest.raises(ValueError, match=rf"config\.json .*{message}"):
        Run(finished).configs()


DAMAGED_WEIGHTS = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[:-10],
    "of another kind": lambda data: pickle.dumps({"a": 1}),
    "flipped at the end": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "flipped in the middle": lambda data: data[:5000] + bytes([data[5000] ^ 64]) + data[5001:],
}


@pytest.mark.parametrize("damage", DAMAGED_WEIGHTS)
def test_damaged_weights_are_not_loaded(damage: str, finished: Path) -> None:
    """The weights for use carry a checksum of their own."""
    path = finished / "best.safetensors"
    path.write_bytes(DAMAGED_WEIGHTS[damage](path.read_bytes()))
    with pytest.raises(ValueError, match=r"best\.safetensors is (damaged|not a whole)"):
        melodi.load(finished)


def test_weights_without_a_checksum_are_taken(finished: Path) -> None:
    """Weights may come from elsewhere, whose files have none."""
    tensors = load_file(finished / "best.safetensors")
    save_file(tensors, finished / "best.safetensors")
    assert same(melodi.load(finished).state_dict(), tensors)


def test_weights_of_another_shape_are_named(finished: Path) -> None:
    save_file({"embedding.weight": torch.zeros(2, 2)}, finished / "odd.safetensors")
    with pytest.raises(ValueError, match=r"odd\.safetensors does not fit the model"):
        melodi.load(finished, "odd.safetensors")


def test_another_tokenizer_is_refused(finished: Path, tmp_path: Path) -> None:
    """One that has strayed into the run folder is not the one that the run was trained with."""
    (tmp_path / "text.txt").write_text("another text " * 99)
    other = prepare([tmp_path / "text.txt"], tmp_path / "other", vocab_size=257, workers=1)
    other.tokenizer.save(finished)
    with pytest.raises(ValueError, match="is not the one that the run was trained with"):
        melodi.load(finished)


@pytest.mark.parametrize("name", ["model.safetensors", "notes.txt", "tokenizer.json"])
def test_a_run_begins_in_a_folder_of_its_own(name: str, store: TokenStore, tmp_path: Path) -> None:
    """Whatever else is there stays as it is."""
    (tmp_path / name).write_text("precious")
    with pytest.raises(ValueError, match=f"holds {name} and no run: choose a new or empty folder"):
        train(tmp_path, store, model_config(), CONFIG, Execution(), ALONE)
    assert contents(tmp_path) == {name: b"precious"}


def test_a_store_is_no_place_for_a_run(store: TokenStore) -> None:
    before = contents(store.path)
    with pytest.raises(ValueError, match=r"store holds .* and no run"):
        train(store.path, store, model_config(), CONFIG, Execution(), ALONE)
    assert contents(store.path) == before


def test_a_run_that_failed_before_its_first_step_can_be_begun_again(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same command, or a corrected one; a run that has taken steps is never begun again."""

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "take_step", broken)
        with pytest.raises(RuntimeError):
            train(tmp_path / "run", store, model_config(), CONFIG, Execution(), ALONE)
    config = replace(CONFIG, steps=2)
    train(tmp_path / "run", store, model_config(), config, Execution(), ALONE)
    assert Run(tmp_path / "run").configs()[1] == config
    with pytest.raises(ValueError, match="already holds a run: continue it with --resume"):
        train(tmp_path / "run", store, model_config(), config, Execution(), ALONE)


def test_a_kill_while_a_run_is_created(finished: Path, store: TokenStore) -> None:
    """What is missing is made up for when the run is resumed."""
    expected = weights(finished)
    for name in ("environment.json", "tokenizer_bytes.json", "metrics.jsonl", "best.safetensors"):
        (finished / name).unlink()
    (finished / "model.safetensors").unlink()
    shutil.rmtree(finished / "checkpoints")
    resume(finished, store)
    assert same(weights(finished), expected)
    assert melodi.load(finished).tokenizer.vocab_size == 257
    assert (finished / "environment.json").exists()


def test_a_kill_behind_the_last_checkpoint(finished: Path, store: TokenStore) -> None:
    """The weights for use are written again when a finished run is resumed."""
    expected = weights(finished)
    (finished / "model.safetensors").unlink()
    resume(finished, store)
    assert same(weights(finished), expected)


def test_one_process_at_a_time_works_in_a_run(finished: Path, store: TokenStore) -> None:
    before = contents(finished)
    with locked(finished), pytest.raises(ValueError, match="another process is working in"):
        resume(finished, store)
    assert contents(finished) == before


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.json", "checksums.json"])
def test_when_every_checkpoint_is_damaged_nothing_is_touched(
    name: str, finished: Path, store: TokenStore
) -> None:
    """The run stops and says what is wrong with each; it does not start from the beginning."""
    for step in (6, 8):
        flip(finished / "checkpoints" / f"step-{step:08}" / name, place=3)
    before = contents(finished)
    with pytest.raises(ValueError, match=r"every checkpoint .* is damaged \(step-00000008: .*06: "):
        resume(finished, store)
    assert contents(finished) == before


def test_damaged_checkpoints_are_set_aside(finished: Path, store: TokenStore) -> None:
    """They are kept for inspection, and new ones are not thrown away for them."""
    expected = weights(finished)
    newest = finished / "checkpoints" / "step-00000008"
    (newest / "checksums.json").write_text("[]")
    resume(finished, store)
    kept = {path.name for path in newest.parent.iterdir()}
    assert kept == {"step-00000006", "step-00000008", "step-00000008.damaged"}
    assert same(weights(finished), expected)


def test_metrics_after_a_stop_cover_as_many_steps(store: TokenStore, tmp_path: Path) -> None:
    """Each line at an interval is that of a run that never stopped, wherever it stopped."""
    every = Execution(log_every=4)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, store, model_config(), CONFIG, every, ALONE)
    for steps in (3, 5, 8):
        config = replace(CONFIG, steps=steps, horizon=8)
        train(parts, store, model_config(), config, every, ALONE, resume=steps > 3)

    def logged(run: Path) -> list[list[float]]:
        records = [r for r in Run(run).read_metrics() if "loss" in r]
        return [[r[key] for key in ("step", "loss", "tokens", "epoch")] for r in records]

    assert logged(whole) == logged(parts)
    assert [step for step, *_ in logged(whole)] == [4, 8]
    # Where it was to stop on the way is forgotten: it can be repeated, and resumed, as a whole.
    assert Run(parts).configs()[1].steps == 8


def test_a_run_that_goes_on_to_less_keeps_its_end(store: TokenStore, tmp_path: Path) -> None:
    """--steps may stop a run on the way; without it the run goes on to where it was to end."""
    run = tmp_path / "run"
    train(run, store, model_config(), replace(CONFIG, steps=3, horizon=8), Execution(), ALONE)
    before = Run(run).read_metrics()
    resume(run, store, steps=2, horizon=8)  # is done already
    assert Run(run).configs()[1].steps == 3
    assert Run(run).read_metrics() == before


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def test_files_of_a_run_are_json_for_strict_readers(store: TokenStore, tmp_path: Path) -> None:
    """Before the first validation there is no best loss; it is null, and comes back as none."""
    trainer = start(tmp_path / "run", store)
    trainer.learner.take_step()
    trainer.save()
    trainer.run.log({"step": 1, "loss": float("nan")})
    for path in [*(tmp_path / "run").rglob("*.json"), tmp_path / "run" / "metrics.jsonl"]:
        json.loads(path.read_text(), parse_constant=refuse)
    again = Trainer(trainer.run, store, model_config(), CONFIG, Execution(), ALONE)
    again.restore()
    assert again.best == float("inf")


def test_files_of_a_run_can_be_read_by_all(trained: Path) -> None:
    """As far as the umask allows."""
    umask = os.umask(0)
    os.umask(umask)
    for path in trained.rglob("*.safetensors"):
        if "memory" not in path.name:
            assert path.stat().st_mode & 0o777 == 0o666 & ~umask, path


def test_a_cut_line_of_metrics(finished: Path) -> None:
    """The last line may have been cut by a kill; any other is damage, with its number."""
    metrics = Run(finished).metrics
    records = Run(finished).read_metrics()
    with metrics.open("a") as file:
        file.write('{"step": 9, "lo')
    assert Run(finished).read_metrics() == records
    for damage in (b'{"step": 9, "lo\n', b"{}\n", b"[]\n", b'{"step": "9"}\n', b'{"step": \xff}\n'):
        metrics.write_bytes(b'{"step": 1}\n' + damage)
        with pytest.raises(ValueError, match=r"metrics.jsonl is damaged in line 2 \(.*remove"):
            Run(finished).read_metrics()
    Run(finished).rewind(1)
    assert Run(finished).read_metrics() == [{"step": 1}]


def test_a_dialect_that_has_changed(finished: Path) -> None:
    """Weights are not read as those of another function; where training started does not count."""
    path = finished / "config.json"
    config = json.loads(path.read_text())
    config["answers"] |= {"mixer_start": "other", "activation": "gelu", "ffn_bias": True}
    path.write_text(json.dumps(config))
    meant = f"{config['model']['dialect']},activation=gelu,ffn_bias=true"
    with pytest.raises(ValueError, match=re.escape(f"write {meant!r} there as its dialect")):
        melodi.load(finished)
    config["model"]["dialect"] = meant.replace(",ffn_bias=true", "")
    config["answers"]["ffn_bias"] = False
    path.write_text(json.dumps(config))
    assert melodi.load(finished).config.answers.activation == "gelu"


def test_a_store_that_has_moved(finished: Path, store: TokenStore, tmp_path: Path) -> None:
    """The run says that it is gone; resumed with its new place, it remembers that."""
    config = json.loads((finished / "config.json").read_text())
    config["data"]["path"] = str(tmp_path / "gone")
    (finished / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="gone does not exist; say with --data where it is"):
        Run(finished).open_store()
    resume(finished, store)
    assert Run(finished).open_store().path == store.path.resolve()


def test_another_preset_is_refused(finished: Path, store: TokenStore) -> None:
    args = (finished, store, model_config(), CONFIG, Execution(), ALONE)
    train(*args, resume=True, preset="tiny")
    with pytest.raises(ValueError, match="--preset large differs from the run's tiny"):
        train(*args, resume=True, preset="large")


def test_an_evaluation_says_what_it_is_about(
    finished: Path, store: TokenStore, tmp_path: Path
) -> None:
    """Store, weights, step and limit; and only a whole split of the run's own store, in its own
    precision, counts as the run's evaluation."""
    run, model = Run(finished), melodi.load(finished)
    whole = evaluate_run(model, run, store, "train", rows=2)
    assert write_record(run, whole) == finished / "eval-train.json"
    assert whole["weights"] == "best.safetensors"
    assert whole["step"] in (3, 6, 8)
    assert whole["store"] == str(store.path.resolve())
    assert whole["max_tokens"] is None
    part = evaluate_run(model, run, store, "train", max_tokens=20)
    (tmp_path / "other.txt").write_text("another book " * 9)
    other = prepare([tmp_path / "other.txt"], tmp_path / "other", tokenizer="bytes", workers=1)
    others = evaluate_run(model, run, other, "train")
    half = evaluate_run(model, run, store, "train", precision="bf16")
    last = evaluate_run(
        melodi.load(finished, "model.safetensors"), run, store, "train", weights="model.safetensors"
    )
    assert (last["weights"], last["step"]) == ("model.safetensors", 8)
    assert write_record(run, part) == finished / "partial-eval-train-20-tokens.json"
    assert write_record(run, half) == finished / "eval-train-bf16.json"
    # Many stores are called alike: the name says which of them.
    elsewhere = {**others, "store": str(tmp_path / "elsewhere" / "other")}
    places = {write_record(run, record).name for record in (others, elsewhere)}
    assert len(places) == 2
    assert all(name.startswith("partial-eval-train-other-") for name in places)
    assert json.loads((finished / "eval-train.json").read_text()) == whole
    for bad in ({"rows": -2}, {"max_tokens": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}=.* must be at least 1"):
            evaluate_run(model, run, store, "train", **bad)


def test_a_run_introduces_itself(
    store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Size, memory, device, tokens and passes before the first step; and a warning when there are
    more rows than documents."""
    trainer = start(tmp_path / "run", store, steps=1, rows=32)
    trainer.run_all()
    said = capsys.readouterr().err
    model = trainer.learner.model
    assert f"{model.num_parameters:,} parameters, 228 floats of memory per document, on cpu" in said
    assert "1 steps of 384 tokens (32 rows of 2 windows of 6), 384 tokens in all" in said
    assert "rows=32 exceed the 22 training documents" in said


def test_without_a_terminal_there_are_plain_lines(
    store: TokenStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As often as the clock says, with the loss and the expected end."""
    monkeypatch.setattr(reporting, "LINE_SECONDS", 0.0)
    start(tmp_path / "run", store).run_all()
    said = capsys.readouterr().err
    for step in range(1, 9):
        assert f"step {step} of 8: loss " in said
    assert "tok/s, ends in 0 s, at " in said


def test_durations() -> None:
    seconds = (45, 100, 19 * 60, 5 * 3600 + 120, 72 * 3600)
    expected = ["45 s", "2 min", "19 min", "5 h 2 min", "3.0 days"]
    assert [reporting.duration(s) for s in seconds] == expected


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "meta", "nonsense:1"])
def test_devices_that_are_not_there(name: str) -> None:
    with pytest.raises(ValueError, match=f"device='{name}' is not on this machine: choose cpu"):
        device_of(name)


def test_only_files_are_replaced(tmp_path: Path) -> None:
    """A link stays one, and what it points to is written; a pipe or a folder is left alone."""
    (target := tmp_path / "target").write_text("old")
    (link := tmp_path / "link").symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    os.mkfifo(pipe := tmp_path / "pipe")
    for place in (pipe, tmp_path):
        with pytest.raises(ValueError, match="is not a file: choose another place"):
            write_text(place, "new")
    assert pipe.is_fifo()


def test_the_commit_is_that_of_our_own_checkout(tmp_path: Path) -> None:
    """Not that of a project in which the package lies untracked; a plus only for tracked files."""

    def git(*command: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(
            ["git", "-C", str(tmp_path), *who, *command], check=True, capture_output=True
        )

    ours = tmp_path / "run.py"
    ours.write_text("1")
    (tmp_path / "theirs").write_text("1")
    git("init")
    git("add", "theirs")
    git("commit", "-m", "one")
    assert run_module.commit(ours) is None
    git("add", "run.py")
    git("commit", "-m", "two")
    (tmp_path / "untracked").write_text("1")
    commit = run_module.commit(ours)
    assert commit is not None
    assert len(commit) == 40
    ours.write_text("2")
    assert run_module.commit(ours) == commit + "+"
