"""StreamReader: the public door to reading and writing texts of any length."""

import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from zoo import KINDS, VOCAB, WINDOW, ZOO, cases, make, random_tokens

from melodi import LanguageModel, ModelConfig, StreamReader
from melodi.config import PRESETS
from melodi.data.tokenizer import ByteTokenizer
from melodi.stream.sampling import Sampling
from melodi.stream.spoken import Spoken

TOLERANCE = dict(rtol=0, atol=1e-10)
CONFIG = ZOO["melodi-default"]
MODEL = make(CONFIG)
IDS = random_tokens(3 * WINDOW + 2).tolist()


class Letters:
    """A tokenizer whose every id is a letter."""

    vocab_size = VOCAB
    end_of_document: int | None = None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    encode_next = encode

    def decode(self, ids: Any) -> str:
        return "".join(chr(ord("a") + i) for i in ids)

    def digest(self) -> str:
        return "letters"


def speaking() -> LanguageModel:
    """A model with a tokenizer, and enough chance in what it says."""
    model = make(CONFIG)
    model.tokenizer = Letters()
    return model


def nats_of(model: LanguageModel, ids: list[int]) -> torch.Tensor:
    """By the logits of one pass."""
    tokens = torch.tensor([ids])
    logits, _ = model(tokens, model.empty_state(1))
    nats = F.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="none").detach()
    return torch.cat([torch.tensor([torch.nan], dtype=nats.dtype), nats])


@cases(ZOO)
def test_reading_scores_every_token(config: ModelConfig) -> None:
    """However the stream is cut, each token costs what the logits before it say; the first ever
    has no score."""
    model, ids = make(config), random_tokens(4 * WINDOW + 3).tolist()
    reader, parts, rest = StreamReader(model), [], list(ids)
    for length in (1, 2, WINDOW, 2 * WINDOW, len(ids)):
        if part := rest[:length]:
            parts.append(reader.read(part))
        rest = rest[length:]
    torch.testing.assert_close(torch.cat(parts), nats_of(model, ids), equal_nan=True, **TOLERANCE)
    assert reader.tokens_read == [len(ids)]


@cases(ZOO)
def test_greedy_writing_is_the_argmax_of_whole_passes(config: ModelConfig) -> None:
    """At temperature 0 each token is the most likely after all before it, across windows."""
    model, ids = make(config), IDS[: WINDOW - 2]
    reader = StreamReader(model)
    reader.read(ids)
    said = list(reader.generate(2 * WINDOW + 1, temperature=0))
    expected = list(ids)
    with torch.no_grad():
        for _ in said:
            logits, _ = model(torch.tensor([expected]), model.empty_state(1))
            expected.append(int(logits[0, -1].argmax()))
    assert [*ids, *said] == expected


SOURCES: dict[str, Callable[[Path], Any]] = {
    "list": lambda _: IDS,
    "tuple": lambda _: tuple(IDS),
    "generator": lambda _: iter(IDS),
    "text": lambda _: Letters().decode(IDS),
    "open text": lambda _: io.StringIO(Letters().decode(IDS)),
    "every second": lambda _: np.repeat(np.array(IDS, np.uint16), 2)[::2],
    "mapped": lambda path: mapped(path / "ids"),
    **{
        f"array of {kind}": lambda _, kind=kind: np.array(IDS, kind)
        for kind in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4")
    },
    **{
        f"tensor of {kind}": lambda _, kind=kind: torch.tensor(IDS).to(getattr(torch, kind))
        for kind in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
    },
}


def mapped(path: Path) -> np.ndarray:
    np.array(IDS, np.uint16).tofile(path)
    return np.memmap(path, np.uint16, "r")


@pytest.mark.parametrize("form", SOURCES)
def test_ids_come_in_any_form(form: str, tmp_path: Path) -> None:
    """Whatever holds the ids, they are read alike, at once or window by window."""
    model = speaking()
    expected = nats_of(model, IDS)
    whole = StreamReader(model).read(SOURCES[form](tmp_path))
    windows = list(StreamReader(model).read_windows(SOURCES[form](tmp_path)))
    for nats in (whole, torch.cat([window.nats_T for window in windows])):
        torch.testing.assert_close(nats, expected, equal_nan=True, **TOLERANCE)


