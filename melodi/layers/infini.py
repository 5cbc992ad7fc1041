"""Infini-attention (Munkhdalai et al. 2024, arXiv 2404.07143): one matrix per head for all of the
past, beside attention inside the window.

With σ(a) = elu(a) + 1, and q, k, v those of self-attention, without position:

- read (eq. 7): A_mem = σ(q)·M / (σ(q)·z), M and z as they were when the window opened;
- gate (eq. 10): A = α·A_mem + (1 - α)·A_self, one α per head; rows that have read nothing take
  A_self alone;
- write (eq. 8): M' = M + Σ σ(k) ⊗ v, z' = z + Σ σ(k). By the delta rule (eq. 9) each v is lessened
  by what M already gives for its key.

Choices that the paper leaves open: α starts at 0.2, as in Melodi. Where queries and keys are unit
vectors they are taken times √E: σ tells keys apart only if their entries are of about unit size.

Shapes as in frame.py; M is (B, H, E, E), its rows are features of keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from melodi.config import ModelConfig
from melodi.layers.associative import exact, recalled, stored
from melodi.layers.frame import Layer, Seen, WindowPart, Written
from melodi.layers.gate import Gate
from melodi.layers.transformer import Projections


class InfiniMemory(NamedTuple):
    """infini: the values of all earlier tokens, by features of their keys, and the sum of these."""

    M_BHEE: Tensor
    z_BHE: Tensor


class InfiniLayer(Layer[InfiniMemory]):
    """Tokens read the matrix as it was when the window began; the full window is added to it."""

    carries = InfiniMemory

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config, index)
        self.delta = config.infini_update == "delta"
        self.gate = Gate(config, per_channel=False)

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        heads, head_width = self.heads
        return (heads, head_width, head_width), (heads, head_width)

    def read(
        self, a_BHtE: Tensor, made: Projections, memory: InfiniMemory, part: WindowPart
    ) -> tuple[Tensor, ...]:
        with exact(memory.M_BHEE):
            q_BHtE = self.block.scale.raw_query(made.q_BHtE.to(memory.M_BHEE.dtype))
            memory_BHtE = recalled(features(q_BHtE), *memory)
        empty_B = part.windows_read_B == 0 if part.fewest_windows == 0 else None
        return (self.gate(a_BHtE, memory_BHtE, empty_B),)

    def write(self, seen: Seen, memory: InfiniMemory, part: WindowPart) -> Written[InfiniMemory]:
        with exact(memory.M_BHEE):
            k_BHWE, v_BHWE = (tensor.to(memory.M_BHEE.dtype) for tensor in seen.window)
            f_BHWE = features(self.block.scale.raw_key(k_BHWE))
            if self.delta:
                v_BHWE = v_BHWE - recalled(f_BHWE, *memory)
            M_BHEE = stored(f_BHWE, v_BHWE, memory.M_BHEE)
            z_BHE = memory.z_BHE + f_BHWE.sum(2)
        new = (part.commit(a, b) for a, b in zip((M_BHEE, z_BHE), memory, strict=True))
        return Written(InfiniMemory(*new))


def features(a: Tensor) -> Tensor:
    """σ(a) = elu(a) + 1, in a form that stays above zero where exp(a) is small beside one."""
    return torch.where(a > 0, a + 1, a.clamp(max=0).exp())
