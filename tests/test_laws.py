"""The laws that every model obeys, whatever its kind and dialect. Each docstring is the law."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from zoo import WINDOW, ZOO, make, random_tokens

from melodi import LanguageModel, MemoryState, ModelConfig
from melodi.layers.melodi import LongTermMemory, LongTermTokenMemory
from melodi.layers.memorizing import MemorizingMemory

TOLERANCE = dict(rtol=0, atol=1e-10)

every_kind = pytest.mark.parametrize("config", ZOO.values(), ids=ZOO.keys())
remembering = pytest.mark.parametrize(
    "config",
    [config for name, config in ZOO.items() if "no-memory" not in name],
    ids=[name for name in ZOO if "no-memory" not in name],
)


def watch_inputs(model: LanguageModel) -> list[Tensor]:
    """Collects the embedded tokens of every piece, so that gradients to them can be taken."""
    inputs: list[Tensor] = []
    model.embedding.register_forward_hook(lambda _m, _i, output: inputs.append(output))
    return inputs


def input_gradient(output: Tensor, inputs: list[Tensor]) -> Tensor:
    """How much the output depends on each embedded token, (B, T)."""
    grads = torch.autograd.grad(output.sum(), inputs, allow_unused=True, retain_graph=True)
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)]
    return torch.cat(filled, dim=1).abs().sum(-1)


@every_kind
def test_causality(config: ModelConfig) -> None:
    """Logits at t depend on no token after t, across windows too, and do depend on token t."""
    model = make(config)
    inputs = watch_inputs(model)
    logits, _ = model(random_tokens(1, 3 * WINDOW + 2), model.empty_state(1))
    for t in (0, WINDOW - 1, WINDOW, 2 * WINDOW + 1, 3 * WINDOW + 1):
        dependence = input_gradient(logits[:, t], inputs)[0]
        assert dependence[t] > 0
        assert (dependence[t + 1 :] == 0).all()


@every_kind
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_any_cut_gives_the_same_logits(config: ModelConfig, data: st.DataObject) -> None:
    """Whole, per window, in odd chunks or token by token: same logits, same memory."""
    model = make(config)
    length = data.draw(st.integers(1, 5 * WINDOW + 3))
    tokens = random_tokens(2, length, seed=length)
    cuts = data.draw(st.sets(st.integers(1, length)))
    edges = sorted({0, length, *cuts})
    whole, expected = model(tokens, model.empty_state(2))
    state, parts = model.empty_state(2), []
    for start, stop in itertools.pairwise(edges):
        logits, state = model(tokens[:, start:stop], state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, **TOLERANCE)
    assert_same_memory(state, expected)


@every_kind
def test_token_by_token(config: ModelConfig) -> None:
    """Reading token by token equals reading whole, past the point where queues overflow."""
    model = make(config)
    tokens = random_tokens(1, 5 * WINDOW + 1)
    whole, _ = model(tokens, model.empty_state(1))
    state, parts = model.empty_state(1), []
    for token in tokens.split(1, dim=1):
        logits, state = model(token, state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, **TOLERANCE)


@every_kind
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_rows_are_independent(config: ModelConfig, data: st.DataObject) -> None:
    """Each row reads its own documents at its own pace, beside rows that stand elsewhere or start
    anew: every document's logits are those of the document read alone."""
    model = make(config)
    rows = 3
    state = model.empty_state(rows)
    documents: list[list[list[int]]] = [[[]] for _ in range(rows)]
    seen: list[list[list[Tensor]]] = [[[]] for _ in range(rows)]
    for turn in range(data.draw(st.integers(2, 6))):
        reset = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
        state = state.forget(reset)
        for row in reset.nonzero().flatten().tolist():
            documents[row].append([])
            seen[row].append([])
        width = data.draw(st.integers(1, 2 * WINDOW + 1))
        lengths = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
        tokens = random_tokens(rows, width, seed=turn)
        logits, state = model(tokens, state, lengths=torch.tensor(lengths))
        for row, length in enumerate(lengths):
            documents[row][-1] += tokens[row, :length].tolist()
            seen[row][-1] += list(logits[row, :length])
            assert (logits[row, length:] == 0).all()
    for row in range(rows):
        for document, row_logits in zip(documents[row], seen[row], strict=True):
            if document:
                alone, _ = model(torch.tensor([document]), model.empty_state(1))
                torch.testing.assert_close(torch.stack(row_logits), alone[0], **TOLERANCE)