# The wrong id comes after more than `read` gives to the model at once.
REFUSED: dict[str, Callable[[], Any]] = {
    "nothing to read": list,
    f"token id {VOCAB} is outside the vocabulary": lambda: [*IDS * 4, VOCAB],
    f"id {VOCAB + 1} is outside": lambda: iter([*IDS * 4, VOCAB + 1]),
    "token id -1 is outside": lambda: np.array([0, -1]),
    "ids of shape .* and type float32": lambda: torch.tensor([1.0]),
    "ids of shape .* and type float64": lambda: [1.0],
    "ids of shape .* and type bool": lambda: [True],
    "ids of shape .* and type object": lambda: [1 << 70],
    r"ids of shape \(1, 2\)": lambda: torch.tensor([[1, 2]]),
    r"ids of shape \(\)": lambda: torch.tensor(1),
    "ids of shape .* and type <U2": lambda: ["it"],
    "whole numbers in one row: give a flat list": lambda: [[1], [2, 3]],
    "a int cannot be read": lambda: 3,
    "a NoneType cannot be read": lambda: None,
    "a bytes cannot be read": lambda: b"it",
    "has no tokenizer to read a text with": lambda: "it",
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_refused_call_changes_nothing(message: str) -> None:
    """One line, and nothing of what was given has been read."""
    reader = StreamReader(MODEL)
    reader.read(IDS[:3])
    with pytest.raises(ValueError, match=message) as caught:
        reader.read(REFUSED[message]())
    assert "\n" not in str(caught.value)
    assert reader.tokens_read == [3]
    expected = nats_of(MODEL, IDS)[3:]
    torch.testing.assert_close(reader.read(IDS[3:]), expected, **TOLERANCE)


def test_a_byte_order_mark_is_not_read() -> None:
    """At the start of a text, as in `melodi read`; a file gives it whoever opened it as UTF-8."""
    expected = nats_of(model := speaking(), [0, 1, 2])
    for source in ("\ufeffabc", io.StringIO("\ufeffabc")):
        nats = StreamReader(model).read(source)
        torch.testing.assert_close(nats, expected, equal_nan=True, **TOLERANCE)


def test_bytes_are_no_text() -> None:
    """A file that was opened as bytes is refused in words."""
    with pytest.raises(ValueError, match="open it as text"):
        StreamReader(speaking()).read(io.BytesIO(b"abc"))


def test_a_source_without_end() -> None:
    """Windows are given one by one, aligned, and no more is taken from the source than they
    need."""
    taken = 0

    def endless() -> Iterator[int]:
        nonlocal taken
        for token in itertools.cycle(IDS):
            taken += 1
            yield token

    reader = StreamReader(MODEL)
    reader.read(IDS[:2])
    windows = reader.read_windows(endless())
    assert taken == 0
    for n in range(1, 4):
        window = next(windows)
        assert (window.first, len(window.nats_T)) == ((n - 1) * WINDOW or 2, WINDOW - 2 * (n == 1))
        assert taken == n * WINDOW - 2
        assert reader.state.windows_B.tolist() == [n]


def test_what_was_said_was_read() -> None:
    """Whoever stops listening after a token finds it in the memory, at one pass a token."""
    model, passes = make(CONFIG), []
    model.register_forward_hook(lambda *_: passes.append("with logits"))
    model.final_norm.register_forward_hook(lambda *_: passes.append("pass"))
    reader = StreamReader(model)
    reader.read(IDS)
    passes.clear()
    said = list(itertools.islice(reader.generate(10, seed=1), 4))
    assert reader.tokens_read == [len(IDS) + 4]
    assert passes == ["pass"] * 4
    assert reader.recent[0][-4:] == said
    more = reader.read([5])
    torch.testing.assert_close(more[0], nats_of(model, [*IDS, *said, 5])[-1], **TOLERANCE)


def test_a_seed_is_all_that_chance_is() -> None:
    """Equal seeds give equal tokens, others others, and none touches the global generator."""
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    said = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2), ("d", None), ("e", None)):
        reader = StreamReader(MODEL)
        reader.read(IDS)
        said[name] = list(reader.generate(40, temperature=1.5, seed=seed))
    assert said["a"] == said["b"] != said["c"]
    assert said["d"] != said["e"]
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "choices",
    [
        {"top_k": 1},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"temperature": 1e-300},
        {"temperature": 5e-324},
        {"top_k": 999, "top_p": 1e-6, "min_p": 0.0},
    ],
)
def test_every_choice_has_the_most_likely_token_as_its_limit(choices: dict[str, Any]) -> None:
    """However narrow the choice, one token is left: the first."""
    said = []
    for more in (choices, {"temperature": 0}):
        reader = StreamReader(MODEL)
        reader.read(IDS)
        said.append(list(reader.generate(12, seed=3, **more)))
    assert said[0] == said[1]


