"""Without gradients open windows are written to in place: the laws hold there too."""

import pytest
import torch
from zoo import WINDOW, ZOO, make, random_tokens

from melodi import MemoryState, ModelConfig
from melodi.decoding import KeptDecoder
from melodi.layers.products import Numbers, product, to_int8

TOLERANCE = dict(rtol=0, atol=1e-10)

every_kind = pytest.mark.parametrize("config", ZOO.values(), ids=ZOO.keys())


@every_kind
def test_token_by_token_in_place(config: ModelConfig) -> None:
    """Two rows read token by token, past the point where queues overflow, equal the whole."""
    model = make(config)
    tokens = random_tokens(2, 5 * WINDOW + 2)
    whole, _ = model(tokens, model.empty_state(2))
    with torch.inference_mode():
        state, parts = model.empty_state(2), []
        for token in tokens.split(1, dim=1):
            logits, state = model(token, state)
            parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, **TOLERANCE)


@every_kind
@torch.no_grad()
def test_states_are_values(config: ModelConfig) -> None:
    """However a stream goes on from a state, the state stays what it was: every earlier one can be
    read on from, in any order, as beam search does."""
    model = make(config)
    tokens, other = random_tokens(2, 3 * WINDOW), random_tokens(2, WINDOW + 1, seed=1)
    states: list[MemoryState] = [model.empty_state(2)]
    for token in tokens.split(1, dim=1):
        states.append(model(token, states[-1])[1])
    for read in (2, WINDOW + 3, 1, WINDOW + 3, 2 * WINDOW - 1, 2 * WINDOW):
        fresh = model.empty_state(2)
        expected, _ = model(torch.cat([tokens[:, :read], other], dim=1), fresh)
        state, parts = states[read], []
        for token in other.split(1, dim=1):
            logits, state = model(token, state)
            parts.append(logits)
        torch.testing.assert_close(torch.cat(parts, 1), expected[:, read:], **TOLERANCE)


def test_a_state_leaves_inference_mode() -> None:
    """A window that was opened in inference mode is read on outside of it, with a gradient."""
    model = make(ZOO["melodi-default"])
    tokens = random_tokens(1, WINDOW + 4)
    expected, _ = model(tokens, model.empty_state(1))
    with torch.inference_mode():
        _, state = model(tokens[:, :2], model.empty_state(1))
    with torch.no_grad():
        quiet, _ = model(tokens[:, 2:], state)
    logits, _ = model(tokens[:, 2:], state.detach().to("cpu"))
    logits.sum().backward()
    for ours in (quiet, logits):
        torch.testing.assert_close(ours, expected[:, 2:], **TOLERANCE)


@torch.no_grad()
def test_ragged_rows_between_even_ones() -> None:
    """Rows that read together, then apart, then together again."""
    model = make(ZOO["melodi-default"])
    tokens = random_tokens(2, 3 * WINDOW)
    expected = [model(row[None], model.empty_state(1))[0][0] for row in tokens]
    state, read = model.empty_state(2), torch.zeros(2, dtype=torch.long)
    for lengths in ([2, 2], [1, 3], [1, 1], [4, 2], [3, 3]):
        widest = max(lengths)
        piece = torch.stack([row[i : i + widest] for row, i in zip(tokens, read, strict=True)])
        logits, state = model(piece, state, lengths=lengths)
        for row, length in enumerate(lengths):
            theirs = expected[row][read[row] : read[row] + length]
            torch.testing.assert_close(logits[row, :length], theirs, **TOLERANCE)
        read += torch.tensor(lengths)


@torch.no_grad()
def test_whoever_watches_or_adapts_a_part_is_heard() -> None:
    """Weights are used directly only where modules are what they seem."""
    model = make(ZOO["melodi-default"])
    token = random_tokens(1, 1)
    _, state = model(random_tokens(1, 2), model.empty_state(1))
    plain, _ = model(token, state)
    heard: list[int] = []
    for module in (model.layers[1], model.layers[1].block.ffn.hidden):
        hook = module.register_forward_hook(lambda *_: heard.append(1))
        watched, _ = model(token, state)
        hook.remove()
        torch.testing.assert_close(watched, plain, **TOLERANCE)
    assert len(heard) == 2

    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    value = model.layers[0].block.value
    value.__class__ = Doubled
    adapted, _ = model(token, state)
    assert not torch.allclose(adapted, plain)


