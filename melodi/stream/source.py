"""Whatever can be read, as checked ids: lists, arrays, tensors, generators, texts, open files.

`Feed.take` gives as many ids as are asked for and takes no more from the source than it must, so
that a source without end can be read in constant memory.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from melodi.boundary import check_ids
from melodi.data.text import cut
from melodi.data.tokenizer import Tokenizer

Source = str | TextIO | Tensor | NDArray[Any] | Iterable[int]
BLOCK = 1 << 16
"""Characters or ids that are taken from a file or an array at once."""


def host_ids(ids: Sequence[int]) -> Tensor:
    """Whatever torch's default device is."""
    return torch.tensor(ids, dtype=torch.long, device="cpu")


class Feed:
    """The ids of a source, in the order and at the pace of whoever takes them."""

    def __init__(
        self, source: Source, vocab_size: int, tokenizer: Tokenizer | None, goes_on: bool
    ) -> None:
        """`goes_on`: the source continues a text of which something has been read."""
        self.vocab_size = vocab_size
        self.waiting = host_ids([])
        self.more: Callable[[int], Any]
        """Up to so many further ids, or a few more; none at the end only."""
        if isinstance(source, str) or hasattr(source, "read"):
            pieces = encoded(source, tokenizer, goes_on)
            self.more = lambda _: next(pieces, [])
        elif isinstance(source, Tensor | np.ndarray | list | tuple | range):
            if getattr(source, "ndim", 1) != 1:
                checked_ids(source, vocab_size)
            size = len(source)
            blocks = (source[start : start + BLOCK] for start in range(0, size, BLOCK))
            self.more = lambda _: next(blocks, [])
        elif isinstance(source, Iterable) and not isinstance(source, bytes | dict):
            ids = iter(source)
            self.more = lambda count: list(islice(ids, count))
        else:
            raise ValueError(f"a {type(source).__name__} cannot be read: give ids, or a text")

    def take(self, count: int = sys.maxsize) -> Tensor:
        """The next ids, on the host; fewer than asked for at the end only. All without a count."""
        while len(self.waiting) < count:
            new = self.more(count - len(self.waiting))
            if not len(new):
                break
            self.waiting = torch.cat([self.waiting, checked_ids(new, self.vocab_size)])
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken


def encoded(source: Any, tokenizer: Tokenizer | None, goes_on: bool) -> Iterator[list[int]]:
    """The ids of a text, piece by piece, cut where a tokenizer would not see the difference."""
    if tokenizer is None:
        raise ValueError(
            "the model has no tokenizer to read a text with: give ids, or a model that melodi.load "
            "gave"
        )
    blocks = [source] if isinstance(source, str) else iter(partial(source.read, BLOCK), "")
    return encoded_pieces(cut(map(checked_block, blocks)), tokenizer, goes_on)


def encoded_pieces(
    pieces: Iterable[str], tokenizer: Tokenizer, goes_on: bool
) -> Iterator[list[int]]:
    """Without the id that closes documents in a store, for the text may go on."""
    for piece in pieces:
        ids = tokenizer.encode_next(piece) if goes_on else tokenizer.encode(piece)
        goes_on = True
        if ids:
            yield ids


def checked_block(block: object) -> str:
    if not isinstance(block, str):
        raise ValueError(f"the file gives {type(block).__name__}: open it as text, not as bytes")
    return block


def checked_ids(ids: Any, vocab_size: int) -> Tensor:
    """Ids of any integer type as int64 on the host, all of them in the vocabulary."""
    if isinstance(ids, Tensor):
        ids = ids.detach().cpu().numpy() if ids.dtype != torch.bfloat16 else ids.float().numpy()
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError):
        raise ValueError("ids must be whole numbers in one row: give a flat list") from None
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(
            f"ids of shape {array.shape} and type {array.dtype} must be whole numbers in one row"
        )
    whole = torch.from_numpy(array.astype(np.int64))
    if len(whole):
        check_ids("token", whole, 0, vocab_size)
    return whole