def test_what_is_left_to_choose_from() -> None:
    """top_k, top_p and min_p keep exactly what they say; a penalty lowers what was just there."""
    p = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.double)
    kept = {
        "top_k": ({"top_k": 2}, [1, 3]),
        "top_p": ({"top_p": 0.65}, [1, 3]),
        "top_p of top_k": ({"top_k": 2, "top_p": 0.5}, [1]),
        "min_p": ({"min_p": 0.5}, [1, 2, 3]),
    }
    for choices, expected in kept.values():
        left = Sampling(**choices)._likely(p)
        assert left.nonzero().flatten().tolist() == expected
        assert torch.equal(left[expected], p[expected])
    greedy = Sampling(temperature=0, repetition_penalty=2.0)
    logits = torch.tensor([1.0, 1.5, -0.5, -0.6])
    assert greedy.choose(logits, [], torch.Generator()) == 1
    assert greedy.choose(logits, [1], torch.Generator()) == 0
    assert greedy.choose(logits - 2, [1, 0], torch.Generator()) == 1
    assert greedy.choose(torch.tensor([-0.5, -0.6]), [0], torch.Generator()) == 1


@pytest.mark.parametrize(
    "choices",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": float("nan")},
        {"repetition_penalty": 0.0},
        {"seed": -1},
        {"stop_strings": ["a", ""]},
        {"max_tokens": -1},
    ],
)
def test_bad_choices_are_refused_at_once(choices: dict[str, Any]) -> None:
    """With the value, before the first token is asked for."""
    reader = StreamReader(MODEL)
    reader.read(IDS)
    (name,) = choices
    with pytest.raises(ValueError, match=rf"{name}=.* must be"):
        reader.generate(**{"max_tokens": 3, **choices})


def test_nothing_to_go_on_from_and_nothing_to_say() -> None:
    """Writing needs a token; no tokens can be had from anything."""
    reader = StreamReader(MODEL)
    assert list(reader.generate(0)) == []
    with pytest.raises(ValueError, match="read at least one token"):
        reader.generate(1)
    reader.read([1])
    assert list(reader.generate(0)) == []
    assert reader.tokens_read == [1]


def test_a_broken_model_says_so() -> None:
    """NaN in the weights is one clear error, and not a token."""
    model = make(CONFIG)
    with torch.no_grad():
        model.final_norm.weight[0] = torch.nan
    reader = StreamReader(model)
    assert reader.read(IDS).isnan().all()
    with pytest.raises(ValueError, match="NaN or infinity"):
        next(reader.generate(1))


def test_the_model_keeps_its_mode() -> None:
    """Reading and writing in the middle of a training leave every part in its mode, and are not
    disturbed by dropout."""
    model = make(replace(CONFIG, dropout=0.5)).train()
    model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    reader = StreamReader(model)
    nats = reader.read(IDS)
    for _ in reader.generate(3):
        assert [module.training for module in model.modules()] == modes
    with pytest.raises(ValueError, match="outside"):
        reader.read([VOCAB])
    assert [module.training for module in model.modules()] == modes
    torch.testing.assert_close(nats, nats_of(model.eval(), IDS), equal_nan=True, **TOLERANCE)


def test_readers_of_one_model_do_not_disturb_each_other() -> None:
    """Two that take turns, and one that goes on from the state of another, equal those alone."""
    ours, theirs = random_tokens(20).tolist(), random_tokens(20, seed=1).tolist()
    first, second = StreamReader(MODEL), StreamReader(MODEL)
    parts = []
    for i in range(0, 20, 2):
        parts.append((first.read(ours[i : i + 2]), second.read(theirs[i : i + 2])))
    for nats, ids in zip(zip(*parts, strict=True), (ours, theirs), strict=True):
        expected = nats_of(MODEL, ids)
        torch.testing.assert_close(torch.cat(nats), expected, equal_nan=True, **TOLERANCE)
    branch = StreamReader(MODEL, first.state)
    said = list(first.generate(WINDOW, temperature=0))
    assert branch.read([3]).isnan().all()
    assert said == list(rerun(ours, WINDOW))


def rerun(ids: list[int], count: int) -> Iterator[int]:
    reader = StreamReader(MODEL)
    reader.read(ids)
    return reader.generate(count, temperature=0)


@cases(KINDS)
def test_rows_of_a_batch_equal_readers_alone(config: ModelConfig) -> None:
    """Documents of different lengths read together, and continued from different places of their
    windows, are what they are alone; a row may get nothing."""
    model = make(config)
    documents = [random_tokens(n, seed=n).tolist() for n in (1, WINDOW, 2 * WINDOW + 3)]
    batch = StreamReader(model, rows=3)
    first = batch.read_batch([document[:5] for document in documents])
    second = batch.read_batch([document[5:] for document in documents])
    said = list(batch.generate_batch(WINDOW + 2, temperature=1.5, seed=7))
    assert batch.tokens_read == [len(document) + WINDOW + 2 for document in documents]
    for row, document in enumerate(documents):
        alone = StreamReader(model)
        expected = alone.read(document)
        nats = torch.cat([first[row], second[row]])
        torch.testing.assert_close(nats, expected, equal_nan=True, **TOLERANCE)
        continued = alone.generate(WINDOW + 2, temperature=1.5, seed=7 + row)
        assert [tokens[row] for tokens in said] == list(continued)


