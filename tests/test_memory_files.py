"""Memory files: a reader goes on from one as if it had never stopped, and from no other."""

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_stream import CONFIG, IDS, MODEL, TOLERANCE, Letters, speaking
from tiny_runs import flip
from zoo import KINDS, WINDOW, ZOO, cases, make, random_tokens

from melodi import LanguageModel, MemoryState, ModelConfig, StreamReader
from melodi.config import PRESETS
from melodi.evaluation.contents import contents
from melodi.files import read_tensors, write_tensors


@cases({name: config for name, config in ZOO.items() if name.endswith("-default")})
@pytest.mark.parametrize("length", [2 * WINDOW, 2 * WINDOW + 4])
def test_a_saved_reader_goes_on(config: ModelConfig, length: int, tmp_path: Path) -> None:
    """From its file a reader scores the very next token, and writes the same, in every row."""
    model, path = make(config), tmp_path / "book.memory"
    documents, more = random_tokens(2, length), random_tokens(2, 4, seed=1)
    reader = StreamReader(model, rows=2)
    reader.read_batch([documents[0], documents[1][:-3]])
    reader.save(path)
    loaded = StreamReader.load(model, path)
    assert loaded.tokens_read == reader.tokens_read == [length, length - 3]
    for ours, theirs in zip(loaded.read_batch(more), reader.read_batch(more), strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
        assert ours.isfinite().all()
    reader.save(path)
    choices: dict[str, Any] = {"temperature": 1.5, "seed": 3, "repetition_penalty": 1.3}
    said = list(StreamReader.load(model, path).generate_batch(9, **choices))
    assert said == list(reader.generate_batch(9, **choices))


def test_the_digest_is_that_of_the_text(tmp_path: Path) -> None:
    """Equal for equal ids, however they were cut, and over a file; other for others."""

    def digest(*parts: list[int]) -> str:
        reader = StreamReader(MODEL)
        for part in parts:
            reader.read(part)
            reader.save(tmp_path / "memory")
            reader = StreamReader.load(MODEL, tmp_path / "memory")
        return str(contents(tmp_path / "memory")["text_digests"][0])

    assert digest(IDS) == digest(IDS[:1], IDS[1:9], IDS[9:])
    assert len({digest(IDS), digest(IDS[:-1]), digest([*IDS[:-1], IDS[-1] ^ 1])}) == 3


def test_a_file_without_the_readers_part(tmp_path: Path) -> None:
    """What a MemoryState wrote is read on from: its first token has no score, then all have."""
    path, reader = tmp_path / "memory", StreamReader(MODEL)
    reader.read(IDS)
    reader.state.save(path)
    loaded = StreamReader.load(MODEL, path)
    with pytest.raises(ValueError, match="read at least one token"):
        loaded.generate(1)
    ours, theirs = loaded.read(IDS), reader.read(IDS)
    assert ours[0].isnan()
    torch.testing.assert_close(ours[1:], theirs[1:], **TOLERANCE)
    loaded.save(path)
    assert contents(path)["text_digests"] == [None]
    again = StreamReader.load(MODEL, path).generate(5, temperature=0)
    assert list(again) == list(reader.generate(5, temperature=0))
    MemoryState.load(path)


def changed(path: Path, change: Callable[[dict[str, str], dict[str, Any]], object]) -> None:
    """A file with other contents and a checksum that fits them."""
    header, tensors = read_tensors(path)
    change(header, tensors)
    write_tensors(path, tensors, header)


def put(name: str, value: torch.Tensor) -> Callable[[Any, dict[str, Any]], object]:
    return lambda _, tensors: tensors.update({name: value})


TAMPERED: dict[str, Callable[[dict[str, str], dict[str, Any]], object]] = {
    "has version 3, this melodi reads 2": lambda header, _: header.update(version="3"),
    "not a memory file": lambda header, _: header.update(format="else"),
    "layers.0.z_BSD holds numbers that are not finite": lambda _, t: t["layers.0.z_BSD"].fill_(
        torch.nan
    ),
    "reader.last holds numbers that are not finite": lambda _, t: t["reader.last"].fill_(torch.inf),
    "layers.1.z_BSD has shape .*, the memory has 1 rows": lambda _, t: t.update(
        {"layers.1.z_BSD": t["layers.1.z_BSD"].repeat(2, 1, 1)}
    ),
    r"windows=\[-5\] is no count": put("windows", torch.tensor([-5])),
    r"windows=\[1.5\] is no count": put("windows", torch.tensor([1.5])),
    r"windows=1 is no count": put("windows", torch.tensor(1)),
    rf"open=\[{WINDOW}\] is no count": put("open", torch.tensor([WINDOW])),
    r"open=\[1, 1\] is no count": put("open", torch.tensor([1, 1])),
    "the reader's part has other rows": lambda header, _: header.update(
        reader=header["reader"].replace('["', '["", "')
    ),
    "the reader's part has shape": put("reader.last", torch.zeros(1, 3).double()),
    "token id 99 is outside": put("reader.recent", torch.full((1, 64), 99)),
    "lacks 'reader.last'": lambda _, t: t.pop("reader.last"),
    "lacks 'layers.2.z_BSD'": lambda _, t: t.pop("layers.2.z_BSD"),
    "layer 0 has shapes": put("open_window.0.keys_BHkE", torch.zeros(1, 2, 3, 4).double()),
    "is damaged: ": lambda header, _: header.update(config="[]"),
    "is damaged in its types": lambda header, _: header.update(dtypes='{"windows": "complex"}'),
    "the state is torch.float32": lambda _, t: t.update(
        {k: v.float() for k, v in t.items() if v.is_floating_point()}
    ),
}


@pytest.mark.parametrize("message", TAMPERED)
def test_a_tampered_file_is_refused(message: str, tmp_path: Path) -> None:
    """One line with the file's name, also where the checksum was made to fit."""
    path, reader = tmp_path / "book.memory", StreamReader(MODEL)
    reader.read(IDS)
    reader.save(path)
    StreamReader.load(MODEL, path)
    changed(path, TAMPERED[message])
    with pytest.raises(ValueError, match=message) as caught:
        StreamReader.load(MODEL, path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_other_models_and_broken_files_are_refused(tmp_path: Path) -> None:
    """Another architecture, other weights, another tokenizer, a bit, half of the file."""
    path, model = tmp_path / "book.memory", speaking()
    reader = StreamReader(model)
    reader.read(IDS)
    reader.save(path)
    for other, message in (
        (make(replace(CONFIG, branching=False)), "another architecture"),
        (make(CONFIG, seed=1), "other weights"),
    ):
        with pytest.raises(ValueError, match=f"{path} cannot be used here: .* {message}"):
            StreamReader.load(other, path)
    StreamReader.load(MODEL, path)
    model.tokenizer = Letters()
    model.tokenizer.digest = lambda: "other letters"  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"another tokenizer \(letters, the model has other"):
        StreamReader.load(model, path)
    whole = path.read_bytes()
    flip(path)
    with pytest.raises(ValueError, match="checksum differs"):
        StreamReader.load(MODEL, path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        StreamReader.load(MODEL, path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        StreamReader.load(MODEL, tmp_path / "none")
    with pytest.raises(ValueError, match="dtype='int8' is unknown"):
        reader.save(path, dtype="int8")


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("laptop-")])
def test_two_bytes_a_number_change_little(name: str, tmp_path: Path) -> None:
    """Stored as bf16 a file has half the size, and what is read next costs the same to 0.02 nats a
    token, on random weights of every kind."""
    torch.manual_seed(0)
    model = LanguageModel(PRESETS[name])
    window = model.config.window
    ids = torch.randint(0, model.config.vocab_size, (4 * window,))
    reader = StreamReader(model)
    reader.read(ids[: 2 * window + 9])
    sizes = {}
    for dtype in (None, "bf16"):
        reader.save(tmp_path / "memory", dtype)
        sizes[dtype] = (tmp_path / "memory").stat().st_size
    assert sizes["bf16"] < 0.55 * sizes[None]
    loaded = StreamReader.load(model, tmp_path / "memory")
    assert loaded.state.dtype == torch.float32
    rest = ids[2 * window + 9 :]
    change = (loaded.read(rest) - reader.read(rest)).abs()
    assert 0 < float(change.max()) < 0.02


def write_often(path: Path, value: float) -> None:
    for _ in range(20):
        write_tensors(path, {"x": torch.full((9999,), value)}, {})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes that share the test need fork")
def test_two_processes_write_one_file(tmp_path: Path) -> None:
    """Whoever opens the file finds that of the one or that of the other, whole."""
    path = tmp_path / "memory"
    whole = set()
    for n in (1.0, 2.0):
        write_tensors(path, {"x": torch.full((9999,), n)}, {})
        whole.add(path.read_bytes())
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=write_often, args=(path, n)) for n in (1.0, 2.0)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_bytes() in whole
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert list(tmp_path.iterdir()) == [path]


