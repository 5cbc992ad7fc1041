"""Other implementations, from PyPI, at our width, depth and vocabulary, on the same tokens.

Each is used as its authors show it, memory carried from segment to segment; each that is not
installed, or fails, is left out with one line. Their operations are not counted, so that they have
no share of a roof.

Shapes: B rows, T tokens, one more than are predicted.
"""

import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from melodi.bench import full_attention
from melodi.bench.measure import one_line
from melodi.bench.sizes import Size
from melodi.bench.subjects import Subject, random_tokens

GENERATED = 8
"""Tokens of a sample of generation: these models read the window again for each."""


def block_recurrent(size: Size, context: int) -> Subject:
    from block_recurrent_transformer_pytorch import BlockRecurrentTransformer

    c, states = size.reference, size.models["block-recurrent"].recurrent_states
    model = BlockRecurrentTransformer(
        num_tokens=c.vocab_size,
        dim=c.width,
        depth=len(c.layers),
        dim_head=c.head_size,
        heads=c.num_heads,
        max_seq_len=size.segment,
        block_width=c.window,
        num_state_vectors=states,
        recurrent_layers=(max(len(c.layers) - 2, 1),),
    )
    tokens_BT = random_tokens(c, size.rows, size.segment + 1)
    with torch.no_grad():
        _, caches, found = model(tokens_BT, return_loss=True)

    def loss() -> Any:
        return model(tokens_BT, return_loss=True, xl_memories=caches, states=found)[0]

    def generate() -> None:
        start = max(c.window // 2, 1)
        model.generate(
            tokens_BT[:1, :start],
            length=start + GENERATED,
            xl_memories=[cache[:, :1] for cache in caches],
            states=[state[:1] for state in found],
        )

    return subject("block-recurrent (PyPI)", model, loss, generate)


def memorizing(size: Size, context: int) -> Subject:
    from memorizing_transformers_pytorch import MemorizingTransformer

    c, slots = size.reference, size.models["memorizing"].memory_slots
    folder = tempfile.TemporaryDirectory(prefix="melodi-bench-")
    model = MemorizingTransformer(
        num_tokens=c.vocab_size,
        dim=c.width,
        depth=len(c.layers),
        dim_head=c.head_size,
        heads=c.num_heads,
        memorizing_layers=len(c.layers) // 2 + 1,
        max_knn_memories=slots,
        xl_max_memories=c.window,
        knn_memories_directory=folder.name,
    )
    tokens_BT = random_tokens(c, size.rows, size.segment + 1)
    memories, caches = model.create_knn_memories(batch_size=size.rows), None

    def loss() -> Any:
        nonlocal caches
        assert folder, "the folder lives as long as the model"
        total: Any = 0.0
        for start in range(0, size.segment, c.window):
            window_BT = tokens_BT[:, start : start + c.window]
            labels_BT = tokens_BT[:, start + 1 : start + c.window + 1]
            part, caches = model(window_BT, memories, xl_memories=caches, labels=labels_BT)
            total = total + part / size.segment_windows
        return total

    return subject("memorizing (PyPI)", model, loss, None)


def recurrent_memory(size: Size, context: int) -> Subject:
    from recurrent_memory_transformer_pytorch import (
        RecurrentMemoryTransformer,
        RecurrentMemoryTransformerWrapper,
    )

    c = size.reference
    # Several residual streams and a cache beside the memory are no part of the paper's model.
    model = RecurrentMemoryTransformerWrapper(
        RecurrentMemoryTransformer(
            c.width,
            num_tokens=c.vocab_size,
            depth=len(c.layers),
            num_memory_tokens=size.models["rmt"].memory_tokens,
            seq_len=c.window,
            dim_head=c.head_size,
            heads=c.num_heads,
            use_xl_memories=False,
            num_residual_streams=1,
        )
    )
    tokens_BT = random_tokens(c, size.rows, size.segment + 1)
    with torch.no_grad():
        memories = model(tokens_BT, return_loss=True)[1]

    def loss() -> Any:
        return model(tokens_BT, memories, return_loss=True)[0]

    def generate() -> None:
        start = max(c.window // 2, 1)
        model.generate(tokens_BT[:1, :start], length=start + GENERATED, memories=memories[:1])

    return subject("rmt (PyPI)", model, loss, generate)


def subject(
    name: str, model: Any, loss: Callable[[], Any], generate: Callable[[], None] | None
) -> Subject:
    def train() -> None:
        loss().backward()
        model.zero_grad(set_to_none=True)

    return Subject(name, train, torch.inference_mode()(loss), generate, GENERATED)


ALTERNATIVES: dict[str, tuple[str, Callable[[Size, int], Subject]]] = {
    full_attention.NAME: ("transformers", full_attention.make_subject),
    "block-recurrent (PyPI)": ("block_recurrent_transformer_pytorch", block_recurrent),
    "memorizing (PyPI)": ("memorizing_transformers_pytorch", memorizing),
    "rmt (PyPI)": ("recurrent_memory_transformer_pytorch", recurrent_memory),
}
"""Name -> the module that it needs, and what makes it, given the context of full attention."""


def absent(name: str) -> str | None:
    """A line where the alternative is not installed."""
    module = ALTERNATIVES[name][0]
    if find_spec(module) is not None:
        return None
    package = module.replace("_", "-")
    return f"{name}: left out, {package} is not installed: pip install '.[bench]'"


def make_alternative(
    name: str, size: Size, context: int, note: Callable[[str], None]
) -> Subject | None:
    """The alternative; None, and one line, where it cannot be had."""
    if line := absent(name):
        note(line)
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ALTERNATIVES[name][1](size, context)
    except Exception as error:
        note(f"{name}: left out, {one_line(error)}")
        return None
