"""Transformer-XL (Dai et al. 2019): the keys and values of the previous window are the past.

Shapes as in frame.py.
"""

from typing import Generic, NamedTuple

from torch import Tensor

from melodi.layers.frame import Layer, Memory, Seen, WindowPart, Written
from melodi.layers.transformer import Pairs


class XLMemory(NamedTuple):
    """xl: the key-value pairs of the previous window."""

    cache_keys_BHWE: Tensor
    cache_values_BHWE: Tensor


class CachedLayer(Layer[Memory], Generic[Memory]):
    """A layer whose memory begins with the pairs of the previous window.

    Every token sees the W tokens before it.
    """

    past_is = "cache"

    def past(self, memory: Memory) -> Pairs:
        return Pairs(memory[0], memory[1])

    def new_cache(self, seen: Seen, memory: Memory, part: WindowPart) -> Pairs:
        """The pairs of the window that is full."""
        keys, values = (
            part.commit(new, old) for new, old in zip(seen.window, memory, strict=False)
        )
        return Pairs(keys, values)


class XLLayer(CachedLayer[XLMemory]):
    carries = XLMemory

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        return self.pairs_size(self.window)

    def write(self, seen: Seen, memory: XLMemory, part: WindowPart) -> Written[XLMemory]:
        return Written(XLMemory(*self.new_cache(seen, memory, part)))
