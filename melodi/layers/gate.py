"""The gate between self-attention and what is read from memory (Fig. 3)."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from melodi.config import ModelConfig
from melodi.layers.transformer import randomise

GATE_START = 0.2
"""The share of long-term attention before training, where the gate is per head."""


class Gate(nn.Module):
    """A = α·A_long + (1 - α)·A_self: α = σ(logit) per head, or 1 - σ(logit) per channel."""

    roles: ClassVar = {"logit": "gates"}

    def __init__(self, config: ModelConfig, per_channel: bool) -> None:
        super().__init__()
        self.per_channel = per_channel
        if per_channel:
            self.logit = nn.Parameter(torch.empty(config.num_heads, config.head_size))
            randomise(self.logit, 0.25)
        else:
            start = math.log(GATE_START / (1 - GATE_START))
            self.logit = nn.Parameter(torch.full((config.num_heads,), start))

    def alpha(self) -> Tensor:
        """How much of the result comes from long-term memory; (H, 1, E or 1)."""
        if self.per_channel:
            return torch.sigmoid(-self.logit)[:, None, :]
        return torch.sigmoid(self.logit)[:, None, None]

    def forward(self, self_BHtE: Tensor, long_BHtE: Tensor, empty_B: Tensor | None) -> Tensor:
        alpha = self.alpha()
        if empty_B is not None:
            alpha = alpha.masked_fill(empty_B[:, None, None, None], 0)
        return self_BHtE + alpha * (long_BHtE - self_BHtE)