def test_batches_are_checked() -> None:
    """As many sources as rows; methods for one document are refused."""
    batch = StreamReader(MODEL, rows=2)
    for sources, message in (
        ([[1]], "1 sources for 2 rows"),
        ([[], []], "nothing to read"),
        ([[1], [VOCAB]], "outside the vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            batch.read_batch(sources)
    assert batch.tokens_read == [0, 0]
    batch.read_batch([[1], []])
    for call in (batch.read, batch.read_windows, batch.generate):
        with pytest.raises(ValueError, match="the reader has 2 rows: use"):
            call(IDS)
    with pytest.raises(ValueError, match="at least one token in row 1"):
        batch.generate_batch(1)
    with pytest.raises(ValueError, match="rows=3, but the memory has 2"):
        StreamReader(MODEL, batch.state, rows=3)


def test_ids_that_stop() -> None:
    """A stop id is neither given nor read; other rows go on without the one that ended."""
    reader = StreamReader(MODEL)
    reader.read(IDS)
    said = list(reader.generate(30, temperature=1.5, seed=1))
    stop = next(token for token in said[3:] if token not in said[:3])
    before = said.index(stop)
    for stops in (stop, [stop, VOCAB], {stop}):
        again = StreamReader(MODEL)
        again.read(IDS)
        assert list(again.generate(30, temperature=1.5, seed=1, stop=stops)) == said[:before]
        assert again.tokens_read == [len(IDS) + before]
    batch = StreamReader(MODEL, rows=2)
    batch.read_batch([IDS, IDS])
    rows = list(batch.generate_batch(30, temperature=1.5, seed=1, stop=stop))
    ours = [tokens[0] for tokens in rows]
    assert ours == said[:before] + [None] * (len(rows) - before)
    assert batch.tokens_read[1] == len(IDS) + sum(tokens[1] is not None for tokens in rows)


def test_strings_that_stop() -> None:
    """The text ends before a stop string, wherever its tokens begin; the ids end with it."""
    model = speaking()

    def new() -> StreamReader:
        reader = StreamReader(model)
        reader.read(IDS)
        return reader

    choices: dict[str, Any] = {"temperature": 1.5, "seed": 1}
    said = list(new().generate(20, **choices))
    text = Letters().decode(said)
    assert "".join(new().generate_text(20, **choices)) == text
    stop = text[5:8]
    place = text.index(stop)
    reader = new()
    assert "".join(reader.generate_text(20, stop_strings=stop, **choices)) == text[:place]
    assert reader.tokens_read == [len(IDS) + place + 3]
    assert list(new().generate(20, stop_strings=[stop, "zz"], **choices)) == said[: place + 3]
    with pytest.raises(ValueError, match="text needs one"):
        list(rerun_text(stop))


def rerun_text(stop: str) -> Iterator[int]:
    reader = StreamReader(MODEL)
    reader.read(IDS)
    return reader.generate(3, stop_strings=stop)


@given(
    text=st.text("abé日", max_size=12),
    ends=st.lists(st.text("abé日", min_size=1, max_size=4), max_size=3),
)
def test_text_is_given_up_to_its_end(text: str, ends: list[str]) -> None:
    """Byte by byte, the text comes up to the first end that is complete, and nothing of an end is
    ever shown; without one it comes whole."""
    spoken, shown = Spoken(ByteTokenizer(), [], ends), ""
    for byte in text.encode():
        shown += spoken.push(byte)
        if spoken.ended:
            break
    shown += spoken.rest()
    complete = (text[:n] for n in range(len(text) + 1) if any(end in text[:n] for end in ends))
    said = next(complete, None)
    expected = text if said is None else said[: min(said.find(e) for e in ends if e in said)]
    assert shown == expected


def test_random_weights_of_the_laptop_presets_read() -> None:
    """Every preset for laptops reads and writes in float32 with its own sizes."""
    for name in ("laptop-melodi", "laptop-memorizing", "laptop-autocompressor"):
        torch.manual_seed(0)
        reader = StreamReader(LanguageModel(PRESETS[name]))
        nats = reader.read(range(150))
        assert nats[1:].isfinite().all()
        assert len(list(reader.generate(3))) == 3
