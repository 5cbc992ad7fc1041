"""`melodi read`, `generate` and `inspect`: a text to its cost, to a memory file, and on from it."""

import io
import json
import math
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from test_cli import TEXTS, _same_threads, folder, printed, refused

from melodi import StreamReader, load
from melodi.cli import main
from melodi.evaluation import texts
from melodi.evaluation.documents import Evaluation
from melodi.evaluation.texts import TextRead

__all__ = ["_same_threads", "folder"]

QUICK = "--threads 1 --device cpu"
TEXT = " ".join(TEXTS) * 3 + " naïve €"


@pytest.fixture(scope="module")
def book(folder: Path) -> Path:
    path = folder / "book.txt"
    path.write_text(TEXT)
    return path


def test_read_tells_what_each_token_cost(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures are those of a reader, and of the whole where there is one file; by window they
    add up."""
    run = book.parent / "run"
    record = json.loads(printed(capsys, f"read {book} --run {run} --json {QUICK}"))
    nats = StreamReader(load(run)).read(TEXT)
    (file,) = record["files"]
    assert file["path"] == str(book)
    assert file["tokens"] == len(nats) == len(TEXT.encode())
    assert file["predictions"] == len(nats) - 1
    assert file["nats"] == pytest.approx(float(nats[1:].sum()), rel=1e-5)
    assert file["perplexity"] == pytest.approx(math.exp(float(nats[1:].mean())), rel=1e-5)
    bits = file["nats"] / math.log(2) / len(TEXT.encode())
    assert file["bits_per_byte"] == pytest.approx(bits)
    assert all(record[key] == file[key] for key in ("tokens", "nats", "perplexity"))
    assert sum(window["nats"] for window in file["windows"]) == pytest.approx(file["nats"])
    assert [window["first"] for window in file["windows"][:2]] == [0, 16]


def test_memory_is_not_saved_over_a_document(
    book: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """--save replaces memory files, and nothing else that is there."""
    text, memory = tmp_path / "a.txt", tmp_path / "a.memory"
    text.write_text(TEXT)
    read = f"read {text} --run {book.parent}/run {QUICK} --save"
    for place in (text, book.parent / "run" / "config.json", book.parent / "run/best.safetensors"):
        before = place.read_bytes()
        assert "is there, and is no memory file" in refused(capsys, f"{read} {place}")
        assert place.read_bytes() == before
    for _ in range(2):
        printed(capsys, f"{read} {memory}")


def test_a_book_in_two_parts_is_the_book(
    book: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`--memory` goes on where `--save` stopped: the same nats, the same memory, the same text."""
    run, half = book.parent / "run", len(TEXT) // 2
    (tmp_path / "a.txt").write_text(TEXT[:half])
    (tmp_path / "b.txt").write_text(TEXT[half:])
    memory = tmp_path / "book.memory"
    read = f"--run {run} --json {QUICK}"
    one = json.loads(printed(capsys, f"read {tmp_path}/a.txt {read} --save {memory}"))
    two = json.loads(
        printed(capsys, f"read {tmp_path}/b.txt {read} --memory {memory} --save {memory}")
    )
    whole = json.loads(printed(capsys, f"read {book} {read} --save {tmp_path}/whole"))
    assert one["nats"] + two["nats"] == pytest.approx(whole["nats"], rel=1e-5)
    assert two["predictions"] == two["tokens"]
    texts = []
    for file in (memory, tmp_path / "whole"):
        write = f"generate --run {run} --memory {file} --max-tokens 30 --seed 1 {QUICK}"
        texts.append(printed(capsys, write))
        about = json.loads(printed(capsys, f"inspect {file} --json"))
        assert about["tokens"] == [len(TEXT.encode())]
        texts.append(about["text_digests"][0])
    assert texts[:2] == texts[2:]
    prompted = printed(capsys, f"{write} --prompt ' It was' --temperature 0 --stop zz")
    assert prompted.startswith(" It was")


def test_several_documents_are_read_together(
    book: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each has the figures that it has alone, in the order given, whatever the rows."""
    run = book.parent / "run"
    texts = [TEXT, "It", "", TEXT[:40]]
    lines = "".join(json.dumps({"text": text}) + "\n\n" for text in texts)
    (tmp_path / "many.jsonl").write_text(lines)
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": TEXT}) + "\n \n")
    one = json.loads(printed(capsys, f"read {tmp_path}/one.jsonl --run {run} --json {QUICK}"))
    assert len(one["files"]) == 1
    alone = json.loads(printed(capsys, f"read {book} --run {run} --json {QUICK}"))
    for rows in (1, 2, 8):
        files = f"{tmp_path}/many.jsonl {book}"
        command = f"read {files} --run {run} --rows {rows} --json {QUICK}"
        record = json.loads(printed(capsys, command))
        assert [f["tokens"] for f in record["files"]] == [len(t.encode()) for t in [*texts, TEXT]]
        assert record["files"][0]["nats"] == pytest.approx(alone["nats"], rel=1e-5)
        assert record["files"][2]["perplexity"] is None
        assert record["files"][4]["path"] == str(book)
        assert record["predictions"] == sum(f["predictions"] for f in record["files"])


def test_what_is_printed_fits(
    book: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tables and pictures fit into 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(book.parent)
    read = f"read book.txt --run run --save {tmp_path}/m --bf16 {QUICK}"
    out = printed(capsys, read).replace(f"{tmp_path}", "")
    out += printed(capsys, f"read book.txt books/1.txt --run run {QUICK}")
    monkeypatch.chdir(tmp_path)
    out += printed(capsys, "inspect m")
    assert "nats per token, " in out
    assert "stored as bf16" in out
    assert max(map(len, out.splitlines())) <= 80


def test_what_is_piped_has_no_frames(
    book: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no terminal is, a table is columns that programs can take apart; else it has frames."""
    monkeypatch.setenv("COLUMNS", "100")
    read = f"read {book} {book} --run {book.parent / 'run'} {QUICK}"
    piped = printed(capsys, read).splitlines()
    assert piped[1].split() == ["tokens", "nats/token", "perplexity", "bits/byte"]
    name, tokens, *figures = piped[3].split()
    assert name.endswith(book.name)
    assert tokens == str(len(TEXT.encode()))
    assert all(float(figure) > 0 for figure in figures)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "┃ tokens ┃" in re.sub(r"\x1b\[[\d;]*m", "", printed(capsys, read))


def test_standard_input(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """- is what comes from a pipe, bytes that are no UTF-8 included."""
    run = book.parent / "run"
    stdin = io.TextIOWrapper(io.BytesIO(TEXT.encode() + b"\xff"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", stdin)
        capsys.readouterr()
        main(["read", "-", "--run", str(run), "--json", *QUICK.split()])
    out, err = capsys.readouterr()
    assert json.loads(out)["tokens"] == len(TEXT.encode()) + len("\ufffd".encode())
    assert err.endswith("melodi: - is not all UTF-8: what is not was read as U+FFFD\n")


def test_mistakes_in_reading(
    book: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One line each, before anything is read where that can be."""
    run, binary, empty = book.parent / "run", tmp_path / "x.bin", tmp_path / "empty.txt"
    binary.write_bytes(b"\0\1\2")
    empty.write_text("")
    several = tmp_path / "several"
    model = load(run)
    model(torch.zeros(2, 20, dtype=torch.long), model.empty_state(2))[1].save(several)
    for command, message in {
        "read": "FILE",
        f"read /none --run {run}": "/none is no file",
        f"read {book} {book} /none --run {run} --rows 1": "/none is no file",
        f"read {binary} --run {run}": "is binary: give a text",
        f"read {empty} --run {run}": "is empty: give something to read",
        f"read {book} --run {run} --rows 0": "--rows 0 must be at least 1",
        f"read {book} --run {run} --save /none/x": "--save /none/x cannot be written: there is no",
        f"read {book} --run {run} --save {tmp_path}": "is a folder: give a file",
        f"read {book} {book} --run {run} --save {tmp_path}/x": "--save is for one document",
        f"read {book} {book} --run {run} --memory x": "--memory is for one document",
        f"read {book} --run {run} --memory {book}": "not a whole safetensors file",
        f"read {book} --run {run} --memory {several}": "holds 2 documents: give a file of one",
        f"generate --run {run} --memory {several}": "holds 2 documents: give a file of one",
        f"generate --run {run} --memory {run}/model.safetensors": "is not a memory file",
        f"generate --run {run} --top-p 2": "top_p=2.0 must be above 0 and at most 1",
        f"generate --run {run} --stop ''": "--stop is empty: give some text",
        f"generate --run {run} --prompt ''": "--prompt '' holds no token",
        f"generate --run {run} --prompt '\udcff'": "--prompt holds bytes that are no UTF-8",
        f"inspect {book}": "not a whole safetensors file",
        "inspect /none": "/none does not exist",
    }.items():
        assert message in refused(capsys, command)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_saves_what_was_read(
    number: signal.Signals,
    book: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Ctrl-C ends a reading with 130, SIGTERM with 143; its memory file is that of the windows
    read, two at a time here."""
    run, memory = book.parent / "run", tmp_path / "memory"
    monkeypatch.setattr(texts, "CHUNK_WINDOWS", 2)
    add, windows = TextRead.add, []

    def interrupted(result: TextRead, nats_T: torch.Tensor) -> Evaluation:
        windows.append(nats_T)
        if len(windows) == 3:
            os.kill(os.getpid(), number)
        return add(result, nats_T)

    monkeypatch.setattr(TextRead, "add", interrupted)
    with pytest.raises(SystemExit) as end:
        main(["read", str(book), "--run", str(run), "--save", str(memory), *QUICK.split()])
    assert end.value.code == 128 + number
    model = load(run)
    reader = StreamReader.load(model, memory)
    (count,) = reader.tokens_read
    out, error = capsys.readouterr()
    assert (out, count) == ("", 64)
    assert error.endswith(f"interrupted after 64 tokens: what was read is in {memory}\n")
    rest = reader.read(TEXT[count:])
    expected = StreamReader(model).read(TEXT)
    torch.testing.assert_close(rest, expected[count:], rtol=0, atol=1e-5)
