"""Memory can be learned: tiny models, trained here from nothing, recall what they read before; and
the tasks that they learn ask what they say they ask."""

import functools
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_cli import printed, refused
from test_reproduce import last_line
from tiny_runs import flip, make_store, start
from zoo import KINDS

from melodi import LanguageModel, ModelConfig
from melodi.cli import main
from melodi.config import PRESETS
from melodi.data.store import Documents
from melodi.evaluation.pages import Examples
from melodi.evaluation.recall import accuracy, forgetting, passkey_in_text
from melodi.evaluation.tasks import DIGITS, TASKS, Sizes, Task, task
from melodi.training import tiny
from melodi.training.tiny import Learned, learn, tiny_config

FACTS = task("facts", Sizes(window=8, windows=5, answers=4, facts=1))
MODELS = {
    name: ModelConfig(
        vocab_size=FACTS.vocabulary.size,
        width=32,
        num_heads=2,
        ffn_width=64,
        window=8,
        short_term_tokens=1,
        long_term_tokens=2,
        long_term_windows=5,
        memory_slots=40,
        layers=layers,
    )
    for name, layers in {
        "melodi": ("short", "long"),
        "short-term": ("short", "short"),
        "long-term": ("plain", "long-only"),
        "memorizing": ("xl", "memorizing"),
        "no-memory": ("plain", "plain"),
    }.items()
}


STEPS = {"short-term": 150, "no-memory": 20}
"""Of those that do not get there; the others stop when they do, after at most 200."""


@functools.cache
def trained(name: str) -> Learned:
    return learn(MODELS[name], FACTS, steps=STEPS.get(name, 200), seed=0, enough=0.1)


def farthest(name: str, with_memory: bool = True) -> float:
    """Right answers to questions for facts that were read three windows ago or more."""
    curve = accuracy(trained(name).model, FACTS, with_memory=with_memory)
    assert [point["distance"] for point in curve] == [1, 2, 3, 4]
    asked = sum(point["questions"] for point in curve[2:])
    return sum(point["accuracy"] * point["questions"] for point in curve[2:]) / asked


@pytest.mark.slow
@pytest.mark.parametrize("name", ["melodi", "long-term", "memorizing"])
def test_facts_are_recalled(name: str) -> None:
    """A trained tiny model recalls which of many facts it read up to four windows back, and cannot
    with its memory dropped: then it is no better than chance."""
    assert farthest(name) > 0.9
    assert farthest(name, with_memory=False) < 1.5 * FACTS.chance


@pytest.mark.slow
def test_melodi_recalls_farther_than_short_term_memory() -> None:
    """Melodi recalls across windows over which short-term memory alone, of the same size and with
    no fewer steps, has lost much of what it recalls from the window before; and a model without
    memory is at chance."""
    assert len(trained("melodi").losses) <= STEPS["short-term"]
    assert farthest("melodi") > farthest("short-term") + 0.15
    assert accuracy(trained("short-term").model, FACTS)[0]["accuracy"] > 2 * FACTS.chance
    assert abs(farthest("no-memory") - FACTS.chance) < 0.1


