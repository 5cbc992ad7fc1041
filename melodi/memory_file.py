"""What a memory file holds: safetensors with a header that says which model it belongs to.

    windows, open          whole windows read, and tokens in the open one, of each row
    layers.I.FIELD         what layer I carries
    open_window.I.FIELD    what the open window has left in layer I, where a row has one
    reader.last            the final hidden vector of the last token: what is expected next
    reader.recent          the ids of the last tokens, -1 before the first

A memory file holds content of the document that it was made from: the open window and the last ids
give parts of it back word for word, and the rest is what the model could recall of it. The reader's
part is there if a StreamReader wrote the file. Numbers may be stored as bf16, in half of the space,
and are read back in the type that they had.

Shapes: B rows, D width, R recent tokens.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from melodi.files import read_header, read_tensors, write_tensors

FORMAT, VERSION = "melodi-memory", 2
RECENT = 64
"""Ids that a reader keeps: enough to decode the next one, and to avoid repeating them."""
NARROWED = {"float32": torch.float32, "float64": torch.float64}
"""Types that can be stored as bf16."""


class Place(NamedTuple):
    """Where a reader stands, beside its memory: enough to score the next token and to go on."""

    last_BD: Tensor
    """The final hidden vector of the last token of each row."""
    recent_BR: Tensor
    """The ids of the last tokens, on the host, newest last; -1 where none is known."""
    digests: tuple[str | None, ...]
    """Of all ids that each row has read, the same however the stream was cut; None: not known."""
    tokenizer: str | None
    """The digest of the tokenizer that made the ids, if there was one."""

    @classmethod
    def unknown(cls, last_BD: Tensor, read_B: Tensor, tokenizer: str | None) -> "Place":
        """Of rows of which only the memory is known, and whether they have read anything."""
        recent_BR = torch.full((len(last_BD), RECENT), -1, device="cpu")
        digests = tuple(None if read else "" for read in read_B.tolist())
        return cls(last_BD, recent_BR, digests, tokenizer)

    @property
    def known_B(self) -> Tensor:
        """Rows of which it is known what they expect next."""
        return self.recent_BR[:, -1] >= 0

    def after(self, ids: list[Tensor], x_BTD: Tensor) -> "Place":
        """When each row has read these ids, of which x are the final hidden vectors."""
        digests = tuple(map(chained, self.digests, ids))
        if {len(new) for new in ids} == {1}:
            recent_BR = torch.cat([self.recent_BR[:, 1:], torch.stack(ids)], dim=1)
            return Place(x_BTD[:, 0], recent_BR, digests, self.tokenizer)
        last_BD, recent_BR = self.last_BD.clone(), self.recent_BR.clone()
        for row, new in enumerate(ids):
            if len(new):
                last_BD[row] = x_BTD[row, len(new) - 1]
                recent_BR[row] = torch.cat([recent_BR[row], new])[-RECENT:]
        return Place(last_BD, recent_BR, digests, self.tokenizer)

    def tensors(self) -> dict[str, Tensor]:
        return {"reader.last": self.last_BD, "reader.recent": self.recent_BR}

    def header(self) -> dict[str, str]:
        about = {"text_digests": self.digests, "tokenizer_digest": self.tokenizer}
        return {"reader": json.dumps(about)}

    @classmethod
    def found(cls, header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> "Place | None":
        """What a file says; nothing if no reader wrote it."""
        if "reader" not in header:
            return None
        about = json.loads(header["reader"])
        digests = tuple(about["text_digests"])
        last_BD, recent_BR = tensors["reader.last"], tensors["reader.recent"]
        shapes = last_BD.dim(), tuple(recent_BR.shape), recent_BR.dtype
        if shapes != (2, (len(digests), RECENT), torch.int64):
            raise ValueError("the reader's part has other rows than the memory")
        return cls(last_BD, recent_BR, digests, about["tokenizer_digest"])


def chained(digest: str | None, ids: Tensor) -> str | None:
    """The digest after more ids: token by token, so that it can go on from a file."""
    if digest is None:
        return None
    running = bytes.fromhex(digest)
    for token in ids.tolist():
        running = hashlib.blake2b(running + token.to_bytes(4, "little"), digest_size=16).digest()
    return running.hex()


def write_memory(
    path: Path, tensors: Mapping[str, Tensor], header: dict[str, str], dtype: str | None
) -> None:
    """Writes the whole file or nothing; `dtype` "bf16" stores numbers in two bytes."""
    if dtype not in (None, "bf16"):
        raise ValueError(f"dtype={dtype!r} is unknown: give 'bf16', or None to keep every bit")
    header = {"format": FORMAT, "version": str(VERSION), **header}
    if dtype == "bf16":
        names = {type_: name for name, type_ in NARROWED.items()}
        wide = {name: names[t.dtype] for name, t in tensors.items() if t.dtype in names}
        tensors = {name: t.bfloat16() if name in wide else t for name, t in tensors.items()}
        header["dtypes"] = json.dumps(wide)
    write_tensors(path, tensors, header)


def is_memory_file(path: Path) -> bool:
    """Whether a file says so of itself, of whatever version it is."""
    try:
        return read_header(path).get("format") == FORMAT
    except ValueError:
        return False


def read_memory(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The header and the tensors of a memory file, in the types that they had."""
    try:
        header, tensors = read_tensors(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist: give the file that save wrote") from None
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} is not a memory file: give one that MemoryState.save wrote")
    if header.get("version") != str(VERSION):
        raise ValueError(
            f"{path} has version {header.get('version')}, this melodi reads {VERSION}: "
            "use the melodi that wrote it"
        )
    try:
        for name, dtype in json.loads(header.get("dtypes", "{}")).items():
            tensors[name] = tensors[name].to(NARROWED[dtype])
    except (KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged in its types: {error}") from None
    return header, tensors


def check_tensors(tensors: Mapping[str, Tensor], window: int) -> None:
    """Refuses what no reading can leave behind."""
    rows = len(tensors["windows"]) if tensors["windows"].dim() else 0
    for name in ("windows", "open"):
        counts = tensors[name]
        low, high = (0, window) if name == "open" else (0, 1 << 62)
        whole = counts.dtype == torch.int64 and tuple(counts.shape) == (rows,) and rows > 0
        if not whole or bool(((counts < low) | (counts >= high)).any()):
            raise ValueError(f"{name}={counts.tolist()} is no count of what each row has read")
    for name, tensor in tensors.items():
        if not tensor.dim() or len(tensor) != rows:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the memory has {rows} rows")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} holds numbers that are not finite")
