"""Inside a training segment a FIFO is kept as base and fresh slots: the numbers are the same."""

import pytest
import torch
from torch import Tensor
from zoo import WINDOW, ZOO, make, random_tokens

from melodi import LanguageModel, MemoryState, ModelConfig
from melodi.layers.growing import GrowingAttention, attend_growing
from melodi.layers.transformer import Pairs

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


@pytest.mark.parametrize("zeros", [(0, 0, 0), (8, 58, 108)])
def test_attention_in_bfloat16(zeros: tuple[int, ...]) -> None:
    """Outputs and gradients of rows that have filled much, half and nothing: as near to float64 as
    the rounding of scores allows."""
    half, exact = (attended(dtype, zeros) for dtype in (torch.bfloat16, torch.float64))
    for ours, expected in zip(half, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - expected).norm() < 0.03 * expected.norm()
    # The rounded sum by which the softmax divides would put all that a query gets off by a factor.
    gradient, expected = half[1].double(), exact[1]
    factor_BHt = (gradient * expected).sum(-1) / expected.square().sum(-1)
    assert (factor_BHt - 1).abs().mean() < 0.005


def attended(dtype: torch.dtype, zeros: tuple[int, ...]) -> list[Tensor]:
    """Attention of unit vectors times six, and its gradients."""
    generator = torch.Generator().manual_seed(0)

    def random(slots: int, length: float | None) -> Tensor:
        x = torch.randn(3, 2, slots, 32, generator=generator)
        x = x if length is None else length * x / x.norm(dim=-1, keepdim=True)
        return x.bfloat16().to(dtype)

    q, *fresh = inputs = [random(40, 6.0), random(8, 1.0), random(8, None)]
    base, grad = Pairs(random(100, 1.0), random(100, None)), random(40, None)
    for x in inputs:
        x.requires_grad_()
    out = attend_growing(q, base, Pairs(*fresh), (100, 50, 0), zeros)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


@pytest.mark.parametrize("config", LONG.values(), ids=LONG.keys())
def test_growing_under_autocast(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues that hold something grow here too; what is carried keeps its own numbers, and so do
    gradients. Both are near those of float32: single gradients of so small a model may be far."""
    model, tokens = make(config).float(), random_tokens(3, 5 * WINDOW, seed=1)
    with torch.no_grad():
        _, state = model(random_tokens(3, 2 * WINDOW), model.empty_state(3))
    used: list[torch.dtype] = []
    apply = GrowingAttention.apply
    monkeypatch.setattr(
        GrowingAttention, "apply", lambda q, *a: (used.append(q.dtype), apply(q, *a))[1]
    )
    whole = segments(model, tokens, state)
    with torch.autocast("cpu", torch.bfloat16):
        half = segments(model, tokens, state)
    assert {*used} in ({torch.float32, torch.bfloat16}, set())
    assert used or config.answers.long_term_store == "tokens" or config.top_k is not None
    assert all(tensor.dtype == torch.float32 for tensor in half)
    assert (half[0] - whole[0]).abs().mean() < 0.05
    if config.top_k is None:  # rounding may choose other slots
        far = [float((a - b).norm() / (b.norm() + 1)) for a, b in zip(half, whole, strict=True)]
        assert sorted(far)[len(far) // 2] < 0.1


def segments(model: LanguageModel, tokens: Tensor, state: MemoryState) -> list[Tensor]:
    """Two segments with one graph: nats, gradients, and what is remembered."""
    model.zero_grad()
    first = model.nats(tokens, tokens.roll(-1, 1), state)
    second = model.nats(tokens.flip(1), tokens, first.state)
    (first.nats_BT.sum() + second.nats_BT.square().sum()).backward()
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    memory = [tensor.detach() for layer in second.state.layers for tensor in layer]
    return [first.nats_BT.detach(), second.nats_BT.detach(), *memory, *grads]