def read_by_hand(one: Task, tokens: list[int], question: int) -> tuple[int, int]:
    """The answer to the question whose last token stands there, and its distance in windows."""
    v, window = one.vocabulary, one.sizes.window
    if one.name in ("passkey", "copy"):
        begin = tokens.index(v.says) + 1
        if one.name == "passkey":
            place = tokens[question] - v.first_key
            assert 0 <= place < DIGITS
        else:
            place = question - tokens.index(v.asks)
        return tokens[begin + place], question // window
    found = None
    for i in range(question - 1):
        token = tokens[i]
        if v.first_fact <= token < v.first_fact + v.facts:
            key, value = divmod(token - v.first_fact, v.answers)
        else:
            key, value = token - v.first_key, tokens[i + 1]
            if tokens[i - 1] == v.asks or value >= v.answers:
                continue
        if key == tokens[question] - v.first_key:
            found = value, question // window - i // window
    assert found is not None
    return found


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(window=10, windows=3, answers=5, keys=3)])
def test_a_reader_finds_every_answer(name: str, sizes: Sizes) -> None:
    """Whoever reads a document up to a question knows the answer, and at the distance that is
    given; every distance is asked for, and nothing that was not said."""
    one = task(name, sizes)
    examples: Examples = one.make(np.random.default_rng(0), 64)
    assert examples.tokens_RT.shape == (64, sizes.window * sizes.windows)
    assert examples.tokens_RT.min() >= 0
    assert examples.tokens_RT.max() < one.vocabulary.size
    asked = np.argwhere(examples.targets_RT >= 0)
    assert len(asked) >= 64
    for row, place in asked:
        answer = read_by_hand(one, examples.tokens_RT[row].tolist(), int(place))
        assert answer == (examples.targets_RT[row, place], examples.distances_RT[row, place])
    found = np.unique(examples.distances_RT[examples.targets_RT >= 0])
    assert found.tolist() == list(range(1, sizes.windows))
    assert (examples.distances_RT[examples.targets_RT < 0] == -1).all()
    answers = np.bincount(examples.targets_RT[examples.targets_RT >= 0])
    assert len(answers) == one.vocabulary.answers
    assert answers.max() < 2.5 * answers.mean()


def test_tasks_follow_from_the_seed() -> None:
    """The same documents for the same seed, others for another."""
    for name in TASKS:
        a, b, c = (task(name).make(np.random.default_rng(seed), 4) for seed in (0, 0, 1))
        assert all(map(np.array_equal, a, b))
        assert not np.array_equal(a.tokens_RT, c.tokens_RT)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("laptop-")])
def test_every_kind_has_a_tiny_model(name: str) -> None:
    """It has the preset's kinds of layers, and every weight of it learns."""
    one = task("passkey", Sizes(windows=2))
    config = tiny_config(PRESETS[name], one)
    assert set(config.layers) == set(PRESETS[name].layers)
    assert bool(sum(config.memory_floats())) == bool(sum(PRESETS[name].memory_floats()))
    result, later = (learn(config, one, steps=steps, rows=4) for steps in (1, 2))
    assert result.losses == later.losses[:1]
    before, after = (dict(one.model.named_parameters()) for one in (result, later))
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) > 0.9 * len(before)


def test_learning_is_repeatable() -> None:
    """The same seed gives the same weights, and enough is enough."""
    a, b = (learn(MODELS["long-term"], FACTS, steps=2, rows=2).losses for _ in range(2))
    assert a == b
    assert a != learn(MODELS["long-term"], FACTS, steps=2, rows=2, seed=1).losses
    assert len(learn(MODELS["long-term"], FACTS, steps=20, rows=2, enough=99.0).losses) == 10
    with pytest.raises(ValueError, match="window=8 of the model is not window=16 of the task"):
        learn(replace(MODELS["melodi"], vocab_size=999), task("mqar"))
    with pytest.raises(ValueError, match=r"vocab_size=5 is too small for the task facts"):
        learn(replace(MODELS["melodi"], vocab_size=5), FACTS)


def documents(count: int, length: int) -> Documents:
    random = np.random.default_rng(0)
    return Documents.in_memory([random.integers(0, 20, length + i) for i in range(count)])


