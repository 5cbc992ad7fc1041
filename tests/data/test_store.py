"""A token store on disk: damage is noticed, and named in one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from melodi.data.prepare import prepare
from melodi.data.store import SPLITS, Documents, TokenStore
from melodi.files import checksum


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
    for ask in (TokenStore.open(good).split, TokenStore.open(good).verify):
        with pytest.raises(ValueError, match="split 'dev' is unknown"):
            ask("dev")


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["index", "tokens"])
def test_a_flipped_bit_is_noticed(split: str, kind: str, folder: Path, tmp_path: Path) -> None:
    """One bit anywhere in an index is noticed when the store is opened, one in the tokens when they
    are verified, which is asked for by split or for all."""
    path = prepare(folder, tmp_path / "out", tokenizer="bytes").path / f"{split}.{kind}"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    message = rf"{split}.{kind} is damaged: its checksum differs"
    if kind == "index":
        with pytest.raises(ValueError, match=message):
            TokenStore.open(tmp_path / "out")
        return
    store = TokenStore.open(tmp_path / "out")
    store.verify(*(other for other in SPLITS if other != split))
    for splits in ((), (split,)):
        with pytest.raises(ValueError, match=message):
            store.verify(*splits)


def test_tokens_are_verified_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often a store is asked to verify, it reads each file once."""
    store = prepare(folder, tmp_path / "out", tokenizer="bytes")
    read = []

    def counted(path: Path) -> str:
        read.append(path.name)
        return checksum(path)

    monkeypatch.setattr("melodi.data.store.checksum", counted)
    store.verify("test")
    for _ in range(3):
        store.verify()
    assert sorted(read) == sorted(f"{split}.tokens" for split in SPLITS)


DAMAGE: dict[str, Any] = {
    "its manifest.json is not one of melodi-store": lambda m: [m],
    "has version None and this melodi reads 1": lambda m: without(m, "version"),
    "dtype=None, not uint16 or uint32": lambda m: without(m, "dtype"),
    "dtype='float32', not uint16": lambda m: m | {"dtype": "float32"},
    "vocab_size=None is no int": lambda m: without(m, "vocab_size"),
    "vocab_size='257' is no int": lambda m: m | {"vocab_size": "257"},
    "tokenizer_digest=None is no str": lambda m: without(m, "tokenizer_digest"),
    "splits=None is no dict": lambda m: without(m, "splits"),
    "test=None is no dict": lambda m: m | {"splits": without(m["splits"], "test")},
    "checksums=None is no dict": lambda m: (
        m | {"splits": m["splits"] | {"train": without(m["splits"]["train"], "checksums")}}
    ),
}


def without(record: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != key}


def test_damaged_manifests_are_refused(folder: Path, tmp_path: Path) -> None:
    """A manifest that lacks something, or has something else there, is refused by name and value,
    in one line."""
    path = prepare(folder, tmp_path / "out", tokenizer="bytes").path / "manifest.json"
    manifest = json.loads(path.read_text())
    for message, damage in DAMAGE.items():
        path.write_text(json.dumps(damage(manifest)))
        with pytest.raises(ValueError, match=message) as error:
            TokenStore.open(tmp_path / "out")
        assert "\n" not in str(error.value)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"manifest.json is not JSON"):
        TokenStore.open(tmp_path / "out")


@pytest.mark.parametrize("kind", ["no npy", "another shape"])
def test_an_index_that_is_none_is_named(kind: str, folder: Path, tmp_path: Path) -> None:
    """An index with the right checksum that cannot be one is refused, and the line names it."""
    store = prepare(folder, tmp_path / "out", tokenizer="bytes").path
    index = store / "test.index"
    if kind == "no npy":
        index.write_bytes(b"not an array")
    else:
        with index.open("wb") as file:
            np.save(file, np.zeros((2, 9), np.int64))
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["splits"]["test"]["checksums"]["index"] = checksum(index)
    (store / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"test.index is (no index|not the index of)"):
        TokenStore.open(store)


def test_documents_in_memory() -> None:
    """Documents can be given as lists of ids, of any length, without text."""
    documents = Documents.in_memory([[5, 6, 7], [], [70_000]])
    assert [ids.tolist() for ids in documents] == [[5, 6, 7], [], [70_000]]
    assert documents.lengths.tolist() == [3, 0, 1]
    assert documents.num_bytes.tolist() == [0, 0, 0]
    assert len(Documents.in_memory([])) == 0
