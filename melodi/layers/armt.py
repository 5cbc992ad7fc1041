"""ARMT, the Associative Recurrent Memory Transformer (Rodkin et al. 2024, arXiv 2407.04841).

Write tokens u, one learned table, run behind every full window, as Melodi's summary tokens do. Each
layer carries a matrix A of values under features of keys, φ, and z, the sum of these features:

- before the layer every token, of x and of u, reads (eq. 4): x ← x + φ(W_q x)·A / (φ(W_q x)·z + ε);
- after the layer the write tokens write (eq. 1 to 3): with f = φ(W_k u) and what is already stored
  under it, v̄ = f·A / (f·z + ε), A' = A + Σ β·f ⊗ (W_v u - v̄), z' = z + Σ γ·f, where
  β = sigmoid(w_b·u + b), and γ = 1 - (f·z + ε) / (|f|² + ε) is how new the key is.

All write tokens of a window see the same A and z. As in the authors' code x and u are the residual
stream, not normalised, γ is clipped to [0, 1], has no gradient, and is 1 in the first window. W_v
starts at zero, so that the model starts as one without memory.

Shapes as in frame.py; d key width, K = 6·d features.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from melodi.config import ModelConfig
from melodi.layers.associative import exact, recalled, stored
from melodi.layers.frame import Layer, Seen, WindowPart, Written
from melodi.layers.transformer import Linear

ROLLS = 3
"""The ν of DPFP-ν."""
EPSILON = 1e-5


class AssociativeMemory(NamedTuple):
    """armt: values by features of their keys, and how much is stored of each feature."""

    A_BKD: Tensor
    z_BK: Tensor


class ARMTLayer(Layer[AssociativeMemory]):
    """Every token reads the matrix before the block; the write tokens change it after the block."""

    carries = AssociativeMemory

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config, index)
        self.num_features = 2 * ROLLS * config.associative_width
        self.W_mq = Linear(config.width, config.associative_width)
        self.W_mk = Linear(config.width, config.associative_width)
        self.W_mv = Linear(config.width, config.width)
        self.W_mb = Linear(config.width, 1, bias=True)
        nn.init.zeros_(self.W_mv.weight)

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        return (self.num_features, self.width), (self.num_features,)

    def recall(self, xu_BtD: Tensor, memory: AssociativeMemory, part: WindowPart) -> Tensor:
        q_Btd = self.W_mq(xu_BtD)
        with exact(memory.A_BKD):
            f_BtK = dpfp(q_Btd.to(memory.A_BKD.dtype))
            return xu_BtD + recalled(f_BtK, *memory, EPSILON)

    def write(
        self, seen: Seen, memory: AssociativeMemory, part: WindowPart
    ) -> Written[AssociativeMemory]:
        u_BSD = seen.u_hat_BSD
        k_BSd, v_BSD, beta_BS1 = self.W_mk(u_BSD), self.W_mv(u_BSD), self.W_mb(u_BSD).sigmoid()
        with exact(memory.A_BKD):
            f_BSK = dpfp(k_BSd.to(memory.A_BKD.dtype))
            change_BSD = beta_BS1 * (v_BSD - recalled(f_BSK, *memory, EPSILON))
            A_BKD = stored(f_BSK, change_BSD, memory.A_BKD)
            new_BS1 = novelty(f_BSK, memory.z_BK, part.windows_read_B)
            z_BK = memory.z_BK + (new_BS1 * f_BSK).sum(1)
        new = (part.commit(a, b) for a, b in zip((A_BKD, z_BK), memory, strict=True))
        return Written(AssociativeMemory(*new), u_BSD)


@torch.no_grad()
def novelty(f_BSK: Tensor, z_BK: Tensor, windows_read_B: Tensor) -> Tensor:
    """γ, (B, S, 1): 1 for a key like none that is stored, 0 for one that is stored already."""
    known_BS1 = f_BSK @ z_BK[..., None] + EPSILON
    gamma_BS1 = 1 - known_BS1 / (f_BSK.square().sum(-1, keepdim=True) + EPSILON)
    return torch.where((windows_read_B == 0)[:, None, None], 1, gamma_BS1.clamp(0, 1))


def dpfp(a: Tensor) -> Tensor:
    """The features φ of DPFP-3 (Schlag et al. 2021): products of neighbours, r ∘ roll(r, j) for
    j = 1, 2, 3, with r = [relu(a); relu(-a)]. They are sparse, so that few keys are alike."""
    r = torch.cat([a, -a], dim=-1).relu()
    return torch.cat([r * r.roll(j, dims=-1) for j in range(1, ROLLS + 1)], dim=-1)