@every_kind
def test_a_kept_decoder_equals_the_model(config: ModelConfig) -> None:
    """What is kept from token to token changes nothing, in one row and in several."""
    for rows in (1, 3):
        model = make(config)
        tokens = random_tokens(rows, 3 * WINDOW)
        decoder, read = KeptDecoder(model), 0
        with torch.inference_mode():
            whole, _, _ = model.hidden(tokens, model.empty_state(rows))
            state = model.empty_state(rows)
            for i, token in enumerate(tokens.split(1, dim=1)):
                found = decoder(token, state)
                x, state = found or model.hidden(token, state)[:2]
                read += found is not None
                torch.testing.assert_close(x, whole[:, i : i + 1], **TOLERANCE)
        assert read >= 3 * (WINDOW - 2) - 1  # of the strict mask the first token sees nothing


def test_a_kept_decoder_sees_every_change() -> None:
    """Weights that are trained, replaced or moved, parts that are hooked or exchanged: nothing old
    is used for the next token."""
    model = make(ZOO["melodi-default"])
    decoder, token = KeptDecoder(model), random_tokens(1, 1)
    block = model.layers[1].block
    heard: list[int] = []

    def train() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    def load() -> None:
        weights = {name: 0.9 * tensor for name, tensor in model.state_dict().items()}
        model.load_state_dict(weights, assign=True)

    def move() -> None:
        block.scale.factor.data = 2 * block.scale.factor.data

    def exchange() -> None:
        block.ffn.hidden = torch.nn.Linear(*block.ffn.hidden.weight.T.shape).double()

    def hook() -> None:
        block.ffn.register_forward_hook(lambda *_: heard.append(1))

    before = None
    for change in (train, load, move, exchange, hook):
        change()
        with torch.inference_mode():
            _, state = model(random_tokens(1, 2), model.empty_state(1))
            expected, _, _ = model.hidden(token, state)
            heard.clear()
            found = decoder(token, state)
        assert (found is None) == (change in (exchange, hook))
        if found is not None:
            torch.testing.assert_close(found[0], expected, **TOLERANCE)
            assert before is None or not torch.allclose(found[0], before, atol=1e-6)
            before = found[0]


@pytest.mark.parametrize(("numbers", "near"), [("bf16", 0.05), ("int8", 0.1)])
def test_narrow_weights_are_nearly_the_weights(numbers: Numbers, near: float) -> None:
    """Hidden vectors and logits stay near those of all four bytes, without being equal, and follow
    the weights when these change."""
    model = make(ZOO["melodi-default"]).float()
    tokens, decoder = random_tokens(2, WINDOW - 1), KeptDecoder(model, numbers)
    for _ in range(2):
        with torch.inference_mode():
            _, state = model(tokens[:, :-1], model.empty_state(2))
            expected, _ = model(tokens[:, -1:], state)
            found = decoder(tokens[:, -1:], state)
            assert found is not None
            logits = decoder.logits(found[0][:, 0])
        difference = float((logits - expected[:, 0]).norm() / expected.norm())
        assert 1e-6 < difference < near
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.5)


def test_weights_of_one_byte() -> None:
    """Each row has its own scale: no weight is off by more than half a step of its row, and a row
    of zeros stays one; whatever the width."""
    random = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1e-3, 1.0, 50.0, 0.0, 1.0], dtype=torch.float32)
    weight = torch.randn(5, 44, generator=random, dtype=torch.float32) * sizes[:, None]
    whole, scale = to_int8(weight)
    assert whole.dtype == torch.int8
    step, whole = scale.float()[:, None], whole[:, :44]
    # The scale is rounded to 8 bits first, which may cut the largest weight by as much.
    off = (whole * step - weight).abs()
    assert bool((off <= 0.5 * step + 2**-8 * weight.abs()).all())
    x = torch.randn(3, 44, generator=random, dtype=torch.float32)
    expected = x @ (whole * step).T
    off = (product(weight, None, "int8")(x) - expected).norm(dim=0)
    assert bool((off <= 0.02 * expected.norm(dim=0)).all())
