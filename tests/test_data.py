"""From text to token store to rows: what is kept, where it goes, and how rows walk through it."""

import gzip
import hashlib
import itertools
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from melodi.cli.prepare import prepare as prepare_command
from melodi.data import corpus
from melodi.data import prepare as draft
from melodi.data.corpus import Document, hub_documents, open_source, standard_library
from melodi.data.prepare import SPLITS, Shares, assign_splits, place_of, sample
from melodi.data.store import Batch, Documents, Rows, TokenStore, prepare
from melodi.data.tokenizer import load_tokenizer


def write_folder(folder: Path, texts: dict[str, str | bytes]) -> Path:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def stories(count: int, seed: int = 0) -> dict[str, str]:
    draw = random.Random(seed)
    words = ["the", "a", "cat", "dog", "sat", "under", "mat", "and", "then", "é", "猫", "\n"]
    return {
        f"{i:03}.txt": f"{i}: " + " ".join(draw.choices(words, k=draw.randrange(1, 200)))
        for i in range(count)
    }


def texts_of(store: TokenStore, split: str) -> list[str]:
    return [store.tokenizer.decode(ids) for ids in store.split(split)]


def contents(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def read(source: str | Path) -> list[str]:
    return ["".join(document.pieces()) for document in open_source(source).documents()]


# What a store holds


@pytest.mark.parametrize("options", [{"tokenizer": "bytes"}, {"vocab_size": 300}])
def test_store_holds_each_document_encoded(options: dict[str, object], tmp_path: Path) -> None:
    """Each document is stored whole: its own encoding, closed by the end of document."""
    texts = stories(40)
    store = prepare([write_folder(tmp_path / "in", texts)], tmp_path / "out", **options)
    store.verify()
    expected = {
        (*store.tokenizer.encode(t), store.tokenizer.end_of_document) for t in texts.values()
    }
    stored = [tuple(ids.tolist()) for split in SPLITS for ids in store.split(split)]
    assert set(stored) == expected
    assert len(stored) == len(texts)
    for split in SPLITS:
        documents, about = store.split(split), store.manifest["splits"][split]
        assert documents.num_bytes.tolist() == [len(t.encode()) for t in texts_of(store, split)]
        assert about["documents"] == len(documents) > 0
        assert about["tokens"] == documents.lengths.sum()
        assert about["bytes"] == documents.num_bytes.sum()


def test_large_vocabularies_need_more_bits(tmp_path: Path) -> None:
    """Ids are stored in 16 bits up to a vocabulary of 65,536, in 32 above."""
    store = prepare([write_folder(tmp_path / "in", stories(3))], tmp_path / "a", vocab_size=300)
    definition = json.loads((store.path / "tokenizer.json").read_text())
    definition["model"]["vocab"] |= {f"word{i}": 300 + i for i in range(65_300)}
    (tmp_path / "large.json").write_text(json.dumps(definition))
    large = prepare([tmp_path / "in"], tmp_path / "b", tokenizer=tmp_path / "large.json")
    assert (store.manifest["dtype"], large.manifest["dtype"]) == ("uint16", "uint32")
    assert texts_of(large, "train") == texts_of(store, "train")


def test_all_formats_give_the_same_documents(tmp_path: Path) -> None:
    """Text files, JSON lines, compressed or not, and parquet are read alike."""
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    zstandard = pytest.importorskip("zstandard")
    texts = list(stories(20).values())
    lines = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    halves = [zstandard.compress(part) for part in (lines[:500], lines[500:])]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(halves))
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    folder = write_folder(tmp_path / "in", stories(20))
    for source in ("in", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        assert read(tmp_path / source) == texts, source
    assert read(folder / "000.txt") == texts[:1]


def test_sources_can_be_mixed(tmp_path: Path) -> None:
    """Several sources make one store, a duplicate between them is kept once."""
    folder = write_folder(tmp_path / "in", stories(5))
    (tmp_path / "more.jsonl").write_text('{"body": "one more"}\n{"body": "and another"}\n')
    shutil.copy(folder / "000.txt", tmp_path / "copy.md")
    sources = [folder, tmp_path / "more.jsonl", tmp_path / "copy.md"]
    store = prepare(sources, tmp_path / "out", tokenizer="bytes", text_column="body")
    stored = sorted(text for split in SPLITS for text in texts_of(store, split))
    assert stored == sorted([*stories(5).values(), "one more", "and another"])
    assert store.manifest["skipped"] == {"duplicate": 1}


def test_hub_records_become_documents(tmp_path: Path) -> None:
    """What `load_dataset` streams keeps its splits and its order, held-out parts first."""
    parts = {"train": [{"text": "a"}, {"text": None}], "test": [{"text": "b"}]}
    documents = list(hub_documents(parts, "pg19", "text", 7))
    assert [(d.name, d.split, d.min_tokens) for d in documents] == [
        ("pg19/test:0", "test", 7),
        ("pg19/train:0", "train", 7),
        ("pg19/train:1", "train", 7),
    ]
    assert ["".join(d.pieces()) for d in documents] == ["b", "a", ""]
    assert [d.split for d in hub_documents({"train": parts["train"]}, "x", "text", 0)] == [None] * 2
    with pytest.raises(ValueError, match=r"x/train:0 has no column 'txt': .* from text"):
        list(hub_documents(parts | {"test": []}, "x", "txt", 0))


def test_streamed_dataset_makes_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named dataset is loaded with streaming, and documents that are too short are dropped."""
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(*args: object, **kwargs: object) -> object:
        calls.append((args, kwargs))
        records = [{"text": f"{i} " * (3000 if i % 2 else 10)} for i in range(8)]
        return {"train": datasets.Dataset.from_list(records).to_iterable_dataset()}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    store = prepare(["c4-4k"], tmp_path / "out", tokenizer="bytes")
    assert calls[0] == (("allenai/c4", "en"), {"data_files": None, "streaming": True})
    assert store.manifest["skipped"] == {"short": 4}
    assert sum(len(store.split(split)) for split in SPLITS) == 4


def test_embedded_corpus_is_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sources the long files of the running Python are taken, in a fixed order; where they
    are few, the not so long ones too."""
    source = standard_library()
    names = [document.name for document in source.documents()]
    assert names == sorted(names)
    assert "argparse.py" in names
    assert not any("site-packages" in name for name in names)
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _: str(Path(json.__file__).parent))
    assert "over 4 kB" in standard_library().description


