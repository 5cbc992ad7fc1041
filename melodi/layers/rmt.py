"""Recurrent Memory Transformer (Bulatov, Kuratov, Burtsev 2022): memory tokens beside the window.

- A window is [m; x; m] through the whole stack, m one memory for all layers. The first block is
  read, the second writes: m' = N(u), the final norm of the write tokens after the last layer, is
  both blocks of the next window. So write tokens start from the memory, not from a table.
- x is causal, nobody sees the write tokens but they themselves, and these see all of the window.
  Inside each block everything is seen (the paper), or only what is earlier (`memory_mask`).
- The read block never sees x: its keys and values in every layer follow from m alone. It runs once,
  when a window opens, and its pairs are the past of the window.
- A learned table stands in for m in rows that have read nothing: memory is never empty.

The memory is kept in the first layer. Shapes as in frame.py; R memory tokens, P past slots.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from melodi.config import ModelConfig
from melodi.layers.frame import Layer, Seen, Stream, WindowPart, Written
from melodi.layers.transformer import Pairs, Sight


class TokenMemory(NamedTuple):
    """rmt, autocompressor: what the stack remembers, in the first layer; without slots above."""

    tokens_BMD: Tensor


class RMTLayer(Layer[TokenMemory]):
    """A layer that memory tokens run through, before the window and behind it."""

    carries = TokenMemory
    past_is = "memory-tokens"

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config, index)
        self.is_last = index == len(config.layers) - 1

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        return ((0 if self.index else self.past_slots, self.width),)

    def begin(
        self, x_BtD: Tensor, table_SD: Tensor | None, memory: TokenMemory, part: WindowPart
    ) -> Stream:
        """Both blocks are the memory; the table stands in for it in rows that have read nothing."""
        assert table_SD is not None
        first_B11 = (part.windows_read_B == 0)[:, None, None]
        m_BRD = torch.where(first_B11, table_SD.to(memory.tokens_BMD), memory.tokens_BMD)
        return Stream(x_BtD, m_BRD if part.closes else None, m_BRD if part.opens else None)

    def precede(
        self, r_BPD: Tensor | None, memory: TokenMemory, sight: Sight
    ) -> tuple[Pairs, Tensor | None]:
        """Memory tokens attend to each other alone; what they lack of the slots is zeros."""
        if r_BPD is None:
            sizes = self.pairs_size(self.past_slots)
            zeros = [memory.tokens_BMD.new_zeros(len(memory.tokens_BMD), *size) for size in sizes]
            return Pairs(*zeros), None
        _, q_BHtE, (keys, values) = self.block.project(r_BPD)
        lacking = (0, 0, self.past_slots - r_BPD.size(1), 0)
        pairs = Pairs(F.pad(keys, lacking), F.pad(values, lacking))
        if self.is_last:
            return pairs, None
        among = sight.past
        assert among is not None
        assert among.visible_b1tk is not None
        newest = slice(self.past_slots - r_BPD.size(1), None)
        bias = among.bias_bHtk
        among = among._replace(
            visible_b1tk=among.visible_b1tk[:, :, newest],
            bias_bHtk=None if bias is None else bias[:, :, newest],
        )
        a_BHtE = self.block.attend(q_BHtE, pairs, among)
        return pairs, self.block.finish(r_BPD, a_BHtE)

    def write(self, seen: Seen, memory: TokenMemory, part: WindowPart) -> Written[TokenMemory]:
        """Write tokens go on as they are; only what they are at the end is remembered."""
        return Written(memory, seen.u_hat_BSD)

    def end(
        self, u_BSD: Tensor, final_norm: nn.Module, memory: TokenMemory, part: WindowPart
    ) -> TokenMemory:
        return TokenMemory(part.commit(final_norm(u_BSD), memory.tokens_BMD))