def small(kind: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(replace(KINDS[kind], vocab_size=257)).eval()


def test_without_memory_nothing_is_forgotten_or_remembered() -> None:
    """A window costs a model without memory the same whenever it is met."""
    for point in forgetting(small("no-memory"), documents(3, 80), (1, 2, 4, 8), rows=3):
        assert point["again"] == pytest.approx(point["first"], abs=1e-4)
        assert point["remembered"]["value"] == pytest.approx(0, abs=1e-4)


def test_knowing_the_document_is_not_remembering() -> None:
    """Windows of one document are alike, and unlike those of others: a cache of one window, which
    sees that, has not therefore remembered what it read eight windows ago."""
    model = small("transformer-xl")
    with torch.no_grad():  # attention to all tokens alike: what was seen most is predicted
        for layer in model.stack:
            layer.block.query.weight.zero_()
            layer.block.ffn.output.weight.zero_()
            torch.nn.init.eye_(layer.block.value.weight)
            torch.nn.init.eye_(layer.block.output.weight)
    own = [np.random.default_rng(i).integers(5 * i, 5 * i + 5, 1700) for i in range(4)]
    near, far = forgetting(model, Documents.in_memory(own), (1, 8), rows=4, probes=60)
    low, high = (far["remembered"][end] for end in ("low", "high"))
    assert low < 0 < high
    assert abs(far["remembered"]["value"]) < 0.1
    assert near["tokens"] == far["tokens"]


def test_meetings_leave_the_reading_alone() -> None:
    """The first meeting costs what plain reading costs, and the second what it costs to read on
    with the old window; the strange place costs what the window after next costs too soon; all
    documents are in all figures."""
    model, texts = small("melodi"), documents(3, 60)
    (point,) = forgetting(model, texts, (2,), rows=3, probes=1)
    window, tokens = model.config.window, torch.tensor(np.stack([texts[i][:60] for i in (2, 1, 0)]))
    place = 2  # the earliest from which two windows can be looked back
    with torch.inference_mode():
        plain = model.nats(tokens[:, :-1], tokens[:, 1:], model.empty_state(3)).nats_BT
        _, state = model(tokens[:, : place * window], model.empty_state(3))

        def costs(other: int) -> tuple[float, float]:
            """Of a window: where it belongs, and here."""
            span = slice(other * window, (other + 1) * window)
            shown = tokens[:, span.start : span.stop + 1]
            here = model.nats(shown[:, :-1], shown[:, 1:], state).nats_BT
            return plain[:, span][:, 1:].mean().item(), here[:, 1:].mean().item()

        (first, again), (later, ahead) = costs(place - 2), costs(place + 2)
    assert point["first"] == pytest.approx(first, rel=1e-4)
    assert point["again"] == pytest.approx(again, rel=1e-4)
    assert point["strange"] == pytest.approx(first + ahead - later, rel=1e-4)
    saved = first - again + ahead - later
    assert point["remembered"]["value"] == pytest.approx(saved, abs=1e-4)
    assert point["tokens"] == 3 * (window - 1)
    assert point["documents"] == 3
    assert point["remembered"]["low"] < point["remembered"]["high"]
    with pytest.raises(ValueError, match="the split has 1: choose another --split"):
        forgetting(model, documents(1, 60))
    with pytest.raises(ValueError, match="no two documents have 13 tokens"):
        forgetting(model, documents(2, 12))
    with pytest.raises(ValueError, match="the documents have 2 windows of 6 tokens"):
        forgetting(model, documents(2, 14))


def test_passkeys_in_text() -> None:
    """A model without memory is at chance; the two longest documents serve where none is as long
    as wanted, and each is asked for each of its numbers."""

    class Letters:
        def encode_next(self, text: str) -> list[int]:
            return list(text.encode())

    model = small("no-memory")
    model.tokenizer = Letters()
    (near, far) = passkey_in_text(model, documents(3, 60), (1, 3, 99), rows=3, numbers=4)
    assert (near["distance"], far["distance"]) == (1, 3)
    assert near["questions"] == far["questions"] == 8
    assert far["accuracy"] < 0.5
    with pytest.raises(ValueError, match=r"tokens at least, too few to ask"):
        passkey_in_text(model, documents(3, 20), (1, 3), rows=3, numbers=4)


def test_recall_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trains the kinds that are named, writes and draws; what is done is not trained again."""
    pytest.importorskip("matplotlib")
    command = f"recall needle --presets laptop-no-memory laptop-melodi --out {tmp_path}/r"
    command += " --steps 2 --rows 2 --windows 3"
    records = json.loads(printed(capsys, f"{command} --json"))
    assert [record["name"] for record in records] == ["laptop-no-memory", "laptop-melodi"]
    assert [point["distance"] for point in records[1]["curve"]] == [1, 2]
    assert (tmp_path / "r" / "needle.png").stat().st_size > 5000
    saved = json.loads((tmp_path / "r" / "needle" / "laptop-melodi.json").read_text())
    assert saved == records[1]
    monkeypatch.setattr(tiny, "learn", None)
    main(shlex.split(command))
    assert "laptop-melodi" in capsys.readouterr().out
    message = refused(capsys, f"{command} --seed 1")
    assert "was made with other settings: choose another --out" in message
    unknown = f"recall needle --presets laptop-melodi nope --out {tmp_path}/n --steps 2"
    assert "nope" in refused(capsys, unknown)  # before anything is trained, which would fail here
    assert "are measured on runs" in refused(capsys, f"recall forgetting --out {tmp_path}/r")
    for flag in ("--data store", "--split train", "--seed -1"):
        assert flag.split()[0] in refused(capsys, f"recall copy {flag} --out {tmp_path}/r")
    message = refused(capsys, f"recall copy --run {tmp_path} --out {tmp_path}/r")
    assert "choose one of forgetting, passkey" in message


def test_a_model_that_fails_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are trained, written and drawn; what failed is said at the end."""
    pytest.importorskip("matplotlib")
    learn = tiny.learn

    def diverges(config: ModelConfig, *args: Any, **more: Any) -> Learned:
        if "armt" in config.layers:
            raise ValueError("the loss became nan at step 1: lower peak=0.02")
        return learn(config, *args, **more)

    monkeypatch.setattr(tiny, "learn", diverges)
    command = f"recall facts --presets laptop-armt laptop-no-memory --out {tmp_path} --steps 1"
    message = last_line(capsys, f"{command} --rows 2 --windows 2")
    assert "1 of the models did not learn: laptop-armt: the loss became nan at step 1" in message
    assert [path.name for path in (tmp_path / "facts").iterdir()] == ["laptop-no-memory.json"]
    assert (tmp_path / "facts.png").exists()
    alone = f"recall facts --presets laptop-armt --out {tmp_path}/alone --steps 1"
    assert "1 of the models did not learn" in last_line(capsys, alone)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of one step."""
    folder = tmp_path_factory.mktemp("runs")
    store = make_store(folder)
    for name in ("a", "b"):
        start(folder / name / "run", store, steps=1).run_all()
    return folder


def test_forgetting_of_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs are asked as they are, each under its own name."""
    pytest.importorskip("matplotlib")
    command = f"recall forgetting --run {runs}/a/run {runs}/b/run --split train --rows 2"
    records = json.loads(printed(capsys, f"{command} --out {runs}/r --json"))
    assert [record["name"] for record in records] == [f"{runs}/{name}/run" for name in "ab"]
    assert records[0]["curve"][0].keys() >= {"first", "again", "remembered", "tokens"}
    assert len(list((runs / "r" / "forgetting-of-runs").glob("*.json"))) == 2
    assert (runs / "r" / "forgetting-of-runs.png").exists()
    message = refused(capsys, f"{command} --out {runs}/r --window 99")
    assert "--window is for tiny models, and --run asks runs" in message
    assert "--seed changes nothing" in refused(capsys, f"{command} --out {runs}/r --seed 1")
    assert json.loads(printed(capsys, f"{command} --out {runs}/r --json")) == records
    message = refused(capsys, f"{command} --out {runs}/r --rows 3")
    assert "was made with other settings: choose another --out" in message
    flip(runs / "store" / "train.tokens")
    message = refused(capsys, f"{command} --out {runs}/s")
    flip(runs / "store" / "train.tokens")
    assert "checksum" in message


@pytest.mark.slow
def test_passkey_of_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In text, by the run's own tokenizer."""
    pytest.importorskip("matplotlib")
    command = f"recall passkey --run {runs}/a/run --split train --rows 2 --out {runs}/r --json"
    (record,) = json.loads(printed(capsys, command))
    assert record["chance"] == 0.1
    assert record["curve"][0]["questions"] == 8
