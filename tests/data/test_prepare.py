"""From text to token store: what is kept, where it goes, and that interruptions change nothing."""

import gzip
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from texts import contents, stories, texts_of, write_folder

from melodi.cli.prepare import prepare as prepare_command
from melodi.data import appender, text, writer
from melodi.data.prepare import prepare
from melodi.data.store import SPLITS, TokenStore
from melodi.data.text import Document
from melodi.data.tokenizer import load_tokenizer
from melodi.files import locked


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


def test_sources_can_be_mixed(tmp_path: Path) -> None:
    """Several sources make one store, a duplicate between them is kept once."""
    folder = write_folder(tmp_path / "in", stories(5))
    (tmp_path / "more.jsonl").write_text('{"body": "one more"}\n{"body": "and another"}\n')
    shutil.copy(folder / "000.txt", tmp_path / "copy.md")
    sources = [folder, tmp_path / "more.jsonl", tmp_path / "copy.md"]
    store = prepare(sources, tmp_path / "out", tokenizer="bytes", text_column="body")
    assert sorted(texts_of(store)) == sorted([*stories(5).values(), "one more", "and another"])
    assert store.manifest["skipped"] == {"duplicate": 1}


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
    monkeypatch.setattr(text, "PIECE", 64)
    prepare([folder], tmp_path / "whole", vocab_size=280)
    monkeypatch.setattr(appender, "SAVE_SECONDS", save_seconds)
    pieces, write_split = Document.pieces, writer.StoreWriter._write_split
    draw = random.Random(seed)
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
    monkeypatch.setattr(writer.StoreWriter, "_write_split", stopping_write)
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
    """The process itself is killed, several times, each time while it waits for the disk: when it
    has begun, and further on."""
    command = (
        "import os, sys\n"
        "from melodi.data import appender, text\n"
        "from melodi.data.prepare import prepare\n"
        "text.PIECE, appender.SAVE_SECONDS = 64, 0\n"
        "fsync, left = os.fsync, int(sys.argv[3])\n"
        "def deadly(file):\n"
        "    global left\n"
        "    left -= 1\n"
        "    os.kill(os.getpid(), 9) if left < 0 else fsync(file)\n"
        "os.fsync = deadly\n"
        "prepare([sys.argv[1]], sys.argv[2], tokenizer='bytes')\n"
    )
    codes = []
    for patience in (0, 3, 20, 10_000):
        arguments = [str(folder), str(tmp_path / "cut"), str(patience)]
        codes.append(subprocess.run([sys.executable, "-c", command, *arguments]).returncode)
    assert codes == [-9, -9, -9, 0]
    prepare([folder], tmp_path / "whole", tokenizer="bytes")
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


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
    assert store.manifest["skipped_names"]["binary"] == ["e.txt"]
    assert store.manifest["skipped_names"]["empty"] == ["c.txt", "d.txt", "h.jsonl:1"]
    assert store.manifest["repaired_names"] == {
        "invalid UTF-8": ["f.txt", "g.txt", "h.jsonl:0", "h.jsonl:2"]
    }
    assert set(texts_of(store)) == {"good", "caf� au lait", "cut short �", "half �", "�"}
    skipped, lost, where = store.remarks()
    assert skipped == "skipped: 1 binary, 1 duplicate, 3 empty"
    assert lost.startswith("characters lost in 4 documents (4 invalid UTF-8): what could not be")
    assert where.endswith("manifest.json")


