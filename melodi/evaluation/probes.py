"""Is the memory used? Gates, and the share of attention that each memory gets.

A `Probe` goes through the model with the tokens, so that nothing has to be patched: it works alone,
under DDP and FSDP2, and with compiled layers, which run uncompiled while they are watched.
"""

from typing import Any

import numpy as np
import torch

from melodi.data.store import Documents
from melodi.evaluation.documents import Nats
from melodi.layers.frame import Layer, LayerMemory, Probe
from melodi.layers.gate import Gate
from melodi.model import LanguageModel
from melodi.sharded import gather
from melodi.stream.reader import evaluating

SHARE_DOCUMENTS, SHARE_WINDOWS = 4, 16
"""Of an evaluation, over which attention to memory is measured."""


def gates(model: LanguageModel) -> dict[str, float]:
    """The mean α of each layer that has a gate: the share of what is read from memory.

    Of a sharded model every process must ask at the same time.
    """
    return {
        f"gate/{i}": gather(module.alpha().mean()).item()
        for i, layer in enumerate(model.stack)
        for module in layer.modules()
        if isinstance(module, Gate)
    }


def memory_shares(
    model: LanguageModel, tokens: np.ndarray, nats: Nats | None = None
) -> dict[str, float]:
    """How attention is shared out while these tokens of one document are read, from the second
    window on.

    For each layer the share of self-attention that goes to its past ("short-term/3", "cache/0");
    for each long-term memory, of the attention that it gets, the share by age of the window
    ("long-term/3/age/1" is the newest); and "past", the mean over all layers that have a past.
    """
    weight = model.embedding.weight
    tokens_1T = torch.from_numpy(tokens.astype(np.int64))[None].to(weight.device)
    probe = Probe()
    eager = torch.compiler.set_stance("force_eager")
    with evaluating(model), torch.inference_mode(), eager:
        targets_1T = torch.full_like(tokens_1T, -1)
        (nats or model.nats)(tokens_1T, targets_1T, model.empty_state(1), probe=probe)
    shares = {f"{layer.past_is}/{layer.index}": past_share(probe, layer) for layer in model.stack}
    found = {name: share for name, share in shares.items() if share is not None}
    if found:
        found["past"] = float(np.mean(list(found.values())))
    for layer in model.stack:
        found |= shares_by_age(probe, layer)
    return found


def attention(model: LanguageModel, documents: Documents, chosen: list[int]) -> dict[str, Any]:
    """`memory_shares` at the beginnings of the first documents that are longer than a window, on
    average over those that have the share, and how much was read for it."""
    window = model.config.window
    long = [i for i in chosen if documents.lengths[i] > window][:SHARE_DOCUMENTS]
    samples = [documents[i][: SHARE_WINDOWS * window] for i in long]
    each = [memory_shares(model, sample) for sample in samples]
    names = dict.fromkeys(name for shares in each for name in shares)
    return {
        "documents": len(samples),
        "tokens": sum(map(len, samples)),
        "shares": {
            name: float(np.mean([shares[name] for shares in each if name in shares]))
            for name in names
        },
    }


def past_share(probe: Probe, layer: Layer[LayerMemory]) -> float | None:
    """Of self-attention, without the first window, which has no past."""
    weights = probe.shares.get((layer.index, "self"), [])[1:]
    if not layer.past_slots or not weights:
        return None
    return float(np.mean([w[: layer.past_slots].sum().item() for w in weights]))


def shares_by_age(probe: Probe, layer: Layer[LayerMemory]) -> dict[str, float]:
    """Of the last window's attention to long-term memory; age 1 is the window before it."""
    weights = probe.shares.get((layer.index, "long-term"), [])
    if not weights:
        return {}
    newest_first = weights[-1].flip(0).split(layer.entries_per_window)
    return {
        f"long-term/{layer.index}/age/{age}": part.sum().item()
        for age, part in enumerate(newest_first, 1)
    }
