"""Inside a training segment a FIFO is kept as base and fresh slots: the numbers are the same."""

import pytest
import torch
from torch import Tensor
from zoo import WINDOW, ZOO, make, random_tokens

from melodi import LanguageModel, MemoryState, ModelConfig
from melodi.layers.growing import GrowingAttention

TOLERANCE = dict(rtol=0, atol=1e-10)
KINDS = {"long", "long-only", "memorizing"}
LONG = {name: config for name, config in ZOO.items() if KINDS & {*config.layers}}


@pytest.mark.parametrize("config", LONG.values(), ids=LONG.keys())
def test_growing_equals_general(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nats, gradients and memory of rows that have read much, little and nothing, in a segment that
    pushes everything out of the queue, and in one that goes on from its graph."""
    model = make(config)
    before, tokens = random_tokens(3, 4 * WINDOW), random_tokens(3, 5 * WINDOW, seed=1)
    with torch.no_grad():
        _, state = model(before, model.empty_state(3))
        state = state.forget([False, True, True])
        _, state = model(before, state, lengths=[4 * WINDOW, WINDOW, 0])
        state = state.forget([False, False, False]).detach()

    used: list[bool] = []
    apply = GrowingAttention.apply
    monkeypatch.setattr(GrowingAttention, "apply", lambda *a: (used.append(True), apply(*a))[1])
    fast = segments(model, tokens, state)
    whole = "memorizing" not in config.layers and config.answers.long_term_store == "tokens"
    assert used or whole or config.top_k is not None
    monkeypatch.setattr(LanguageModel, "_grows", lambda *_: False)
    for ours, expected in zip(fast, segments(model, tokens, state), strict=True):
        torch.testing.assert_close(ours, expected, **TOLERANCE)


def segments(model: LanguageModel, tokens: Tensor, state: MemoryState) -> list[Tensor]:
    """Two segments with one graph: nats, gradients, and what is remembered."""
    model.zero_grad()
    first = model.nats(tokens, tokens.roll(-1, 1), state)
    second = model.nats(tokens.flip(1), tokens, first.state)
    (first.nats_BT.sum() + second.nats_BT.square().sum()).backward()
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    memory = [tensor.detach() for layer in second.state.layers for tensor in layer]
    return [first.nats_BT.detach(), second.nats_BT.detach(), *memory, *grads]