# Splits


def test_splits_of_a_folder_are_kept(tmp_path: Path) -> None:
    """Folders train and test are the splits; of equal documents the held-out one is kept."""
    texts = {"train/a.txt": "a", "train/b.txt": "same", "test/c.txt": "same", "readme.md": "no"}
    store = prepare([write_folder(tmp_path / "in", texts)], tmp_path / "out", tokenizer="bytes")
    assert [texts_of(store, split) for split in SPLITS] == [["a"], [], ["same"]]


def test_a_lone_test_folder_is_no_split(tmp_path: Path) -> None:
    """A folder called test beside other text, as in any source tree, holds ordinary documents."""
    texts = {f"test/{name}": text for name, text in stories(3).items()} | {"x.py": "x = 1"}
    store = prepare([write_folder(tmp_path / "in", texts)], tmp_path / "out", tokenizer="bytes")
    assert len(store.split("train")) == 2


@given(st.integers(1, 300), st.integers(0, 50))
def test_splits_are_never_empty_where_possible(count: int, seed: int) -> None:
    """One document trains, of two one is held out, three or more fill every split."""
    places = np.array([place_of(f"{seed}/{i}") for i in range(count)])
    splits = assign_splits(places, np.full(count, -1), Shares(0.02, 0.02))
    found = set(splits.tolist())
    assert 0 in found
    assert len(found) == min(count, 3)


@given(st.integers(300, 600), st.integers(1, 300))
def test_adding_documents_moves_no_other(count: int, more: int) -> None:
    """A document's split depends on its name alone, and the shares are about those asked for."""
    places = np.array([place_of(str(i)) for i in range(count + more)])
    shares = Shares(0.1, 0.1)
    before = assign_splits(places[:count], np.full(count, -1), shares)
    after = assign_splits(places, np.full(count + more, -1), shares)
    assert (after[:count] == before).all()
    assert 0.03 < (before == 1).mean() < 0.2
    assert 0.03 < (before == 2).mean() < 0.2