def write_others(path: Path) -> None:
    for n in range(300):
        write_tensors(path, {"x": torch.full((999,), float(n))}, {"n": str(n)})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes that share the test need fork")
def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    """What is loaded is the old file or the new one, however often another process writes it."""
    path = tmp_path / "memory"
    write_tensors(path, {"x": torch.zeros(999)}, {"n": "0"})
    writer = multiprocessing.get_context("fork").Process(target=write_others, args=(path,))
    writer.start()
    seen = set()
    while writer.is_alive():
        header, tensors = read_tensors(path)
        assert tensors["x"].unique().tolist() == [float(header["n"])]
        seen.add(header["n"])
    assert writer.exitcode == 0
    assert len(seen) > 1


def test_a_file_without_its_checksum_is_refused(tmp_path: Path) -> None:
    """Only melodi writes memory files, and it seals them all."""
    path, reader = tmp_path / "book.memory", StreamReader(MODEL)
    reader.read(IDS)
    reader.save(path)
    with safe_open(path, "pt") as file:
        header = file.metadata()
    del header["checksum"]
    save_file(load_file(path), path, header)
    with pytest.raises(ValueError, match=f"{path} has no checksum: it is damaged, or"):
        StreamReader.load(MODEL, path)


def test_contents_are_what_was_read(tmp_path: Path) -> None:
    """`contents` tells tokens, windows and norms, which by age are those of the queue's slots."""
    path, reader = tmp_path / "book.memory", StreamReader(speaking())
    reader.read(IDS)
    reader.save(path)
    found = contents(path)
    assert (found["tokens"], found["windows"], found["open_tokens"]) == ([20], [3], [2])
    assert found["floats_per_document"] == sum(CONFIG.memory_floats())
    assert found["expects_next"]
    assert found["tokenizer_digest"] == "letters"
    assert found["weights_digest"] == MODEL.fingerprint().weights
    (long,) = [layer for layer in found["layers"] if layer["kind"] == "long"]
    keys = {one["name"]: one for one in long["carried"]}["keys_BHME"]
    slots = reader.state.layers[1].keys_BHME[0].norm(dim=-1).mean(0)  # type: ignore[attr-defined]
    ages = slots.view(-1, CONFIG.long_term_tokens).mean(1).flip(0)[:3].tolist()
    assert keys["norm_by_age"] == pytest.approx(ages)
    assert keys["norm"] == pytest.approx(sum(ages) / 3)


