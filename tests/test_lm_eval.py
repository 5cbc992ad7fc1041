"""lm-evaluation-harness through one memory: what it is told is what a reader would have said."""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from test_cli import _same_threads, folder, printed, refused

from melodi import LanguageModel, StreamReader, load
from melodi.cli.tasks import print_tasks

__all__ = ["_same_threads", "folder"]

TASKS = Path(__file__).parents[1] / "examples" / "tasks"
PAGE = Path(__file__).parents[1] / "docs" / "harness.md"
INSTALLED = find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not INSTALLED, reason="lm-evaluation-harness is not installed")
BOOK = "It was the best of times, it was the worst of times. Call me Ishmael." * 4


def test_without_the_harness_one_line(folder: Path) -> None:
    """Where it is not installed, the command says what to install."""
    code = (
        "import sys; sys.modules['lm_eval'] = None\n"
        "from melodi.cli import main\n"
        f"main(['eval', {str(folder / 'run')!r}, '--tasks', 'tale_choice'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install '.[eval]'" in done.stderr


class Request(NamedTuple):
    """What the coat uses of the harness's Instance."""

    kind: str
    args: tuple[object, ...]


@pytest.fixture(scope="module")
def _harness() -> Iterator[None]:
    """The harness; where it is not installed, the two names of it that the coat builds on."""
    if INSTALLED:
        yield
        return
    names = {"lm_eval.api.model": "TemplateLM", "lm_eval.api.instance": "Instance"}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("lm_eval", "lm_eval.api", *names):
            patch.setitem(sys.modules, name, ModuleType(name))
        for name, attribute in names.items():
            setattr(sys.modules[name], attribute, type(attribute, (), {}))
        yield
        sys.modules.pop("melodi.lm_eval", None)


@pytest.fixture(scope="module")
def model(folder: Path, _harness: None) -> LanguageModel:
    """One that says letters and signs, so that what it says can be asked for as text."""
    model = load(folder / "run")
    with torch.no_grad():
        model.embedding.weight[:32] = model.embedding.weight[127:] = 0
    return model


def asked(kind: str, *args: object) -> Any:
    return Request(kind, args)


def lm(model: LanguageModel) -> Any:
    from melodi.lm_eval import MelodiLM

    return MelodiLM(model, rows=3)


def read_after(model: LanguageModel, context: str) -> StreamReader:
    reader = StreamReader(model)
    reader.read(context)
    return reader


def test_a_document_is_read_through(model: LanguageModel) -> None:
    """Rolling log-likelihood is the sum of a reader's nats over the whole document, after a line
    break, over many windows; each document by itself."""
    texts = [BOOK, "It was", BOOK[:50], ""]
    requests = [asked("loglikelihood_rolling", text) for text in texts]
    found = lm(model).loglikelihood_rolling(requests, disable_tqdm=True)
    for text, value in zip(texts, found, strict=True):
        expected = -float(read_after(model, "\n").read(text).sum()) if text else 0
        assert value == pytest.approx(expected, rel=1e-5)


def test_continuations_share_their_context(model: LanguageModel) -> None:
    """Together they cost what each costs alone, and what a reader says of it; nothing before is a
    line break; the most likely continuation is known as such."""
    reader = read_after(model, BOOK)
    likeliest = model.tokenizer.decode(reader.generate(3, temperature=0))
    pairs = [(BOOK, " A"), (BOOK, " B and more"), (BOOK[:60], " A"), ("", "It was"), ("", "\n")]
    pairs += [(BOOK, likeliest), (BOOK, " A"), (BOOK + "  ", "A")]
    requests = [asked("loglikelihood", *pair) for pair in pairs]
    together = lm(model).loglikelihood(requests, disable_tqdm=True)
    for (context, continuation), (value, greedy) in zip(pairs, together, strict=True):
        alone = lm(model).loglikelihood([asked("loglikelihood", context, continuation)], True)
        assert alone[0][0] == pytest.approx(value, rel=1e-5)
        whole = context.rstrip(), context[len(context.rstrip()) :] + continuation
        nats = read_after(model, whole[0] or "\n").read(whole[1])
        assert value == pytest.approx(-float(nats.sum()), rel=1e-5)
        assert greedy == (continuation == likeliest)


@pytest.mark.usefixtures("_harness")
def test_a_token_across_the_border_is_scored() -> None:
    """A continuation that the vocabulary merges with the end of its context costs what the merged
    token costs; it is not the best answer because nothing of it is left."""
    model = load("laptop-melodi")
    for context, continuation in (("He is the hus", "band"), ("He is the hus", "tler"), ("a", "b")):
        given, scored = lm(model)._encode_pair(context, continuation)
        assert given + scored == model.tokenizer.encode(context + continuation)
        assert scored
        request = asked("loglikelihood", context, continuation)
        ((value, _),) = lm(model).loglikelihood([request], True)
        reader = StreamReader(model)
        reader.read(given or model.tokenizer.encode("\n"))
        assert value == pytest.approx(-float(reader.read(scored).sum()), rel=1e-4)
        assert value < 0


def test_generation_goes_on_from_the_memory(model: LanguageModel) -> None:
    """Greedy and up to a stop string, as a reader says it after the whole context; contexts that
    go on from one another are read once, and disturb each other in nothing."""
    contexts = [BOOK, BOOK[:100], BOOK, "", BOOK + "Some"]
    said = "".join(read_after(model, BOOK).generate_text(30, temperature=0))
    ends = [[said[4:6]], "z", ["\0"], [], [" "]]
    requests = [
        asked("generate_until", context, {"until": end, "max_gen_toks": 30})
        for context, end in zip(contexts, ends, strict=True)
    ]
    found = lm(model).generate_until(requests, disable_tqdm=True)
    for context, end, text in zip(contexts, ends, found, strict=True):
        reader = read_after(model, context or "\n")
        stop = model.tokenizer.end_of_document
        pieces = reader.generate_text(30, temperature=0, stop=stop, stop_strings=end)
        assert text == "".join(pieces)
    assert said.startswith(found[0])
    assert len(found[0]) < len(found[2])
    for limit in ("max_new_tokens", "max_tokens", "max_completion_tokens"):
        how = {"until": ["", said[4:6]], "num_beams": 1, "temperature": None, limit: 30}
        assert lm(model).generate_until([asked("generate_until", BOOK, how)], True) == found[:1]
    with pytest.raises(ValueError, match="num_beams=2 is unknown"):
        lm(model).generate_until([asked("generate_until", "a", {"num_beams": 2})])


def test_sampling_follows_the_harness_seed(model: LanguageModel) -> None:
    """The same seed of torch gives the same text."""

    how = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "max_gen_toks": 20}
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts += lm(model).generate_until([asked("generate_until", "It was", how)], True)
    assert texts[0] == texts[1] != texts[2]


