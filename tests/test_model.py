"""What the laws leave open: loss, dropout, compilation, autocast, sizes."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from zoo import (
    KINDS,
    VOCAB,
    WINDOW,
    ZOO,
    Pairs,
    attend,
    attend_best,
    bucket_of_distance,
    cases,
    make,
    random_tokens,
)

from melodi import LanguageModel, ModelConfig
from melodi.config import PRESETS
from melodi.layers import nats
from melodi.training.distributed import compile_layers

every_kind = cases(ZOO)
ONE_OF_EACH = ["melodi", "transformer-xl", "block-recurrent", "memorizing", "rmt", "autocompressor"]
ONE_OF_EACH += ["compressive-convolution", "infini-delta", "armt"]
"""A model of each layer class, where compiling them all would take minutes."""


@every_kind
def test_loss_is_the_cross_entropy_of_the_logits(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mean nats over targets that are not -1, in value and gradient, however it is chunked; beside
    it a loss of the layer kind's own, if it has one."""
    model = make(config)
    tokens, targets = random_tokens(2, 2 * WINDOW + 1), random_tokens(2, 2 * WINDOW + 1, seed=1)
    targets[0, 3:7] = -1
    logits, _ = model(tokens, model.empty_state(2))
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    grads = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    monkeypatch.setattr(nats, "CHUNK_ROWS", (7, 7))
    loss, state = model.loss(tokens, targets, model.empty_state(2))
    loss.backward()
    extra_loss = model.nats(tokens, targets, model.empty_state(2)).extra_loss
    torch.testing.assert_close(loss, expected + (0 if extra_loss is None else extra_loss))
    assert state.windows_B.tolist() == [2, 2]
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        if grad is not None:
            torch.testing.assert_close(parameter.grad, grad)


@pytest.mark.parametrize(
    ("vocab_size", "rows"), [(256, 512), (2048, 512), (4096, 256), (32_000, 128), (256_000, 16)]
)
def test_chunks_of_logits(vocab_size: int, rows: int) -> None:
    """About a million logits at a time, and never more than four."""
    sizes = [len(x) for x, _ in nats.chunks(torch.zeros(1000, 2), torch.zeros(1000), vocab_size)]
    assert sizes[0] == rows
    assert sum(sizes) == 1000


def test_loss_holds_few_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more logits exist at the same time than a chunk's, and each is computed once."""
    model, sizes = make(KINDS["melodi"]), []
    logits = nats.logits_of
    monkeypatch.setattr(nats, "CHUNK_ROWS", (5, 5))
    monkeypatch.setattr(nats, "logits_of", lambda x, *_: sizes.append(len(x)) or logits(x, *_))
    tokens = random_tokens(2, 2 * WINDOW)
    model.loss(tokens, tokens, model.empty_state(2))[0].backward()
    assert sizes == [5, 5, 5, 5, 4]


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_nats_have_any_gradient(scale: float) -> None:
    """Of a sum, and of targets that weigh differently: value and gradients are those of the cross
    entropy."""
    x, weight = torch.randn(7, 5).double(), torch.randn(VOCAB, 5).double()
    targets = torch.tensor([3, -1, 0, 22, 5, -1, 1])
    for weights in (torch.ones(()).double().expand(7), torch.randn(7).double()):
        grads = []
        for ours in (True, False):
            leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
            logits = leaves[0] @ leaves[1].T * scale
            reference = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
            result = nats.linear_nats(*leaves, targets, scale) if ours else reference
            torch.testing.assert_close(result, reference)
            result.backward(weights)
            grads.append([leaf.grad for leaf in leaves])
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


