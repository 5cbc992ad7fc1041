"""Small corpora, and what became of them."""

import hashlib
import random
from pathlib import Path

from melodi.data.corpus import open_source
from melodi.data.store import SPLITS, TokenStore


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


def texts_of(store: TokenStore, *splits: str) -> list[str]:
    """The documents of these splits, or of all."""
    return [store.tokenizer.decode(ids) for split in splits or SPLITS for ids in store.split(split)]


def contents(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def read(source: str | Path) -> list[str]:
    return ["".join(document.pieces()) for document in open_source(source).documents()]
