"""The paper's h(z, x, u): the frame that all kinds share, then one memory system a file."""

from importlib import import_module

from melodi.config import ModelConfig
from melodi.config.kinds import KINDS, LayerKind
from melodi.layers.frame import Layer, LayerMemory


def layer_class(kind: LayerKind) -> type[Layer[LayerMemory]]:
    """The class that the kind's row names."""
    module, name = KINDS[kind].layer.split(".")
    found: type[Layer[LayerMemory]] = getattr(import_module(f"melodi.layers.{module}"), name)
    return found


def make_layer(config: ModelConfig, index: int) -> Layer[LayerMemory]:
    return layer_class(config.layers[index])(config, index)