# The same bytes, however it was done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts: dict[str, str | bytes] = dict(stories(30))
    texts |= {"dup.txt": texts["003.txt"], "empty.txt": "", "zero.txt": b"\0", "bad.txt": b"a\xff"}
    return write_folder(tmp_path / "in", texts)


def test_workers_change_nothing(folder: Path, tmp_path: Path) -> None:
    """One worker and several write the same bytes."""
    for workers in (1, 2, 5):
        prepare([folder], tmp_path / str(workers), vocab_size=280, workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "5")


class Killed(BaseException):
    """Stands for the end of the process: nothing tidies up after it."""


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("save_seconds", [0.0, 5.0])
def test_interrupted_equals_uninterrupted(
    seed: int,
    save_seconds: float,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopped at random moments and continued, a store has the same bytes as in one go."""
    monkeypatch.setattr(corpus, "PIECE", 64)
    prepare([folder], tmp_path / "whole", vocab_size=280)
    monkeypatch.setattr(draft, "SAVE_SECONDS", save_seconds)
    pieces, write_split, draw = Document.pieces, draft.write_split, random.Random(seed)
    patience = 0

    def may_stop() -> None:
        nonlocal patience
        patience -= 1
        if patience < 0:
            raise Killed

    def stopping_pieces(self: Document) -> Iterator[str]:
        for piece in pieces(self):
            may_stop()
            yield piece

    def stopping_write(*args: object) -> object:
        may_stop()
        return write_split(*args)

    monkeypatch.setattr(Document, "pieces", stopping_pieces)
    monkeypatch.setattr(draft, "write_split", stopping_write)
    stops = 0
    while not (tmp_path / "cut" / "manifest.json").exists():
        patience = draw.randrange(100 + 100 * stops)
        try:
            prepare([folder], tmp_path / "cut", vocab_size=280)
        except Killed:
            stops += 1
            with (tmp_path / "cut" / "draft.tokens").open("ab") as file:
                file.write(b"torn")
    assert stops > 0
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_killed_equals_uninterrupted(folder: Path, tmp_path: Path) -> None:
    """The process itself is killed, several times, also before the first document."""
    command = (
        "import os, sys, threading\n"
        "from melodi.data import corpus, prepare as draft\n"
        "from melodi.data.store import prepare\n"
        "corpus.PIECE, draft.SAVE_SECONDS = 64, 0\n"
        "threading.Timer(float(sys.argv[3]), lambda: os.kill(os.getpid(), 9)).start()\n"
        "prepare([sys.argv[1]], sys.argv[2], tokenizer='bytes')\n"
        "os._exit(0)\n"
    )
    for seconds in (0.001, 0.01, 0.05, 60):
        arguments = [str(folder), str(tmp_path / "cut"), str(seconds)]
        code = subprocess.run([sys.executable, "-c", command, *arguments]).returncode
        if code == 0:
            break
    prepare([folder], tmp_path / "whole", tokenizer="bytes")
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@given(st.text("ab \n猫", max_size=300), st.lists(st.integers(0, 300), max_size=8))
def test_cuts_depend_on_the_text_alone(text: str, edges: list[int]) -> None:
    """Pieces are short, lose nothing, and are the same whatever blocks the text came in."""
    places = [0, *sorted(min(edge, len(text)) for edge in edges), len(text)]
    blocks = [text[a:b] for a, b in itertools.pairwise(places)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PIECE", 16)
        pieces = list(corpus.cut([text]))
        assert list(corpus.cut(blocks)) == pieces
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= 16 for piece in pieces)


def test_the_sample_is_even_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary is trained on a bounded part of the training documents, from all over them."""
    monkeypatch.setattr(draft, "SAMPLE_CHARACTERS", 1000)
    texts = {f"{i:04}.txt": f"{i:04}" * 5 for i in range(1000)}
    source = open_source(write_folder(tmp_path / "in", texts))
    numbers = [int(block[:4]) for block in sample([source], Shares(0.2, 0.2))]
    assert 25 <= len(numbers) <= 50
    assert max(np.diff(numbers)) < 100
    held_out = Shares(0.2, 0.2).splits(np.array([place_of(f"{i:04}.txt") for i in numbers]))
    assert not held_out.any()


# Bad input


def test_bad_documents_are_skipped_or_mended_and_counted(tmp_path: Path) -> None:
    """Empty, binary and duplicate documents are skipped, invalid UTF-8 is replaced; all counted."""
    texts: dict[str, str | bytes] = {
        "a.txt": "good",
        "b.txt": "good",
        "c.txt": "",
        "d.txt": " \n",
        "e.txt": b"PK\0\1",
        "f.txt": b"caf\xe9 au lait",
        "g.txt": b"cut short \xe2\x82",
        "h.jsonl": b'{"text": "half \\ud83d"}\n{"text": null}\n{"text": "\xff"}\n',
    }
    store = prepare([write_folder(tmp_path / "in", texts)], tmp_path / "out", tokenizer="bytes")
    assert store.manifest["skipped"] == {"binary": 1, "duplicate": 1, "empty": 3}
    assert store.manifest["repaired"] == {"invalid UTF-8": 4}
    stored = {text for split in SPLITS for text in texts_of(store, split)}
    assert stored == {"good", "caf� au lait", "cut short �", "half �", "�"}


def test_one_endless_line(tmp_path: Path) -> None:
    """A line of many pieces, with spaces or without, is one document and loses nothing."""
    texts = {"a.txt": "word " * 200_000, "b.txt": "猫" * 600_000}
    store = prepare([write_folder(tmp_path / "in", texts)], tmp_path / "out", vocab_size=260)
    assert {text for split in SPLITS for text in texts_of(store, split)} == set(texts.values())


def damaged(path: Path) -> Path:
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-10])
    return path


