"""Tiny models of every kind, in every dialect: each law is one test body over all of them.

What the tests know of the inside of a model, beyond its public names, is here: the names of the
parameters that write memory, the fields of a memory, and the two kernels with tests of their own.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from melodi import LanguageModel, MemoryState, ModelConfig
from melodi.config import DIALECTS
from melodi.config.kinds import KINDS as ROWS
from melodi.layers.memorizing import attend_best
from melodi.layers.transformer import Pairs, attend, bucket_of_distance

__all__ = ["Pairs", "attend", "attend_best", "bucket_of_distance"]

WINDOW, VOCAB = 6, 23

_SIZES = ModelConfig(
    vocab_size=VOCAB,
    width=12,
    num_heads=2,
    head_width=5,
    ffn_width=16,
    window=WINDOW,
    short_term_tokens=3,
    long_term_tokens=2,
    long_term_windows=3,
    recurrent_states=4,
    memory_slots=15,
    memory_tokens=3,
    compressed_slots=4,
    compression_rate=2,
    associative_width=2,  # with random weights a wider ARMT grows beyond what float64 can tell
    layers=("plain",),
)

KINDS = {
    "melodi": replace(_SIZES, layers=("short", "long", "short")),
    "melodi-two-long": replace(_SIZES, layers=("long", "short", "long")),
    "melodi-few-short": replace(_SIZES, layers=("short", "plain", "long-only", "plain")),
    "melodi-long-only": replace(_SIZES, layers=("plain", "long-only")),
    "melodi-no-branching": replace(_SIZES, layers=("short", "long", "plain"), branching=False),
    "melodi-copy": replace(
        _SIZES, layers=("long", "short"), copy_short_to_long=True, long_term_tokens=3
    ),
    "transformer-xl": replace(_SIZES, layers=("xl", "xl", "plain")),
    "block-recurrent": replace(_SIZES, layers=("xl", "recurrent", "xl")),
    "memorizing": replace(_SIZES, layers=("xl", "memorizing", "xl")),
    "memorizing-top-k": replace(_SIZES, layers=("xl", "memorizing"), top_k=4),
    "memorizing-alone": replace(_SIZES, layers=("memorizing", "memorizing")),
    "no-memory": replace(_SIZES, layers=("plain", "plain")),
    "rmt": replace(_SIZES, layers=("rmt", "rmt", "rmt")),
    "rmt-causal": replace(_SIZES, layers=("rmt", "rmt"), memory_mask="causal"),
    "autocompressor": replace(_SIZES, layers=("autocompressor",) * 3),
    "compressive": replace(_SIZES, layers=("compressive", "compressive", "plain")),
    "compressive-convolution": replace(
        _SIZES, layers=("compressive", "xl", "compressive"), compressor="convolution"
    ),
    "infini": replace(_SIZES, layers=("infini", "plain", "infini")),
    "infini-delta": replace(_SIZES, layers=("infini", "infini"), infini_update="delta"),
    "infini-in-xl": replace(_SIZES, layers=("xl", "infini", "memorizing")),
    "armt": replace(_SIZES, layers=("armt", "armt", "armt")),
    "armt-few": replace(_SIZES, layers=("armt", "plain", "armt", "plain")),
}

ZOO = {
    f"{kind}-{dialect}": replace(config, dialect=dialect)
    for kind, config in KINDS.items()
    for dialect in DIALECTS
}


def make(config: ModelConfig, seed: int = 0) -> LanguageModel:
    """A float64 model whose every parameter matters: none is left at zero or one."""
    generator = torch.Generator().manual_seed(seed)
    model = LanguageModel(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(parameter.new_zeros(()) + 0.3 * noise + (parameter.dim() == 1) * 0.7)
    return model


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def cases(configs: dict[str, ModelConfig], have: Callable[..., Any] = lambda _: True) -> Any:
    """A parametrization over the models that have what the law is about."""
    chosen = {name: config for name, config in configs.items() if have(config)}
    assert chosen
    return pytest.mark.parametrize("config", chosen.values(), ids=chosen.keys())


def remembers(config: ModelConfig) -> bool:
    return sum(config.memory_floats()) > 0


def writers(config: ModelConfig) -> list[str]:
    """The parameters whose only use is to write memory: M_right, M_long, the recurrent output."""
    with torch.device("meta"):
        names = [name for name, _ in LanguageModel(config).named_parameters()]
    return [name for name in names if re.search(r"\.(right|long)\.|\.state\.output\.", name)]


def mixer_weights(model: LanguageModel, layer: int) -> dict[str, Tensor]:
    """The matrices of a layer's mixers: up, right, long."""
    found = {}
    for name, parameter in model.named_parameters():
        match = re.fullmatch(rf"layers\.{layer}\.(up|right|long)\.weight", name)
        if match:
            found[match[1]] = parameter
    return found


