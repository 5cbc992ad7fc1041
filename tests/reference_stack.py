"""The slow reference of RMT, AutoCompressor and the Compressive Transformer; see reference.py.

The first two are written as their papers put it: memory tokens, the window and write tokens are one
sequence that goes through all layers anew in every window. Nothing is kept but the memory.
"""

import torch
from reference import LAYERS, Layer, Pair, bucket, read, rms_norm
from torch import Tensor

from melodi import ModelConfig

__all__ = ["read"]


class RMTLayer(Layer):
    """One memory for the stack, in the first layer: m' = N(write tokens); a table at the start."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], index: int) -> None:
        super().__init__(config, weights, index)
        self.start(weights)

    def start(self, weights: dict[str, Tensor]) -> None:
        self.memory = list(weights["memory"])
        self.at_start = True

    def write_tokens(self, weights: dict[str, Tensor]) -> list[Tensor]:
        return self.memory

    def replace(self, new: list[Tensor]) -> None:
        self.memory = new
        self.at_start = False

    def whole_block(self) -> bool:
        """Whether memory tokens see all of their block."""
        return self.config.memory_mask == "blocks"

    def detach(self) -> None:
        # The table is a parameter, not carried memory: it keeps its gradient.
        if not self.at_start:
            self.memory = [m_D.detach() for m_D in self.memory]

    def read_window(
        self, weights: dict[str, Tensor], layers: list[Layer], x: list[Tensor]
    ) -> list[Tensor]:
        full = len(x) == self.config.window
        written = self.write_tokens(weights) if full else []
        sequence = [*self.memory, *x, *written]
        edges = len(self.memory), len(self.memory) + len(x)
        for layer in layers:
            assert isinstance(layer, RMTLayer)
            sequence = layer.through(sequence, edges)
        if full:
            gain_D = weights["final_norm.weight"]
            self.replace([rms_norm(u_D, gain_D) for u_D in sequence[edges[1] :]])
        return sequence[edges[0] : edges[1]]

    def through(self, sequence: list[Tensor], edges: tuple[int, int]) -> list[Tensor]:
        """The whole sequence through this layer; the window lies between the edges."""
        pairs = [self.pair(token_D) for token_D in sequence]
        outputs = []
        for i, token_D in enumerate(sequence):
            seen = [j for j in range(len(sequence)) if self.sees_token(i, j, edges)]
            biases = [self.bias_table_HB[:, bucket(i - j)] for j in seen]
            a_HE = self.attend(self.query(token_D), [pairs[j] for j in seen], "block.scale", biases)
            y_D = token_D + self.weights["block.output.weight"] @ a_HE.flatten()
            outputs.append(y_D + self.feed_forward(y_D))
        return outputs

    def sees_token(self, i: int, j: int, edges: tuple[int, int]) -> bool:
        both_read, both_write = i < edges[0] and j < edges[0], min(i, j) >= edges[1]
        if self.whole_block() and (both_read or both_write):
            return True
        return self.sees(i - j)


class AutoCompressorLayer(RMTLayer):
    """The summaries of the last Q windows; write tokens are always the table."""

    def start(self, weights: dict[str, Tensor]) -> None:
        self.slots = self.config.long_term_tokens * self.config.long_term_windows
        self.memory, self.at_start = [], False
        if self.answers.empty_memory == "zeros":
            self.memory = [torch.zeros_like(weights["summary"][0])] * self.slots

    def write_tokens(self, weights: dict[str, Tensor]) -> list[Tensor]:
        return list(weights["summary"])

    def replace(self, new: list[Tensor]) -> None:
        self.memory = (self.memory + new)[-self.slots :]

    def whole_block(self) -> bool:
        return False


class CompressiveLayer(Layer):
    """The normed inputs of the previous window, and compressed ones of those before it."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], index: int) -> None:
        super().__init__(config, weights, index)
        self.first = True
        self.memory: list[Tensor] = []
        self.compressed: list[Tensor] = []
        if self.answers.empty_memory == "zeros":
            zero_D = weights["embedding.weight"].new_zeros(config.width)
            self.memory = [zero_D] * config.window
            self.compressed = [zero_D] * config.compressed_slots

    def past(self) -> list[Pair]:
        return [
            (self.direction("block.key", h_D), self.heads("block.value", h_D))
            for h_D in self.compressed + self.memory
        ]

    def block(self, x: list[Tensor], u: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        self.inputs = [rms_norm(x_D, self.weights["block.attention_norm.weight"]) for x_D in x]
        return super().block(x, u)

    def remember(self, x: list[Tensor], u: list[Tensor]) -> None:
        if not self.first:
            rate = self.config.compression_rate
            for start in range(0, self.config.window, rate):
                new_D = self.compress(self.memory[start : start + rate])
                self.compressed = [*self.compressed, new_D.detach()]
            self.compressed = self.compressed[-self.config.compressed_slots :]
        self.first = False
        self.memory = self.inputs

    def compress(self, neighbours: list[Tensor]) -> Tensor:
        if self.config.compressor == "mean":
            return torch.stack(neighbours).mean(0)
        weight_DDc = self.weights["compress.weight"]
        parts = [weight_DDc[:, :, t] @ h_D for t, h_D in enumerate(neighbours)]
        return torch.stack(parts).sum(0) + self.weights["compress.bias"]

    def detach(self) -> None:
        self.memory = [h_D.detach() for h_D in self.memory]


LAYERS |= {
    "rmt": RMTLayer,
    "autocompressor": AutoCompressorLayer,
    "compressive": CompressiveLayer,
}