REFUSED = {
    r"source 'nowhere' does not exist: give a file or folder, pg19": lambda d: "nowhere",
    r"no documents in .*: none of \*.txt": lambda d: write_folder(d, {"a.bin": "x"}),
    r"no documents in .* \(skipped: 1 binary, 1 empty\)": lambda d: write_folder(
        d, {"a.txt": "", "b.txt": b"\0"}
    ),
    r"a.doc is of no known kind": lambda d: write_folder(d, {"a.doc": "x"}) / "a.doc",
    r"a.jsonl line 2 is not JSON": lambda d: write_folder(d, {"a.jsonl": '{"text": "a"}\n{"te'}),
    r"line 1 has no column 'text': choose --text-column from body": lambda d: write_folder(
        d, {"a.jsonl": '{"body": "a"}'}
    ),
    r"line 1 has text of type int": lambda d: write_folder(d, {"a.jsonl": '{"text": 1}'}),
    r"line 1 is a list": lambda d: write_folder(d, {"a.jsonl": "[1]"}),
    r"a.jsonl.gz is damaged": lambda d: damaged(write_folder(d, {"b.md": "x"}) / "a.jsonl.gz"),
    r"b.jsonl.gz is damaged": lambda d: write_folder(d, {"b.jsonl.gz": "no gzip"}),
    r"b.jsonl.zst is damaged": lambda d: write_folder(d, {"b.jsonl.zst": "no zstd"}),
    r"b.parquet is damaged": lambda d: write_folder(d, {"b.parquet": "no parquet"}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_sources_are_refused(message: str, tmp_path: Path) -> None:
    """A source that cannot be read is refused in one line that names it."""
    if "zst" in message or "parquet" in message:
        pytest.importorskip("zstandard")
        pytest.importorskip("pyarrow")
    source = REFUSED[message](tmp_path / "in")
    with pytest.raises(ValueError, match=message) as error:
        prepare([source], tmp_path / "out", tokenizer="bytes")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 300, "tokenizer": "bytes"}, "vocab_size=300 and tokenizer=bytes"),
        ({"vocab_size": 100}, "vocab_size=100 is too small"),
        ({"validation_share": 0.6, "test_share": 0.4}, "must leave something to train on"),
        ({"test_share": -0.1}, "test_share=-0.1"),
        ({"tokenizer": "none.model"}, "'none.model' does not exist"),
    ],
)
def test_bad_options_are_refused(
    options: dict[str, object], message: str, folder: Path, tmp_path: Path
) -> None:
    """Options that make no sense are refused, with their values."""
    with pytest.raises(ValueError, match=message):
        prepare([folder], tmp_path / "out", **options)


def test_nothing_is_overwritten(folder: Path, tmp_path: Path) -> None:
    """A finished store, someone else's folder and a store begun otherwise are left alone."""
    prepare([folder], tmp_path / "out", tokenizer="bytes")
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match="is finished and is not overwritten: choose another"):
        prepare([folder], tmp_path / "out", tokenizer="bytes")
    assert contents(tmp_path / "out") == before
    with pytest.raises(ValueError, match="in is not empty: choose another --out"):
        prepare([folder], folder, tokenizer="bytes")


