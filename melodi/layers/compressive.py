"""Compressive Transformer (Rae et al. 2019): what falls out of the cache is compressed.

- Tokens attend to [cm; m; x], all of cm and m. m holds h = n(x), this layer's normed inputs, of the
  window before; cm holds the newest C vectors that earlier ones were compressed into. Both are
  projected when a window opens. A compressed slot takes one position.
- A full window, in this order: cm' = the last C of [cm; f(m)], m' = its own h. What is compressed
  is the window before; a row's first window has none before it, and compresses nothing.
- f makes c neighbours one: their mean, or a convolution of stride c. The convolution learns from a
  loss of its own, the mean square of attn(q, m) - attn(q, f(m)): attention by content, without
  position or mask, q of the window just read. In this loss everything but f is constant, and f(m)
  is stored without gradient: the language-model loss does not reach f.
- m keeps its gradient inside a segment, as the cache of Transformer-XL does.

Shapes as in frame.py; C compressed slots, c compression rate, n = W/c new slots per window.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from melodi.config import ModelConfig
from melodi.layers.fifo import append
from melodi.layers.frame import Layer, Seen, WindowPart, Written, where_rows
from melodi.layers.transformer import Pairs, attend, randomise, split_heads


class CompressiveMemory(NamedTuple):
    """compressive: the normed inputs of the window before, and the FIFO of compressed ones."""

    memory_BWD: Tensor
    compressed_BCD: Tensor


class CompressiveLayer(Layer[CompressiveMemory]):
    carries = CompressiveMemory
    past_is = "memory"
    keeps = True

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config, index)
        self.compressed_slots = config.compressed_slots
        self.rate = config.compression_rate
        learned = config.compressor == "convolution"
        self.compress = Convolution(config.width, self.rate) if learned else None

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        return (self.window, self.width), (self.compressed_slots, self.width)

    def past(self, memory: CompressiveMemory) -> Pairs:
        return self.block.pairs(torch.cat([memory.compressed_BCD, memory.memory_BWD], dim=1))

    def keep(self, x_BtD: Tensor, h_BtD: Tensor) -> Tensor:
        return h_BtD

    def write(
        self, seen: Seen, memory: CompressiveMemory, part: WindowPart
    ) -> Written[CompressiveMemory]:
        old_BWD = memory.memory_BWD.detach()
        neighbours_BncD = old_BWD.unflatten(1, (-1, self.rate))
        if self.compress is None:
            new_BnD, extra_loss = neighbours_BncD.mean(2), None
        else:
            new_BnD = self.compress(neighbours_BncD)
            extra_loss = self.reconstruction_loss(seen.kept_BWD, old_BWD, new_BnD, part)
        queue_BCD = append(memory.compressed_BCD, new_BnD.detach(), 1, part)
        compressed_BCD = where_rows(part.windows_read_B > 0, queue_BCD, memory.compressed_BCD)
        memory_BWD = part.commit(seen.kept_BWD, memory.memory_BWD)
        return Written(CompressiveMemory(memory_BWD, compressed_BCD), extra_loss=extra_loss)

    def reconstruction_loss(
        self, h_BWD: Tensor, old_BWD: Tensor, new_BnD: Tensor, part: WindowPart
    ) -> Tensor | None:
        """How far attention to what is compressed is from attention to what it was made of: the
        mean over all rows, in which rows that compress nothing now count as zero. Were these left
        out, rows shared out over processes would give another loss than the same rows in one."""
        if not torch.is_grad_enabled():
            return None
        with torch.no_grad():
            q_BHWE = self.block.queries(h_BWD)
            wanted_BHWE = attend(q_BHWE, *self.block.pairs(old_BWD))
        block, heads = self.block, self.heads[0]
        keys = block.scale.key(split_heads(F.linear(new_BnD, block.key.weight.detach()), heads))
        values = split_heads(F.linear(new_BnD, block.value.weight.detach()), heads)
        error_BHWE = attend(q_BHWE, keys, values) - wanted_BHWE
        exact = torch.promote_types(error_BHWE.dtype, torch.float32)
        compresses_B = part.full_B & (part.windows_read_B > 0)
        return (error_BHWE.to(exact).square().mean((1, 2, 3)) * compresses_B).mean()


class Convolution(nn.Module):
    """Over the token axis, kernel and stride c: c neighbours to one vector, with a bias."""

    def __init__(self, width: int, rate: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width, rate))
        self.bias = nn.Parameter(torch.zeros(width))
        randomise(self.weight, (width * rate) ** -0.5)

    def forward(self, neighbours_BncD: Tensor) -> Tensor:
        return torch.einsum("bncd,odc->bno", neighbours_BncD, self.weight) + self.bias
