"""CORPUS -> SHARDS: the part of a corpus that one of several machines prepares.

1. The files of all sources, in reading order, are cut into as many runs as there are machines, of
   about equal bytes. Every machine lists all files, and reads those of its own run.
2. What it makes of them is the draft of a store that is not dealt out into splits, with the names
   of all documents that were read. merge.py joins the shards.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from melodi.data.corpus import Source
from melodi.files import read_json

FORMAT, VERSION = "melodi-shard", 1
SHARD = "shard.json"
"""A finished shard has it, in place of a store's manifest."""


@dataclass(frozen=True)
class Shard:
    """One of several parts of a corpus; numbers begin with 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        shard = cls(int(found[1]), int(found[2])) if found else cls(0, 0)
        if not 1 <= shard.number <= shard.count:
            raise ValueError(f"--shard {text} is no part of a whole: give 1/4 to 4/4, say")
        return shard

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def of(self, corpus: list[Source]) -> list[Source]:
        """This shard's share of each source."""
        for source in corpus:
            if not source.file_sizes:
                raise ValueError(
                    f"source {source.description} cannot be divided into shards: download its "
                    "files and give their folder"
                )
        total = max(sum(sum(source.file_sizes) for source in corpus), 1)
        parts, before = [], 0
        for source in corpus:
            mine = []
            for i, size in enumerate(source.file_sizes):
                # Where the middle of the file lies among all bytes.
                owner = (2 * before + size) * self.count // (2 * total)
                if min(owner, self.count - 1) == self.number - 1:
                    mine.append(i)
                before += size
            parts.append(source.only(slice(mine[0], mine[-1] + 1) if mine else slice(0, 0)))
        return parts


def read_shard(folder: Path) -> dict[str, Any]:
    """What a finished shard says of itself."""
    path = folder / SHARD
    if not path.is_file():
        raise ValueError(
            f"{folder} is no finished shard: run its melodi prepare --shard, again if it stopped"
        )
    about = read_json(path)
    if not isinstance(about, dict) or (about.get("format"), about.get("version")) != (
        FORMAT,
        VERSION,
    ):
        raise ValueError(f"{path} is not one of {FORMAT} {VERSION}: prepare the shard again")
    return about