def test_an_unfinished_store_is_continued_by_its_own_command_only(tmp_path: Path) -> None:
    """What was begun with other arguments is refused, and an unfinished store does not open."""
    folder = write_folder(tmp_path / "in", {"a.txt": "a", "b.jsonl": "{"})
    with pytest.raises(ValueError, match="not JSON"):
        prepare([folder], tmp_path / "out", tokenizer="bytes")
    with pytest.raises(ValueError, match="is unfinished"):
        TokenStore.open(tmp_path / "out")
    with pytest.raises(ValueError, match=r"was begun with tokenizer='.*', not 'trained, 300'"):
        prepare([folder], tmp_path / "out", vocab_size=300)
    write_folder(folder, {"c.txt": "c"})
    with pytest.raises(ValueError, match="was begun with contents="):
        prepare([folder], tmp_path / "out", tokenizer="bytes")


def test_a_full_disk_is_named_and_costs_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails is one line that says where, and the command can be given again."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(draft.Appender, "append", full)
        with pytest.raises(OSError, match=r"store .*out cannot be written \(No space left"):
            prepare([folder], tmp_path / "out", tokenizer="bytes")
    prepare([folder], tmp_path / "out", tokenizer="bytes").verify()


def test_damaged_stores_are_refused(folder: Path, tmp_path: Path) -> None:
    """A store that is cut short, of another version, or has another tokenizer is noticed."""
    good = prepare([folder], tmp_path / "good", tokenizer="bytes").path
    bad = tmp_path / "bad"

    def copy_of_store() -> Path:
        shutil.rmtree(bad, ignore_errors=True)
        return Path(shutil.copytree(good, bad))

    with pytest.raises(ValueError, match="nowhere is no token store: make one"):
        TokenStore.open(tmp_path / "nowhere")
    path = copy_of_store() / "train.tokens"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"train.tokens has \d+ bytes, not \d+"):
        TokenStore.open(bad)
    path.unlink()
    with pytest.raises(ValueError, match=r"lacks train.tokens"):
        TokenStore.open(bad)
    path = copy_of_store() / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(ValueError, match="has version 2 and this melodi reads 1"):
        TokenStore.open(bad)
    path.write_text("{}")
    with pytest.raises(ValueError, match="is no token store: its manifest"):
        TokenStore.open(bad)
    path = copy_of_store() / "test.tokens"
    path.write_bytes(bytes(len(path.read_bytes())))
    with pytest.raises(ValueError, match=r"test.tokens is damaged: its checksum differs"):
        TokenStore.open(bad).verify()
    prepare([folder], tmp_path / "other", vocab_size=300)
    shutil.copy(tmp_path / "other" / "tokenizer.json", copy_of_store())
    with pytest.raises(ValueError, match="is not the one that made the store"):
        _ = TokenStore.open(bad).tokenizer
    with pytest.raises(ValueError, match="split 'dev' is unknown"):
        TokenStore.open(good).split("dev")