def test_only_some_are_named_but_all_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many documents are skipped and files ignored, the manifest stays small."""
    monkeypatch.setattr(writer, "MOST_NAMES", 3)
    texts: dict[str, str | bytes] = {f"{i}.txt": " " * i for i in range(9)} | {"x.txt": "text"}
    texts |= {f"{i}.html": "page" for i in range(7)}
    store = prepare(write_folder(tmp_path / "in", texts), tmp_path / "out", tokenizer="bytes")
    assert store.manifest["skipped"] == {"empty": 9}
    assert store.manifest["skipped_names"] == {"empty": ["0.txt", "1.txt", "2.txt"]}
    assert store.manifest["ignored"] == {".html": 7}
    assert store.manifest["ignored_names"] == {".html": ["0.html", "1.html", "2.html"]}
    assert store.remarks()[:2] == ["skipped: 9 empty", "ignored: 7 .html"]


def test_one_endless_line(tmp_path: Path) -> None:
    """A line of many pieces, with spaces or without, is one document and loses nothing."""
    texts = {"a.txt": "word " * 200_000, "b.txt": "猫" * 600_000}
    store = prepare([write_folder(tmp_path / "in", texts)], tmp_path / "out", vocab_size=260)
    assert set(texts_of(store)) == set(texts.values())


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
    r"line 1 has no column 'text', but body: choose --text-column, or mend": lambda d: write_folder(
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
    """A source that cannot be read is refused in one line that names it, and leaves nothing behind
    that would refuse a better one, with another tokenizer, in the same place."""
    if "zst" in message or "parquet" in message:
        pytest.importorskip("zstandard")
        pytest.importorskip("pyarrow")
    source = REFUSED[message](tmp_path / "in")
    with pytest.raises(ValueError, match=message) as error:
        prepare([source], tmp_path / "out", tokenizer="bytes")
    assert "\n" not in str(error.value)
    good = write_folder(tmp_path / "good", stories(3))
    assert len(texts_of(prepare([good], tmp_path / "out", 300))) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 300, "tokenizer": "bytes"}, "vocab_size=300 and tokenizer=bytes"),
        ({"vocab_size": 100}, "vocab_size=100 is too small"),
        ({"vocab_size": 0}, "vocab_size=0 is too small"),
        ({"vocab_size": 10**23}, f"vocab_size={10**23} is too large: give at most 1048576"),
        ({"validation_share": 0.6, "test_share": 0.4}, "must leave something to train on"),
        ({"test_share": -0.1}, "test_share=-0.1"),
        ({"validation_share": float("nan")}, "validation_share=nan"),
        ({"test_share": float("nan")}, "test_share=nan"),
        ({"test_share": float("inf")}, "test_share=inf"),
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"workers": -1}, "workers=-1 must be at least 1"),
        ({"tokenizer": "none.model"}, "'none.model' does not exist"),
    ],
)
def test_bad_options_are_refused(
    options: dict[str, object], message: str, folder: Path, tmp_path: Path
) -> None:
    """Options that make no sense are refused, with their values, before anything is written."""
    with pytest.raises(ValueError, match=message):
        prepare([folder], tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(folder: Path, tmp_path: Path) -> None:
    """A finished store, someone else's folder and a store begun otherwise are left alone."""
    prepare([folder], tmp_path / "out", tokenizer="bytes")
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match="is finished and is not overwritten: choose another"):
        prepare([folder], tmp_path / "out", tokenizer="bytes")
    assert contents(tmp_path / "out") == before
    before = contents(folder)
    with pytest.raises(ValueError, match="in is not empty: choose another --out"):
        prepare([folder], folder, tokenizer="bytes")
    assert contents(folder) == before


def test_an_unfinished_store_is_continued_by_its_own_command_only(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was begun with other arguments is refused and stays, and an unfinished store does not
    open."""

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(writer.StoreWriter, "_write_split", killed)
        with pytest.raises(Killed):
            prepare([folder], tmp_path / "out", tokenizer="bytes")
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match="is unfinished"):
        TokenStore.open(tmp_path / "out")
    with pytest.raises(ValueError, match=r"was begun with tokenizer='.*', not 'trained, 300'"):
        prepare([folder], tmp_path / "out", vocab_size=300)
    assert contents(tmp_path / "out") == before
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
        patch.setattr(appender.Appender, "append", full)
        with pytest.raises(OSError, match=r"store .*out cannot be written \(No space left"):
            prepare([folder], tmp_path / "out", tokenizer="bytes")
    prepare([folder], tmp_path / "out", tokenizer="bytes").verify()


def test_one_process_at_a_time(folder: Path, tmp_path: Path) -> None:
    """While one process makes a store, a second one is refused and touches nothing."""
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out"):
        before = contents(tmp_path / "out")
        with pytest.raises(ValueError, match=r"another process is working in .*out"):
            prepare([folder], tmp_path / "out", tokenizer="bytes")
        assert contents(tmp_path / "out") == before
    prepare([folder], tmp_path / "out", tokenizer="bytes").verify()


def test_one_source_need_not_be_a_list(folder: Path, tmp_path: Path) -> None:
    """A single source may be given as it is, as a string or a path."""
    for number, source in enumerate((str(folder), folder, [folder])):
        prepare(source, tmp_path / str(number), tokenizer="bytes")
    assert contents(tmp_path / "0") == contents(tmp_path / "1") == contents(tmp_path / "2")


def test_a_mended_source_is_taken(tmp_path: Path) -> None:
    """What was refused half way is forgotten, documents that were good included."""
    folder = write_folder(tmp_path / "in", {"a.txt": "a", "b.jsonl": '{"text": "b"}\n{'})
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        prepare(folder, tmp_path / "out", tokenizer="bytes")
    with pytest.raises(ValueError, match="no column 'txet'"):
        prepare(folder, tmp_path / "out", tokenizer="bytes", text_column="txet")
    write_folder(folder, {"b.jsonl": '{"text": "b"}'})
    assert sorted(texts_of(prepare(folder, tmp_path / "out", 300))) == ["a", "b"]


def test_command_prints_the_manifest(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`melodi prepare` prints a table and what it left out, or with --json the manifest."""
    write_folder(folder, {"page.html": "ignored"})
    prepare_command([str(folder), "--out", str(tmp_path / "a"), "--tokenizer", "bytes"])
    table = capsys.readouterr().out
    assert "validation" in table
    assert "skipped: 1 binary, 1 duplicate, 1 empty" in table
    assert "ignored: 1 .html" in table
    assert "characters lost in 1 documents" in table
    prepare_command([str(folder), "--out", str(tmp_path / "b"), "--vocab-size", "300", "--json"])
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["vocab_size"] == load_tokenizer(tmp_path / "b").vocab_size <= 300
