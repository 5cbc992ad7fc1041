"""From sources to documents: what is read, in which order and pieces, and what is left out."""

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from texts import read, stories, write_folder

from melodi.data import corpus, text, vocabulary
from melodi.data.corpus import (
    Source,
    hub_documents,
    official_splits,
    open_source,
    standard_library,
)
from melodi.data.splits import Shares


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
    far = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    long = zstandard.ZstdCompressor(compression_params=far).compress(lines)
    (tmp_path / "long.jsonl.zst").write_bytes(long)
    folder = write_folder(tmp_path / "in", stories(20))
    for source in ("in", "long.jsonl.zst", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        assert read(tmp_path / source) == texts, source
    assert read(folder / "000.txt") == texts[:1]


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
    with pytest.raises(ValueError, match=r"x/train:0 has no column 'txt', but text: choose"):
        list(hub_documents(parts | {"test": []}, "x", "txt", 0))


def test_a_broken_stream_is_no_fault_of_its_text() -> None:
    """Whatever the hub raises, a ValueError too, is an OSError: what was prepared is kept."""

    def breaks() -> Iterator[dict[str, str]]:
        yield {"text": "a"}
        raise ValueError("Couldn't\nreach it")

    documents = hub_documents({"train": breaks()}, "x", "text", 0)
    assert "".join(next(documents).pieces()) == "a"
    with pytest.raises(OSError, match=r"source 'x' cannot be read \(Couldn't reach it\): mend"):
        next(documents)


def test_held_out_documents_are_no_part_of_a_remote_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However large the parts are that are read first, the vocabulary sees training documents."""
    monkeypatch.setattr(vocabulary, "REMOTE_SAMPLE_BYTES", 100)
    held_out = [{"text": f"{n} held out " * 20} for n in range(9)]
    parts = {"validation": held_out, "train": [{"text": f"{n} training " * 20} for n in range(9)]}
    source = Source("x", lambda: hub_documents(parts, "x", "text", 0), is_remote=True)
    texts = vocabulary.sample([source], Shares(0.1, 0.1))
    assert texts
    assert all("training" in text for text in texts)


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


@given(st.text("ab \n猫", max_size=300), st.lists(st.integers(0, 300), max_size=8))
def test_cuts_depend_on_the_text_alone(whole: str, edges: list[int]) -> None:
    """Pieces are short, lose nothing, and are the same whatever blocks the text came in."""
    places = [0, *sorted(min(edge, len(whole)) for edge in edges), len(whole)]
    blocks = [whole[a:b] for a, b in itertools.pairwise(places)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "PIECE", 16)
        pieces = list(text.cut([whole]))
        assert list(text.cut(blocks)) == pieces
    assert "".join(pieces) == whole
    assert all(0 < len(piece) <= 16 for piece in pieces)


@pytest.mark.parametrize("name", ["validation", "valid", "val", "dev"])
def test_validation_has_several_names(name: str, tmp_path: Path) -> None:
    """Whatever the validation part is called, its documents are read, before the others, and are
    held out; on the hub too."""
    texts = {"train/a.txt": "a", f"{name}/b.txt": "b", "test/c.txt": "c"}
    source = open_source(write_folder(tmp_path / "in", texts))
    assert [(d.name, d.split) for d in source.documents()] == [
        (f"{name}/b.txt", "validation"),
        ("test/c.txt", "test"),
        ("train/a.txt", "train"),
    ]
    parts = {part: [{"text": part}] for part in ("train", name)}
    assert [d.split for d in hub_documents(parts, "x", "text", 0)] == ["validation", "train"]
    assert official_splits(["test", name]) == {}


def test_ignored_files_are_told(tmp_path: Path) -> None:
    """A source knows every visible file of its folder that it does not read, and why."""
    texts = {"a.TXT": "a", "b.html": "b", "c.txt.gz": "c", "README": "d", "e.txt": "e", ".f": "f"}
    source = open_source(write_folder(tmp_path / "in", texts))
    assert source.ignored == {
        "README": "without suffix",
        "a.TXT": ".TXT",
        "b.html": ".html",
        "c.txt.gz": ".gz",
    }
    write_folder(tmp_path / "in", {"train/x.txt": "x", "test/y.txt": "y", "test/z.pdf": "z"})
    source = open_source(tmp_path / "in")
    assert source.ignored["e.txt"] == "outside the splits"
    assert source.ignored["test/z.pdf"] == ".pdf"
    assert len(source.ignored) == 6


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """It is dropped from the beginning of a file, a line and a record, and kept elsewhere."""
    mark = "\ufeff"
    lines = mark + json.dumps({"text": "a"}) + "\n" + json.dumps({"text": mark + "b"}) + "\n"
    texts = {"a.jsonl": lines, "b.txt": mark + "c" + mark, "c.txt": mark}
    folder = write_folder(tmp_path / "in", texts)
    assert read(folder) == ["a", "b", "c" + mark, ""]
    (document,) = open_source(folder / "c.txt").documents()
    assert list(document.pieces()) == []
    assert document.reason_to_skip(()) == "empty"