def test_command_prints_the_manifest(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`melodi prepare` prints a table and what it skipped, or with --json the manifest."""
    prepare_command([str(folder), "--out", str(tmp_path / "a"), "--tokenizer", "bytes"])
    table = capsys.readouterr().out
    assert "validation" in table
    assert "skipped: 1 binary, 1 duplicate, 1 empty" in table
    prepare_command([str(folder), "--out", str(tmp_path / "b"), "--vocab-size", "300", "--json"])
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["vocab_size"] == load_tokenizer(tmp_path / "b").vocab_size <= 300


# Rows


def documents_of(lengths: list[int]) -> Documents:
    """Every token of every document is different, so that its place can be read off."""
    offsets = np.cumsum([0, *lengths])
    return Documents(np.arange(1, offsets[-1] + 1, dtype=np.uint16), np.stack([offsets, offsets]))


def walks(batches: list[Batch], row: int) -> list[list[tuple[int, int]]]:
    """The predictions of a row, one list per document that it began."""
    found: list[list[tuple[int, int]]] = []
    for batch in batches:
        if batch.starts[row]:
            found.append([])
        pairs = zip(batch.tokens[row].tolist(), batch.targets[row].tolist(), strict=True)
        found[-1] += [pair for pair in pairs if pair[1] >= 0]
    return found


LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda x: max(x) >= 2)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 9), st.integers(0, 3))
def test_rows_walk_every_document_once_an_epoch(
    lengths: list[int], num_rows: int, segment: int, seed: int
) -> None:
    """In each epoch each document of two tokens or more is walked once, by one row, from start to
    end: n-1 predictions of the next token across segment edges, then padding."""
    documents = documents_of(lengths)
    rows = Rows(documents, num_rows, segment, seed)
    batches = []
    while rows.epoch < 3:
        batches.append(rows.next())
    whole = {
        documents[i][0]: [(int(t), int(t) + 1) for t in documents[i][:-1]]
        for i in range(len(lengths))
        if lengths[i] >= 2
    }
    found = []
    for row in range(num_rows):
        *done, last = walks(batches, row)
        assert all(walk == whole[walk[0][0]] for walk in done)
        assert last == whole[last[0][0]][: len(last)]
        found += [*done, last]
    counts = [sum(walk[0][0] == first for walk in found) for first in whole]
    assert sum(counts) == round(rows.epoch * len(whole))
    assert min(counts) >= 3
    assert max(counts) - min(counts) <= 1
    segments = sum(-(-(len(walk)) // segment) for walk in found)
    assert segments == num_rows * len(batches)  # no segment is empty or more than filled
    for batch in batches:
        assert (batch.tokens[batch.targets < 0] == 0).all()


@given(LENGTHS, st.integers(1, 4), st.integers(0, 40), st.integers(0, 3))
def test_rows_resume_exactly(lengths: list[int], num_rows: int, step: int, seed: int) -> None:
    """The state after any step, through JSON, leads to the same batches as going on."""
    documents = documents_of(lengths)
    rows, resumed = Rows(documents, num_rows, 4, seed), Rows(documents, num_rows, 4, seed)
    for _ in range(step):
        rows.next()
    resumed.load_state_dict(json.loads(json.dumps(rows.state_dict())))
    for _ in range(20):
        a, b = rows.next(), resumed.next()
        assert (a.tokens == b.tokens).all()
        assert (a.targets == b.targets).all()
        assert (a.starts == b.starts).all()
    assert rows.state_dict() == resumed.state_dict()


def test_seeds_and_epochs_shuffle_differently() -> None:
    """The order is another one for each seed and each epoch."""
    documents = documents_of([2] * 50)

    def firsts(seed: int) -> list[int]:
        rows = Rows(documents, 1, 4, seed)
        return [int(rows.next().tokens[0, 0]) for _ in range(100)]

    assert firsts(1) == firsts(1)
    assert firsts(1) != firsts(2)
    assert firsts(1)[:50] != firsts(1)[50:]
    assert sorted(firsts(1)[:50]) == sorted(firsts(1)[50:])


def test_a_long_document_does_not_starve_short_ones() -> None:
    """A very long document takes one row, and all others pass by in the rest."""
    for seed in range(5):
        rows = Rows(documents_of([50_000] + [5] * 60), 4, 4, seed)
        batches = [rows.next() for _ in range(12)]
        first_tokens = {int(t) for batch in batches for t in batch.tokens[batch.starts, 0]}
        assert len(first_tokens - {1}) >= 3 * 12
        assert sum(document == 0 for document in rows.row_documents) <= 1


def test_rows_refuse_what_they_cannot_walk() -> None:
    """No document with two tokens, no rows, and a state of another store or size are refused."""
    with pytest.raises(ValueError, match="none of the 2 documents has two tokens"):
        Rows(documents_of([1, 0]), 2, 4)
    with pytest.raises(ValueError, match="num_rows=0"):
        Rows(documents_of([5]), 0, 4)
    rows = Rows(documents_of([50, 50]), 2, 4)
    rows.next()
    with pytest.raises(ValueError, match="has 2 rows and this run has 3"):
        Rows(documents_of([50, 50]), 3, 4).load_state_dict(rows.state_dict())
    with pytest.raises(ValueError, match="is not in these documents"):
        Rows(documents_of([3, 3]), 2, 4).load_state_dict(rows.state_dict())