def test_nats_have_no_second_derivative() -> None:
    """It would be wrong, and is refused."""
    x = torch.randn(3, 5, requires_grad=True)
    total = nats.linear_nats(x, torch.randn(VOCAB, 5), torch.tensor([1, 2, 3]), 1.0).sum()
    (first,) = torch.autograd.grad(total**2, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@every_kind
@pytest.mark.parametrize("switch", ["checkpoint_windows", "static_shapes"])
def test_switches_change_no_number(config: ModelConfig, switch: str) -> None:
    """Recomputing windows and reading whole queues give the same loss and gradients."""
    grads = []
    for on in (False, True):
        model = make(config)
        setattr(model, switch, on)
        tokens = random_tokens(2, 4 * WINDOW)
        loss, _ = model.loss(tokens, tokens, model.empty_state(2))
        loss.backward()
        grads.append([loss, *(p.grad for p in model.parameters() if p.grad is not None)])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_loss_without_targets_is_zero() -> None:
    model = make(KINDS["melodi"])
    tokens = random_tokens(1, 3)
    loss, _ = model.loss(tokens, torch.full_like(tokens, -1), model.empty_state(1))
    assert loss == 0


@every_kind
def test_dropout_is_for_training_only(config: ModelConfig) -> None:
    model = make(replace(config, dropout=0.5))
    tokens = random_tokens(1, 3 * WINDOW)
    still, _ = make(config)(tokens, make(config).empty_state(1))
    quiet, _ = model(tokens, model.empty_state(1))
    torch.testing.assert_close(quiet, still, rtol=0, atol=1e-10)
    model.train()
    one, _ = model(tokens, model.empty_state(1))
    other, _ = model(tokens, model.empty_state(1))
    assert not torch.allclose(one, other)


def test_dropout_is_where_the_official_code_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the pre-attention norm, on attention, after the FFN, and before the logits."""
    places: list[tuple[int, ...] | str] = []
    attention, dropout = F.scaled_dot_product_attention, F.dropout

    def watched_attention(*args: object, dropout_p: float, **kwargs: object) -> torch.Tensor:
        places.append(f"attention {dropout_p}")
        return attention(*args, dropout_p=dropout_p, **kwargs)

    def watched_dropout(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
        places.append(tuple(x.shape[1:]))
        return dropout(x, p, training)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched_attention)
    monkeypatch.setattr(F, "dropout", watched_dropout)
    model = make(replace(KINDS["melodi"], layers=("long",), dropout=0.25)).train()
    model(random_tokens(1, 2 * WINDOW), model.empty_state(1))
    width, summary = model.config.width, model.config.short_term_tokens
    xu, zxu, m = (WINDOW + summary, width), (summary + WINDOW + summary, width), (2, width)
    heads = (model.config.num_heads, WINDOW + summary, summary + WINDOW + summary)
    first = [zxu, heads, xu, m]
    second = [zxu, heads, "attention 0.25", xu, m]
    assert places == [*first, *second, (2 * WINDOW, width)]


@cases({name: KINDS[name] for name in ONE_OF_EACH})
def test_layers_compile_without_graph_breaks(config: ModelConfig) -> None:
    """Each layer is one graph, forward and backward, and computes the same."""
    torch.compiler.reset()
    model, compiled = make(config), make(config)
    compile_layers(compiled, fullgraph=True, backend="aot_eager")
    tokens = random_tokens(2, 2 * WINDOW)
    expected, _ = model.loss(tokens, tokens, model.empty_state(2))
    loss, _ = compiled.loss(tokens, tokens, compiled.empty_state(2))
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    for a, b in zip(model.parameters(), compiled.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(("kind", "graphs"), [("melodi", 7), ("infini", 4)])
def test_training_compiles_few_graphs(kind: str, graphs: int) -> None:
    """Layers of one structure share their graphs, and steps, windows and resets need no new ones
    but those for a first window, whose memory has no gradient."""
    torch.compiler.reset()
    model, counter = make(KINDS[kind]), CompileCounter()
    compile_layers(model, backend=counter, fullgraph=True)
    state, compiled = model.empty_state(3), []
    for step in range(4):
        tokens = random_tokens(3, 3 * WINDOW, seed=step)
        state = state.detach().forget([step == 1, False, step == 2])
        loss, state = model.loss(tokens, tokens, state)
        loss.backward()
        compiled.append(counter.frame_count)
    assert compiled[-1] <= graphs
    assert compiled[-1] == compiled[-2]


@every_kind
def test_autocast(config: ModelConfig) -> None:
    """Under bfloat16 autocast the memory keeps its type, whole and cut readings stay close to
    float32, and every gradient is finite."""
    model = make(config).float()
    tokens = random_tokens(2, 3 * WINDOW + 2)
    exact, _ = model(tokens, model.empty_state(2))
    with torch.autocast("cpu", torch.bfloat16):
        logits, state = model(tokens, model.empty_state(2))
        loss, _ = model.loss(tokens, tokens, model.empty_state(2))
    assert {tensor.dtype for layer in state.layers for tensor in layer} == {torch.float32}
    # What ARMT reads is divided by a sum that may be small, so that it magnifies rounding.
    tolerance = 0.1 if config.family == "armt" else 0.05
    assert (logits.float() - exact).abs().mean() < tolerance * exact.abs().mean()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.endswith("-12")])
def test_shapes_on_the_meta_device(name: str) -> None:
    """A whole segment runs through every preset without a number being computed."""
    with torch.device("meta"):
        model = LanguageModel(PRESETS[name])
        window = model.config.window
        tokens = torch.zeros(2, 8 * window, dtype=torch.long)
    logits, state = model(tokens, model.empty_state(2))
    assert logits.shape == (2, 8 * window, model.config.vocab_size)
    assert state.windows_B.tolist() == [8, 8]
    assert state.num_floats() == sum(model.config.memory_floats())


@pytest.mark.slow
def test_a_paper_segment_on_the_cpu() -> None:
    """One 4096-token segment of the paper's main model runs forward in float32."""
    model = LanguageModel(PRESETS["paper-melodi-s128-l64"]).eval()
    tokens = torch.randint(0, 32_000, (1, 4096))
    with torch.inference_mode():
        loss, state = model.loss(tokens, tokens, model.empty_state(1))
    assert loss.isfinite()
    assert state.num_floats() == 18_481_152


def test_buckets_by_their_first_distances() -> None:
    """T5's buckets: one per distance up to 15, then these first distances, then the last."""
    first = [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    starts = torch.tensor([*range(16), *first])
    assert bucket_of_distance(starts).tolist() == list(range(32))
    assert bucket_of_distance(starts[1:] - 1).tolist() == list(range(31))
    assert bucket_of_distance(torch.tensor([128, 129, 10_000])).tolist() == [31] * 3


def test_top_k_of_everything_is_dense() -> None:
    """Reading the k best of k pairs is dense attention; of more, the best are chosen per query."""
    q, k, v = (torch.randn(2, 3, n, 5).double() for n in (4, 9, 9))
    written = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    torch.testing.assert_close(attend_best(q, Pairs(k, v), written, 9), attend(q, k, v))
    scores = q @ k.transpose(2, 3)
    kept = scores >= scores.topk(4, dim=-1).values[..., -1:]
    torch.testing.assert_close(
        attend_best(q, Pairs(k, v), written, 4), attend(q, k, v, visible=kept)
    )
