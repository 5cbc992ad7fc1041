"""Decoder: reads single tokens, and keeps at hand what it needs of a model from one to the next.

It reads one token of every row where all rows stand at the same place inside their windows, and
gives None where they do not: then the model reads. What it keeps is good until a module or a weight
changes: `KeptDecoder` looks before every token, and begins anew.

Shapes: B rows, D width.
"""

from itertools import repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from melodi.layers.frame import Layer, Memory
from melodi.layers.native import Kernel, kernel_for
from melodi.layers.nats import logits_of
from melodi.layers.products import Numbers, Product
from melodi.layers.token import NativeTokenLayer, TokenLayer, TokenNorm
from melodi.layers.transformer import ACTIVATIONS
from melodi.memory import Maker, MemoryState
from melodi.reading import next_part
from melodi.sights import filled_by_kind, most_slots, token_ranges

if TYPE_CHECKING:
    from melodi.model import LanguageModel

VERSION = attrgetter("_version")
"""How often a tensor has been written to."""


class Decoder:
    """`LanguageModel.hidden` for one token of each row, without a gradient."""

    def __init__(self, model: "LanguageModel", numbers: Numbers = "fp32") -> None:
        config = model.config
        self.config, self.maker, self.input_scale = config, Maker(model), model.input_scale
        self.embedding_VD, self.final_norm = model.embedding.weight, TokenNorm(model.final_norm)
        bias = model.position_bias.by_distance(range(len(config.layers)), most_slots(config))
        kernel = kernel_for(numbers, model.embedding, model.final_norm, model.position_bias)
        self.layers = [
            token_layer(layer, bias.get(i), numbers, kernel) for i, layer in enumerate(model.stack)
        ]
        logits = Product(model.embedding.weight, None, numbers)
        self.native = kernel is not None
        self.unscaled_logits = logits if kernel is None else kernel.product(logits)

    def __call__(self, tokens_B1: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState] | None:
        """The final hidden vectors (B, 1, D), and the memory; ids must be of the vocabulary, and
        the memory of the model."""
        part = next_part(state, self.embedding_VD.device)
        if part is None or part.place is None:
            return None
        windows = (part.fewest_windows, part.most_windows)
        ranges = token_ranges(self.config, part.place, filled_by_kind(self.config, windows))
        writable = state.writable_window()
        if ranges is None or writable is None:
            return None
        opened, fill = writable
        x_BD = F.embedding(tokens_B1[:, 0], self.embedding_VD) * self.input_scale
        for layer, kind, memory, window in zip(
            self.layers, self.config.layers, state.layers, opened, strict=True
        ):
            x_BD = layer(x_BD, memory, window, part, *ranges[kind])
        fill.open_B = state.open_B + 1
        counters = state.windows_B, fill.open_B
        state = MemoryState(self.config, self.maker, *counters, state.layers, opened, fill)
        return self.final_norm(x_BD)[:, None], state


def token_layer(
    layer: Layer[Memory], bias_Hk: Tensor | None, numbers: Numbers, kernel: Kernel | None
) -> TokenLayer[Memory]:
    block = layer.block
    usual = block.ffn.activation is ACTIVATIONS[layer.config.answers.activation]
    if kernel is None or not usual or not kernel.fits(*block.parameters()):
        return TokenLayer(layer, bias_Hk, numbers)
    return NativeTokenLayer(layer, bias_Hk, numbers, kernel)


class KeptDecoder:
    """A decoder for many tokens, which is made anew when the model has changed."""

    def __init__(self, model: "LanguageModel", numbers: Numbers = "fp32") -> None:
        self.model, self.numbers = model, numbers
        self.watch: Watch | None = None
        self.decoder: Decoder | None = None

    def __call__(self, tokens_B1: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState] | None:
        """As `Decoder`; None, too, where only the model itself can read."""
        decoder = self._current() if self.model.is_plain() else None
        if decoder is None or not state.made_by(self.model):
            return None
        return decoder(tokens_B1, state)

    def logits(self, x_BD: Tensor) -> Tensor:
        """What is expected after these final hidden vectors, in float32 at least."""
        weight_VD, scale = self.model.embedding.weight, self.model.output_scale
        decoder = self._current()
        if decoder is None or (self.numbers == "fp32" and not decoder.native):
            return logits_of(x_BD, weight_VD, scale)
        return decoder.unscaled_logits(x_BD) * scale

    def _current(self) -> Decoder | None:
        if self.watch is None or not self.watch.unchanged():
            self.watch = Watch(self.model)
            self.decoder = Decoder(self.model, self.numbers) if self.model.decodes() else None
        return self.decoder


class Watch:
    """Whether what a decoder uses of a model is still what it was, modules and weights; asked for
    each token, so all loops are Python's own."""

    def __init__(self, model: "LanguageModel") -> None:
        ends = (model.embedding, model.final_norm, *model.position_bias.modules())
        blocks = [part for layer in model.stack for part in (layer, *layer.block.modules())]
        self.modules: list[nn.Module] = [model, model.layers, *ends, *blocks]
        self.weights = [w for m in self.modules for w in m.parameters(recurse=False)]
        self.types = list(map(type, self.modules))
        hooks = [(module._forward_hooks, module._forward_pre_hooks) for module in self.modules]
        self.hooks = [table for pair in hooks for table in pair]
        self.own = [vars(module) for module in self.modules]
        self.watched = self._is_watched()
        tables = [table for m in self.modules for table in (m._modules, m._parameters)]
        parts = [(table, name, part) for table in tables for name, part in table.items()]
        self.tables, self.names, self.parts = zip(*parts, strict=True)
        # Tensors made in inference mode do not count how often they are written to.
        self.blind = any(weight.is_inference() for weight in self.weights)
        self.places = list(map(Tensor.data_ptr, self.weights))
        self.versions = [] if self.blind else list(map(VERSION, self.weights))

    def unchanged(self) -> bool:
        """No part is replaced, adapted, hooked or let go, and no weight has been written to."""
        return (
            not self.blind
            and self._is_watched() == self.watched
            and all(map(is_, map(type, self.modules), self.types))
            and all(map(is_, map(dict.get, self.tables, self.names), self.parts))
            and list(map(Tensor.data_ptr, self.weights)) == self.places
            and list(map(VERSION, self.weights)) == self.versions
        )

    def _is_watched(self) -> bool:
        """As layers/token.py has it, of any part."""
        return any(self.hooks) or any(map(dict.__contains__, self.own, repeat("forward")))