@needs_harness
def test_tasks_from_a_folder(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`melodi eval --tasks` runs tasks of one's own without a network, as JSON and as a table."""
    model = load(folder / "run")
    monkeypatch.setenv("COLUMNS", "80")
    names = "tale_perplexity tale_choice tale_answer"
    command = f"eval {folder}/run --tasks {names} --include {TASKS} --threads 1 --device cpu"
    record = json.loads(printed(capsys, f"{command} --json"))
    assert set(record["tasks"]) == set(names.split()) == set(record["samples"])
    assert set(record["samples"].values()) == {4}
    assert 0 <= record["tasks"]["tale_choice"]["acc,none"] <= 1
    assert record["tasks"]["tale_answer"]["exact_match,none"] == 0
    print_tasks({**record, "run": "run"})
    table = capsys.readouterr().out
    assert re.search(r"^tale_choice +acc +\d", table, re.M)
    assert max(map(len, table.splitlines())) <= 80
    lines = map(json.loads, (TASKS / "tales.jsonl").read_text().splitlines())
    tales = [line["tale"] for line in lines]
    nats = sum(float(read_after(model, "\n").read(tale).sum()) for tale in tales)
    size = sum(len(tale.encode()) for tale in tales)
    bits = record["tasks"]["tale_perplexity"]["bits_per_byte,none"]
    assert bits == pytest.approx(nats / size / 0.6931471805599453, rel=1e-5)


@needs_harness
def test_tasks_that_are_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is none is named at once, without a look at the harness's own tasks."""
    command = f"eval {folder}/run --tasks x --include /none --device cpu"
    assert "--include /none is no folder" in refused(capsys, command)


@needs_harness
def test_the_page_runs(folder: Path, tmp_path: Path) -> None:
    """The code of docs/harness.md runs beside a run and the tasks of the examples."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "books").symlink_to(folder / "run")
    (tmp_path / "examples").symlink_to(TASKS.parent)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names: dict[str, Any] = {}
    with contextlib.chdir(tmp_path):
        exec(code, names)
    assert 0 <= names["record"]["tasks"]["tale_choice"]["acc,none"] <= 1