def weights_by_name(model: LanguageModel) -> dict[str, Tensor]:
    """Copies of the parameters that can be differentiated, under the names of the reference."""
    return {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in model.named_parameters()
    }


QUEUES = {
    "long": "long_term_tokens",
    "long-only": "long_term_tokens",
    "memorizing": "window",
    "autocompressor": "long_term_tokens",
}
"""Layer kinds with a queue, and the size that says how many entries a window adds to it."""


def queues(config: ModelConfig) -> dict[int, tuple[str, int, int]]:
    """Layer -> the queue's field, the entries that a window adds, and the axis of its slots."""
    if config.layers[0] == "autocompressor":  # one queue for the stack
        return {0: ("tokens_BMD", config.long_term_tokens, 1)}
    found = {}
    for i, kind in enumerate(config.layers):
        if kind in QUEUES:
            tokens = kind != "memorizing" and config.answers.long_term_store == "tokens"
            field, axis = ("tokens_BMD", 1) if tokens else ("values_BHME", 2)
            found[i] = (field, getattr(config, QUEUES[kind]), axis)
    return found


def map_state(state: MemoryState, change: Callable[[str, str, Tensor], Tensor]) -> MemoryState:
    """A state with other tensors: `change` gets the layer's kind, the field and the tensor."""

    def changed(memories: Any) -> Any:
        return tuple(
            memory._replace(**{f: change(kind, f, t) for f, t in memory._asdict().items()})
            for kind, memory in zip(state.config.layers, memories, strict=True)
        )

    opened = state.open_window and changed(state.open_window)
    return replace(state, layers=changed(state.layers), open_window=opened)


SUMS = ("M_BHEE", "z_BHE", "A_BKD", "z_BK")
"""Memories that are sums: they have no slots that could hold nothing, and start from zero."""


def spoil(state: MemoryState, poison: float) -> MemoryState:
    """Overwrites every slot that holds nothing, by the two integers of emptiness."""
    masked = state.config.answers.empty_memory == "masked"
    empty_B, open_B = state.windows_B == 0, state.open_B

    def excluded(kind: str, field: str, tensor: Tensor) -> Tensor:
        rows, slots = len(tensor), tensor.size(2 if tensor.dim() == 4 else 1)
        slot_BM = torch.arange(slots).expand(rows, -1)
        if field == "kept_BWD":
            return slot_BM >= open_B[:, None]
        if field in ("keys_BHkE", "values_BHkE"):  # of an open window: the past, then the window
            row = ROWS[kind]  # type: ignore[index]
            past = row.past(state.config)
            filled = [row.filled_past(state.config, n) for n in state.windows_B.tolist()]
            unseen = (slot_BM < past - torch.tensor(filled)[:, None]) & masked
            return unseen | (slot_BM >= past + open_B[:, None])
        if field == "c_BRD" or kind == "rmt":  # a learned first state, in every dialect
            return empty_B[:, None].expand(-1, slots)
        if not masked:  # zeros that are attended to
            return torch.zeros(rows, slots, dtype=torch.bool)
        if field in ("keys_BHME", "values_BHME", "tokens_BMD"):
            written_B = state.windows_B * getattr(state.config, QUEUES[kind])
            return slot_BM < slots - written_B[:, None]
        if field == "compressed_BCD":
            per_window = state.config.window // state.config.compression_rate
            return slot_BM < slots - ((state.windows_B - 1) * per_window).clamp(min=0)[:, None]
        if field.startswith(("z_BSD", "cache_", "memory_")):
            return empty_B[:, None].expand(-1, slots)
        return torch.zeros(rows, slots, dtype=torch.bool)

    def spoiled(kind: str, field: str, tensor: Tensor) -> Tensor:
        if field in SUMS:
            return tensor
        mask = excluded(kind, field, tensor)
        mask = mask[:, None, :, None] if tensor.dim() == 4 else mask[:, :, None]
        return tensor.masked_fill(mask, poison)

    return map_state(state, spoiled)


def at_odd_offset(tensor: Tensor) -> Tensor:
    """The same values in memory that begins one entry after an aligned address."""
    moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return moved.copy_(tensor)