@every_kind
def test_a_reset_row_equals_a_fresh_one(config: ModelConfig) -> None:
    """Nothing leaks from one document into the next, in logits, memory or gradients; the row that
    is not reset goes on as if alone."""
    model = make(config)
    inputs = watch_inputs(model)
    first, second = random_tokens(2, 4 * WINDOW, seed=1), random_tokens(2, 2 * WINDOW, seed=2)
    _, state = model(first, model.empty_state(2))
    before = len(inputs)
    logits, after = model(second, state.forget(torch.tensor([True, False])))
    fresh, fresh_state = model(second[:1], model.empty_state(1))
    torch.testing.assert_close(logits[:1], fresh, **TOLERANCE)
    assert_same_memory(after.select([0]), fresh_state)
    leak = input_gradient(logits, inputs[:before])
    assert (leak[0] == 0).all()
    if config.layers.count("plain") < len(config.layers):
        assert leak[1].sum() > 0

    ours = torch.autograd.grad(logits[0].sum(), list(model.parameters()), allow_unused=True)
    theirs = torch.autograd.grad(fresh[0].sum(), list(model.parameters()), allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        a, b = (torch.zeros(()).double() if g is None else g for g in (a, b))
        torch.testing.assert_close(a, b + torch.zeros_like(a), rtol=1e-9, atol=1e-10)


@remembering
def test_memory_is_the_only_channel(config: ModelConfig) -> None:
    """With memory kept, the previous windows have a gradient; with memory dropped, none."""
    model = make(config)
    inputs = watch_inputs(model)
    _, state = model(random_tokens(1, 2 * WINDOW), model.empty_state(1))
    before = len(inputs)
    kept, _ = model(random_tokens(1, WINDOW, seed=1), state)
    dropped, _ = model(random_tokens(1, WINDOW, seed=1), state.forget([True]))
    assert (input_gradient(kept, inputs[:before]) > 0).all()
    assert (input_gradient(dropped, inputs[:before]) == 0).all()


@every_kind
def test_the_queue_forgets_exactly(config: ModelConfig) -> None:
    """What a window wrote into a queue is there, and is read, for Q windows and no longer."""
    model = make(config)
    state = model.empty_state(1)
    written: dict[int, list[Tensor]] = {}
    for k in range(6):
        _, state = model(random_tokens(1, WINDOW, seed=k), state)
        state = state.detach()
        for i, (queue, per_window, dim) in queues(state).items():
            size = min(per_window, queue.size(dim))
            written.setdefault(i, []).append(queue.narrow(dim, queue.size(dim) - size, size))
            entries = torch.cat(written[i], dim)
            held = min(entries.size(dim), queue.size(dim))
            newest = entries.narrow(dim, entries.size(dim) - held, held)
            assert torch.equal(queue.narrow(dim, queue.size(dim) - held, held), newest)
            assert (queue.narrow(dim, 0, queue.size(dim) - held) == 0).all()
            if config.top_k is None:
                assert (reading_gradient(model, state, i, dim)[-held:] > 0).all()


def queues(state: MemoryState) -> dict[int, tuple[Tensor, int, int]]:
    """Layer -> queue, entries per window, and the axis of its slots."""
    found = {}
    for i, memory in enumerate(state.layers):
        if isinstance(memory, LongTermMemory):
            found[i] = (memory.values_BHME, state.config.long_term_tokens, 2)
        elif isinstance(memory, LongTermTokenMemory):
            found[i] = (memory.tokens_BMD, state.config.long_term_tokens, 1)
        elif isinstance(memory, MemorizingMemory):
            found[i] = (memory.values_BHME, state.config.window, 2)
    return found


def reading_gradient(model: LanguageModel, state: MemoryState, layer: int, dim: int) -> Tensor:
    """How much the next window depends on each slot of one layer's queue."""
    memory = state.layers[layer]
    name = "tokens_BMD" if dim == 1 else "values_BHME"
    queue = getattr(memory, name).clone().requires_grad_()
    layers = list(state.layers)
    layers[layer] = memory._replace(**{name: queue})
    logits, _ = model(random_tokens(1, WINDOW, seed=99), replace(state, layers=tuple(layers)))
    (grad,) = torch.autograd.grad(logits.sum(), queue)
    return grad.abs().transpose(1, dim).flatten(2).sum(-1)[0]


@remembering
def test_gradients_reach_the_mixers_and_stop_at_the_edge(config: ModelConfig) -> None:
    """M_right and M_long (and their like in the baselines) learn from later windows of the segment,
    and not from windows beyond its edge."""
    model = make(config)
    writers = {
        name: parameter
        for name, parameter in model.named_parameters()
        if any(part in name for part in (".right.", ".long.", "state.output"))
    }
    first, second = random_tokens(1, WINDOW, seed=1), random_tokens(1, WINDOW, seed=2)
    _, state = model(first, model.empty_state(1))
    for edge in (False, True):
        model.zero_grad()
        logits, _ = model(second, state.detach() if edge else state)
        logits.sum().backward(retain_graph=True)
        for name, parameter in writers.items():
            reached = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
            assert reached != edge, name


@every_kind
def test_detach_stops_every_gradient(config: ModelConfig) -> None:
    """In the middle of a window too, nothing before the edge of a segment has a gradient."""
    model = make(config)
    inputs = watch_inputs(model)
    _, state = model(random_tokens(1, 2 * WINDOW + 3), model.empty_state(1))
    before = len(inputs)
    logits, _ = model(random_tokens(1, WINDOW, seed=1), state.detach())
    assert (input_gradient(logits, inputs[:before]) == 0).all()
    logits, _ = model(random_tokens(1, WINDOW, seed=1), state)
    assert (input_gradient(logits, inputs[:before])[0, -3:] > 0).all()


@every_kind
def test_memory_size(config: ModelConfig) -> None:
    """The floats that a row carries are those of the formula, before and after reading."""
    model = make(config)
    state = model.empty_state(2)
    assert state.num_floats() == sum(config.memory_floats())
    _, state = model(random_tokens(2, 2 * WINDOW + 1), state)
    assert state.num_floats() == sum(config.memory_floats())


@every_kind
def test_single_precision(config: ModelConfig) -> None:
    """In float32 any cut gives the same logits to 1e-5."""
    model = make(config).float()
    tokens = random_tokens(2, 4 * WINDOW + 1)
    whole, _ = model(tokens, model.empty_state(2))
    state, parts = model.empty_state(2), []
    for chunk in tokens.split(4, dim=1):
        logits, state = model(chunk, state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5)


def assert_same_memory(ours: MemoryState, theirs: MemoryState) -> None:
    assert torch.equal(ours.windows_B, theirs.windows_B)
    assert torch.equal(ours.open_B, theirs.open_B)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, **TOLERANCE)
