"""What each memory is worth: the same weights in a stack that lacks one of them.

A layer whose memory is empty computes what the kind without that memory computes: masked slots get
no attention, and an empty queue leaves self-attention as it is. To drop one memory at the edge of
every window is therefore to read with a stack of other kinds and the same weights, all the way: no
memory of its own is written either, and what the other memory holds was written without it. In the
answer empty_memory=zeros, where empty slots are attended to, it means that the slots are not there.
"""

from dataclasses import replace
from typing import Literal

import torch

from melodi.config import ModelConfig
from melodi.config.kinds import LayerKind
from melodi.model import LanguageModel

Part = Literal["short_term", "long_term"]
PARTS: tuple[Part, ...] = ("short_term", "long_term")
WITHOUT: dict[Part, dict[LayerKind, LayerKind]] = {
    "short_term": {"short": "plain", "long": "long-only"},
    "long_term": {"long": "short", "long-only": "plain", "memorizing": "xl"},
}
"""Of the others, the baselines have one memory, and no kind is the Compressive Transformer or
Memorizing without its cache."""


def without(model: LanguageModel, part: Part) -> LanguageModel | None:
    """The model without one of its memories, on the same weights; None where it has not both, or
    where no kind is its kind without that one."""
    config = remaining(model.config, part)
    if config is None:
        return None
    with torch.device("meta"):
        other = LanguageModel(config)
    weights = model.state_dict()
    needed = other.state_dict()
    if not needed.keys() <= weights.keys():  # the kinds differ in more than memory
        return None
    other.load_state_dict({name: weights[name] for name in needed}, assign=True)
    return other.train(model.training)


def remaining(config: ModelConfig, part: Part) -> ModelConfig | None:
    """The config of the stack that lacks a part, if the other part is left."""
    index = PARTS.index(part)
    copied = part == "short_term" and config.copy_short_to_long  # long-term memory is made of it
    if copied or not all(config.memory_floats()):
        return None
    layers = tuple(WITHOUT[part].get(kind, kind) for kind in config.layers)
    top_k = config.top_k if "memorizing" in layers else None
    left = replace(config, layers=layers, top_k=top_k)
    floats = left.memory_floats()
    return left if floats[index] == 0 and floats[1 - index] > 0 else None
