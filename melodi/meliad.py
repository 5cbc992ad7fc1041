"""Official parameter names <-> ours, so that a checkpoint of google-research/meliad can be used.

    model = from_official(params, window=512, long_term_windows=128)    # name -> array
    to_official(model), to_official(model, grads=True), state_to_official(state)

The official code writes a kernel as (inputs, outputs), so that y = x @ kernel; `nn.Linear` stores
the transpose. Names are Flax paths joined by "/", as in the golden files. The summary mixer of the
last layer exists there but is never used: it is dropped on the way in.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from melodi.config import ModelConfig
from melodi.layers.block_recurrent import RecurrentMemory
from melodi.layers.melodi import LongTermTokenMemory, ShortTermMemory
from melodi.layers.memorizing import MemorizingMemory
from melodi.layers.transformer_xl import XLMemory
from melodi.memory import MemoryState
from melodi.model import LanguageModel

Arrays = dict[str, np.ndarray]


class Entry(NamedTuple):
    """One parameter under both names."""

    ours: str
    official: str
    transposed: bool = False


def from_official(
    params: Mapping[str, Any],
    window: int,
    long_term_windows: int | None = None,
    memory_slots: int | None = None,
    top_k: int | None = None,
) -> LanguageModel:
    """The model of an official checkpoint; all sizes but these are read off names and shapes."""
    arrays = {name.removeprefix("params/"): np.asarray(array) for name, array in params.items()}
    config = _config(arrays, window, long_term_windows, memory_slots, top_k)
    model = LanguageModel(config)
    entries = _entries(config)
    ours = dict(model.named_parameters())
    unused = _unused(config)
    for name in sorted(arrays.keys() - {entry.official for entry in entries}):
        if not name.startswith(unused):
            raise ValueError(
                f"official parameter {name!r} has no place in a {_family(config)} model"
            )
    with torch.no_grad():
        for entry in entries:
            array = _needed_array(arrays, entry.official)
            tensor = torch.from_numpy(np.array(array.T if entry.transposed else array))
            if tensor.shape != ours[entry.ours].shape:
                raise ValueError(
                    f"official parameter {entry.official!r} has shape {array.shape}, expected "
                    f"{tuple(_turned(ours[entry.ours], entry).shape)}: check window={window}"
                )
            ours[entry.ours].copy_(tensor)
    return model.eval()


def to_official(model: LanguageModel, grads: bool = False) -> Arrays:
    """Parameters, or their gradients, under the official names."""
    if model.config.dialect != "meliad":
        raise ValueError(
            f"dialect={model.config.dialect!r} has no official names: only 'meliad' computes what "
            "the official code computes"
        )
    ours: dict[str, Tensor] = dict(model.named_parameters())
    arrays = {}
    for entry in _entries(model.config):
        tensor = ours[entry.ours]
        if grads:
            tensor = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        arrays[entry.official] = _array(_turned(tensor, entry))
    return arrays


def state_to_official(state: MemoryState) -> Arrays:
    """The carried memory under the names of the official evaluation state and database."""
    if state.config.dialect != "meliad":
        raise ValueError(
            f"dialect={state.config.dialect!r} has no official state: only 'meliad' remembers what "
            "the official code remembers"
        )
    if state.open_B.any():
        raise ValueError(
            f"the open windows hold {state.open_B.tolist()} tokens, and the official state has "
            "none: read up to the end of a window"
        )
    _check_kinds(state.config)
    arrays: Arrays = {}
    family = _family(state.config)
    for i, memory in enumerate(state.layers):
        if isinstance(memory, ShortTermMemory | LongTermTokenMemory):
            prefix = f"layer_stack/melodi_layers_{i}"
            arrays[f"{prefix}/short_memory/previous_mems_test"] = _array(memory.z_BSD)
            if isinstance(memory, LongTermTokenMemory):
                arrays[f"{prefix}/long_memory/previous_mems_test"] = _array(memory.tokens_BMD)
            continue
        assert isinstance(memory, XLMemory | RecurrentMemory | MemorizingMemory)
        prefix = _block(family, i)
        cache = f"{prefix}/kvi_cache" if family == "transformer-xl" else prefix
        arrays[f"{cache}/previous_keys_test"] = _array(memory.cache_keys_BHWE.transpose(1, 2))
        arrays[f"{cache}/previous_values_test"] = _array(memory.cache_values_BHWE.transpose(1, 2))
        if isinstance(memory, RecurrentMemory):
            # The official state of a row that has read nothing is zero, as ours is.
            arrays[f"{prefix}/recurrent_state_test"] = _array(memory.c_BRD)
        if isinstance(memory, MemorizingMemory):
            arrays |= _database(f"{prefix}/mem_layer_test/wrapped", memory, state)
    return arrays


def _database(prefix: str, memory: MemorizingMemory, state: MemoryState) -> Arrays:
    """The official memory is a ring: token t lies in slot t mod M, for each row and head."""
    heads, slots = memory.keys_BHME.shape[1:3]
    written_B = state.windows_B * state.config.window
    ring_BM = (torch.arange(slots, device="cpu") + written_B[:, None]) % slots
    index = ring_BM.to(memory.keys_BHME.device)[:, None, :, None].expand_as(memory.keys_BHME)

    def ring(queue_BHME: Tensor) -> np.ndarray:
        # Queue slot i holds token written - M + i, whose place in the ring is (written + i) mod M.
        return _array(torch.zeros_like(queue_BHME).scatter(2, index, queue_BHME).flatten(0, 1))

    return {
        f"{prefix}/key_db": ring(memory.keys_BHME),
        f"{prefix}/value_db": ring(memory.values_BHME),
        f"{prefix}/database_index": written_B.repeat_interleave(heads).int().numpy(),
    }


def _config(
    arrays: Arrays,
    window: int,
    long_term_windows: int | None,
    memory_slots: int | None,
    top_k: int | None,
) -> ModelConfig:
    """Reads the architecture off the official names and shapes."""
    vocab_size, width = _needed_array(arrays, "embed/embedding").shape
    layer = re.compile(r"(?:transformer|melodi_layers_)(\d+)/")
    indices = {int(match[1]) for name in arrays if (match := layer.search(name))}
    if indices != set(range(len(indices))) or not indices:
        raise ValueError(
            f"the official parameters name layers {sorted(indices)}: expected 0, 1, 2 …"
        )
    if "layer_stack/summary_embeddings" in arrays:
        family = "melodi"
        sizes = _melodi_sizes(arrays, window, len(indices), long_term_windows)
    else:
        family = "transformer-xl" if "layer_stack/final_layernorm/scale" in arrays else "memory"
        sizes = _baseline_sizes(arrays, family, len(indices), memory_slots)
    if long_term_windows is not None and family != "melodi":
        raise ValueError(f"long_term_windows={long_term_windows} is for Melodi only: leave it out")
    if memory_slots is not None and "memory_slots" not in sizes:
        raise ValueError(f"memory_slots={memory_slots} is for Memorizing only: leave it out")
    if top_k is not None and top_k != memory_slots:
        raise ValueError(
            f"top_k={top_k} of memory_slots={memory_slots}: the official bucketed top-k is not "
            "reproduced; leave top_k out to read the whole memory"
        )
    first = f"{_block(family, 0)}/tbase"
    ffn = "mlp_layer/input_layer" if family == "melodi" else "hidden0"
    heads, inner, ffn_width = (
        _needed_array(arrays, f"{first}/{name}").shape[-1]
        for name in (
            "_kvq/attention_scale",
            "_kvq/queries_layer/kernel",
            f"ffn/{ffn}/kernel",
        )
    )
    return ModelConfig(
        vocab_size=vocab_size,
        width=width,
        num_heads=heads,
        head_width=inner // heads,
        ffn_width=ffn_width,
        window=window,
        dialect="meliad",
        **sizes,
    )


def _baseline_sizes(
    arrays: Arrays, family: str, count: int, memory_slots: int | None
) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    kinds = ["xl"] * count
    for i in range(count):
        prefix = _block(family, i)
        if f"{prefix}/recurrent_initial_state" in arrays:
            kinds[i] = "recurrent"
            sizes["recurrent_states"] = len(arrays[f"{prefix}/recurrent_initial_state"])
        elif f"{prefix}/external_memory_bias" in arrays:
            kinds[i] = "memorizing"
            sizes["memory_slots"] = _needed("memory_slots", memory_slots, "Memorizing")
    return {**sizes, "layers": tuple(kinds)}


def _melodi_sizes(
    arrays: Arrays, window: int, count: int, long_term_windows: int | None
) -> dict[str, Any]:
    summary = len(arrays["layer_stack/summary_embeddings"])
    sizes: dict[str, Any] = {"short_term_tokens": summary}
    kinds = ["short"] * count
    mixers = 0
    for i in range(count):
        prefix = _block("melodi", i)
        short = arrays.get(f"{prefix}/token_mixing_short/lin_mix/kernel")
        long = arrays.get(f"{prefix}/long_mem_token_mixing/lin_mix/kernel")
        if short is not None:
            mixers += 1
            if short.shape != (window + summary, summary):
                raise ValueError(
                    f"{prefix}/token_mixing_short maps {len(short)} to {short.shape[1]} tokens: "
                    f"only equal numbers of summary and short-term tokens (here {summary}) "
                    f"over window={window} are supported"
                )
        if f"{prefix}/attn_gate" in arrays:
            kinds[i] = "long"
            sizes["long_term_windows"] = _needed("long_term_windows", long_term_windows, "Melodi")
            sizes["long_term_tokens"] = summary if long is None else long.shape[1]
            sizes["copy_short_to_long"] = long is None
    sizes["branching"] = mixers > 0
    sizes["layers"] = tuple(kinds)
    return sizes


def _needed_array(arrays: Arrays, name: str) -> np.ndarray:
    if name not in arrays:
        raise ValueError(f"official parameter {name!r} is missing: is the checkpoint whole?")
    return arrays[name]


def _needed(name: str, value: int | None, family: str) -> int:
    if value is None:
        raise ValueError(f"{name} cannot be read off an official {family} checkpoint: give {name}=")
    return value


def _family(config: ModelConfig) -> str:
    if config.family == "melodi":
        return "melodi"
    return "transformer-xl" if set(config.layers) == {"xl"} else "memory"


OFFICIAL = ("short", "long", "xl", "recurrent", "memorizing")
"""Layer kinds that the official code has."""


def _check_kinds(config: ModelConfig) -> None:
    for kind in config.layers:
        if kind not in OFFICIAL:
            raise ValueError(f"layer kind {kind!r} has no counterpart in the official code")


def _block(family: str, index: int) -> str:
    return {
        "melodi": f"layer_stack/melodi_layers_{index}/melodi_layer",
        "transformer-xl": f"layer_stack/transformer{index}",
        "memory": f"transformer{index}",
    }[family]


def _unused(config: ModelConfig) -> str:
    """The prefix of what the official code creates and never uses."""
    return f"{_block('melodi', len(config.layers) - 1)}/token_mixing_summary/"


def _entries(config: ModelConfig) -> list[Entry]:
    """Every parameter of the model under both names."""
    _check_kinds(config)
    family = _family(config)
    root = "" if family == "memory" else "layer_stack/"
    entries = [
        Entry("embedding.weight", "embed/embedding"),
        Entry("final_norm.weight", f"{root}final_layernorm/scale"),
    ]
    if config.family == "melodi":
        entries.append(Entry("summary", "layer_stack/summary_embeddings"))
    for i, kind in enumerate(config.layers):
        entries += _block_entries(config, i, kind, family)
        if kind in ("short", "long"):
            entries += _melodi_entries(config, i, kind)
        elif kind == "recurrent":
            entries += _recurrent_entries(i, _block(family, i))
        elif kind == "memorizing":
            entries.append(
                Entry(f"layers.{i}.gate.logit", f"{_block(family, i)}/external_memory_bias")
            )
    return entries


def _block_entries(config: ModelConfig, i: int, kind: str, family: str) -> list[Entry]:
    ours, prefix = f"layers.{i}.block", _block(family, i)
    base, kvq = f"{prefix}/tbase", f"{prefix}/tbase/_kvq"
    norm = kvq if family == "memory" else base
    ffn = {"hidden": f"{base}/ffn/hidden0", "output": f"{base}/ffn/output_layer"}
    if family == "melodi":
        mlp = f"{base}/ffn/mlp_layer"
        ffn = {"hidden": f"{mlp}/input_layer", "output": f"{mlp}/output_layer"}
    entries = [
        Entry(f"{ours}.attention_norm.weight", f"{norm}/pre_attn_layernorm/scale"),
        Entry(f"{ours}.query.weight", f"{kvq}/queries_layer/kernel", True),
        Entry(f"{ours}.key.weight", f"{kvq}/keys_layer/kernel", True),
        Entry(f"{ours}.value.weight", f"{kvq}/values_layer/kernel", True),
        Entry(f"{ours}.scale.factor", f"{kvq}/attention_scale"),
        Entry(f"{ours}.output.weight", f"{base}/post_attn_mlp/output_layer/kernel", True),
        Entry(f"{ours}.ffn_norm.weight", f"{base}/pre_ffn_layernorm/scale"),
    ]
    for name, official in ffn.items():
        entries.append(Entry(f"{ours}.ffn.{name}.weight", f"{official}/kernel", True))
        if family == "melodi":
            entries.append(Entry(f"{ours}.ffn.{name}.bias", f"{official}/bias"))
    if kind != "memorizing":
        entries.append(
            Entry(f"position_bias.tables.{i}", f"{prefix}/relative_positions/rel_embedding")
        )
    return entries


def _melodi_entries(config: ModelConfig, i: int, kind: str) -> list[Entry]:
    prefix, entries = _block("melodi", i), []
    branches = {"right": "token_mixing_short"}
    if i < config.last_writing_layer:
        branches["up"] = "token_mixing_summary"
    for name, official in branches.items() if config.branching else ():
        ours = f"layers.{i}.{name}"
        entries += [
            Entry(f"{ours}.context_norm.weight", f"{prefix}/{official}/layernorm1/scale"),
            Entry(f"{ours}.summary_norm.weight", f"{prefix}/{official}/layernorm2/scale"),
            Entry(f"{ours}.weight", f"{prefix}/{official}/lin_mix/kernel"),
            Entry(f"{ours}.bias", f"{prefix}/{official}/lin_mix/bias"),
        ]
    if kind == "long":
        entries.append(Entry(f"layers.{i}.gate.logit", f"{prefix}/attn_gate"))
        if not config.copy_short_to_long:
            official = f"{prefix}/long_mem_token_mixing/lin_mix"
            entries.append(Entry(f"layers.{i}.long.weight", f"{official}/kernel"))
            entries.append(Entry(f"layers.{i}.long.bias", f"{official}/bias"))
    return entries


def _recurrent_entries(i: int, prefix: str) -> list[Entry]:
    ours, base = f"layers.{i}", f"{prefix}/recurrent_tbase"
    kvq, after = f"{base}/_kvq", f"{base}/post_attn_mlp"
    return [
        Entry(f"{ours}.read_query.weight", f"{prefix}/tbase/_kvq/queries2_layer/kernel", True),
        Entry(f"{ours}.read_scale.factor", f"{prefix}/tbase/attention_scale2"),
        Entry(f"{ours}.state.initial", f"{prefix}/recurrent_initial_state"),
        Entry(f"{ours}.state.position", f"{kvq}/position_embeddings"),
        Entry(f"{ours}.state.norm.weight", f"{kvq}/pre_attn_layernorm/scale"),
        Entry(f"{ours}.state.key.weight", f"{kvq}/keys_layer/kernel", True),
        Entry(f"{ours}.state.value.weight", f"{kvq}/values_layer/kernel", True),
        Entry(f"{ours}.state.self_query.weight", f"{kvq}/queries_layer/kernel", True),
        Entry(f"{ours}.state.self_scale.factor", f"{kvq}/attention_scale"),
        Entry(f"{ours}.state.token_query.weight", f"{kvq}/queries2_layer/kernel", True),
        Entry(f"{ours}.state.token_scale.factor", f"{base}/attention_scale2"),
        Entry(f"{ours}.state.output.weight", f"{after}/output_layer/kernel", True),
        Entry(f"{ours}.state.gate", f"{after}/gate_bias"),
    ]


def _turned(tensor: Tensor, entry: Entry) -> Tensor:
    return tensor.T if entry.transposed else tensor


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().numpy().copy()
