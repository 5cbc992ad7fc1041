"""The paper's equations, as the layers compute them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from zoo import KINDS, WINDOW, make, random_tokens

from melodi import LanguageModel
from melodi.evaluation.probes import gates, memory_shares
from melodi.layers.frame import Stream, WindowPart
from melodi.layers.melodi import LongTermLayer, ShortTermLayer, ShortTermMemory
from melodi.layers.transformer import EPSILON, Sight
from melodi.reading import counters, turns
from melodi.sights import sights

TOLERANCE = dict(rtol=0, atol=1e-12)


def one_window(model: LanguageModel) -> tuple[WindowPart, tuple[Sight, ...]]:
    """The second window of a document: what its layers are told."""
    _, state = model(random_tokens(1, WINDOW), model.empty_state(1))
    (turn,) = turns(state, torch.tensor([WINDOW]))
    device = torch.device("cpu")
    seen = sights(model.config, model.position_bias, turn, device, static_shapes=False)
    return turn.part(counters([turn], device)[0]), seen


def test_equations_1_and_2() -> None:
    """x', û = T(x, u | z), then u' = M_up(x', û) and z' = M_right(x', û)."""
    model = make(KINDS["melodi"])
    part, seen = one_window(model)
    layer, config = model.stack[0], model.config
    assert isinstance(layer, ShortTermLayer)
    x, u, z = (
        torch.randn(1, n, config.width).double() for n in (WINDOW, *[config.short_term_tokens] * 2)
    )
    output = layer(Stream(x, u), ShortTermMemory(z), None, part, seen[0])

    memory = layer.block.pairs(layer.block.normed(z))
    y = layer.block(torch.cat([x, u], dim=1), memory, seen[0])
    assert layer.up is not None
    assert layer.right is not None
    torch.testing.assert_close(output.stream.x_BtD, y[:, :WINDOW], **TOLERANCE)
    torch.testing.assert_close(output.stream.u_BSD, layer.up(y), **TOLERANCE)
    torch.testing.assert_close(output.memory[0], layer.right(y), **TOLERANCE)


def test_what_a_window_adds_to_the_queue() -> None:
    """The FIFO of the long-term layer ends with the pairs of m = M_long(x', û)."""
    model = make(KINDS["melodi"])
    kept = []
    layer = model.stack[1]
    assert isinstance(layer, LongTermLayer)
    assert layer.long is not None
    layer.long.register_forward_hook(lambda _m, _i, m: kept.append(m))
    _, state = model(random_tokens(1, 2 * WINDOW), model.empty_state(1))
    for i, m in enumerate(reversed(kept), 1):
        keys, values = layer.project(m)
        count = layer.entries_per_window
        stop = -(i - 1) * count or None
        for queue, new in zip(state.layers[1][1:], (keys, values), strict=True):
            torch.testing.assert_close(queue[:, :, -i * count : stop], new, **TOLERANCE)


def without_preferences(kind: str) -> LanguageModel:
    """A model whose attention is uniform over all that is visible."""
    model = make(KINDS[kind])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "block.query" in name or "position_bias" in name:
                parameter.zero_()
    return model


def test_shares_of_uniform_attention() -> None:
    """Where every visible key gets the same weight, a memory's share is its part of what is seen;
    and the share of long-term memory falls evenly on all windows that it holds."""
    model = without_preferences("melodi")
    config = model.config
    S, W = config.short_term_tokens, WINDOW
    shares = memory_shares(model, random_tokens(5 * W).numpy())
    visible = np.arange(1, W + S + 1) + S
    for layer in range(3):
        assert shares[f"short-term/{layer}"] == pytest.approx((S / visible).mean())
    ages = {key: value for key, value in shares.items() if key.startswith("long-term/1/age/")}
    assert len(ages) == config.long_term_windows
    assert list(ages.values()) == pytest.approx([1 / len(ages)] * len(ages))


def test_the_share_of_a_cache() -> None:
    """A token at place t of its window sees the W tokens before it, W - t of them in the cache."""
    model = without_preferences("transformer-xl")
    t = np.arange(WINDOW)
    shares = memory_shares(model, random_tokens(3 * WINDOW).numpy())
    assert shares["cache/0"] == pytest.approx(((WINDOW - t) / (WINDOW + 1)).mean())
    assert "cache/2" not in shares


@pytest.mark.parametrize("kind", ["melodi", "memorizing"])
def test_probes_of_compiled_layers(kind: str) -> None:
    """Compiled layers are watched as they are, and compute the same."""
    model, compiled = make(KINDS[kind]), make(KINDS[kind])
    torch.compiler.reset()
    for layer in compiled.layers:
        layer.compile(backend="aot_eager")
    tokens = random_tokens(3 * WINDOW).numpy()
    ours, theirs = memory_shares(compiled, tokens), memory_shares(model, tokens)
    assert ours == pytest.approx(theirs)
    assert gates(compiled) == pytest.approx(gates(model))
    assert len(gates(model)) == 1


@pytest.mark.parametrize("mixer", ["residual", "matrix"])
def test_mixers_start_by_handing_on_tokens(mixer: str) -> None:
    """Before training z is the last tokens of the window (their norms, and the summary, in the
    residual form), u the summary, and m tokens at equal distances."""
    dialect = f"default,mixer={mixer}"
    config = replace(KINDS["melodi"], dialect=dialect, short_term_tokens=2, long_term_tokens=2)
    layer = LongTermLayer(config, config.layers.index("long"))
    x, u_hat = torch.randn(1, WINDOW, config.width), torch.randn(1, 2, config.width)
    new = layer.branch(x, u_hat)
    last = x[:, -2:]
    if mixer == "residual":
        last = torch.nn.functional.rms_norm(last, (config.width,), eps=EPSILON) + u_hat
    torch.testing.assert_close(new.z_BSD, last)
    torch.testing.assert_close(new.u_BSD, u_hat)
    apart = WINDOW // 2
    torch.testing.assert_close(new.m_BLD, x[:, [apart - 1, 2 * apart - 1]])
    random = LongTermLayer(replace(config, dialect=f"{dialect},mixer_start=random"), layer.index)
    assert not torch.allclose(random.branch(x, u_hat).z_BSD, last)


@pytest.mark.parametrize("attention", ["scaled", "normalised", "normalised-root"])
def test_the_position_bias_starts_near(attention: str) -> None:
    """Before training the bias adds the same logits whatever scale it is multiplied by: of four
    heads one is drawn to the token before, two to what is near, one to nothing."""
    dialect = f"default,attention={attention}"
    config = replace(KINDS["melodi"], dialect=dialect, num_heads=4)
    model = LanguageModel(config)
    distances = torch.arange(100)[None, :, None]
    for i, bias in model.position_bias(range(len(model.stack)), distances).items():
        logits_HT = model.stack[i].block.scale.bias(bias)[0, :, :, 0]
        before, steep, gentle, level = logits_HT
        assert before.argmax() == 1
        assert (before > 3).sum() == 1
        torch.testing.assert_close(steep[:16], -torch.arange(16.0) / 4)
        torch.testing.assert_close(gentle[:16], -torch.arange(16.0) / 16)
        assert (steep.diff() <= 0).all()
        assert not level.any()
    zero = LanguageModel(replace(config, dialect=f"{dialect},bias_start=zero"))
    assert not any(table.any() for table in zero.position_bias.tables.values())


def test_whoever_watches_the_feed_forward_sees_it_before_relu() -> None:
    """ReLU writes into its input only where nobody else has it; the results are the same."""
    model = make(KINDS["melodi"])
    tokens = random_tokens(1, 2 * WINDOW)
    expected, _ = model(tokens, model.empty_state(1))
    seen: list[torch.Tensor] = []
    hidden = model.stack[0].block.ffn.hidden
    hidden.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    hidden.register_full_backward_hook(lambda *_: None)
    logits, _ = model(tokens, model.empty_state(1))
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    assert len(seen) == 2
    assert all((one < 0).any() for one in seen)
    logits.sum().backward()