def test_empty_slots_have_no_norm(tmp_path: Path) -> None:
    """Slots that nothing was compressed into yet are no part of the mean."""
    model, path = make(KINDS["compressive"]), tmp_path / "book.memory"
    for windows, slots in ((1, 0), (2, WINDOW // model.config.compression_rate)):
        reader = StreamReader(model)
        reader.read(IDS[:WINDOW] * windows)
        reader.save(path)
        held = reader.state.layers[0].compressed_BCD[0]  # type: ignore[attr-defined]
        assert len(held) > WINDOW // model.config.compression_rate
        norm = float(held[len(held) - slots :].norm(dim=-1).mean()) if slots else None
        carried = {one["name"]: one for one in contents(path)["layers"][0]["carried"]}
        assert carried["compressed_BCD"]["norm"] == pytest.approx(norm)


@cases(ZOO)
def test_contents_of_every_kind(config: ModelConfig, tmp_path: Path) -> None:
    """Every kind can be looked into, also before its first window is full."""
    model = make(config)
    for length in (2, 2 * WINDOW + 1):
        reader = StreamReader(model, rows=2)
        reader.read_batch([random_tokens(length), [1]])
        reader.save(tmp_path / "memory")
        found = contents(tmp_path / "memory")
        norms = [one["norm"] for layer in found["layers"] for one in layer["carried"]]
        assert all((norm is None) == (length == 2) for norm in norms)
