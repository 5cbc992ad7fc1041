"""Without gradients open windows are written to in place: the laws hold there too."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import WINDOW, ZOO, make, random_tokens

from melodi import MemoryState, ModelConfig, StreamReader
from melodi.decoding import Decoder, KeptDecoder
from melodi.layers import native as native_kernel
from melodi.layers.native import MOST_ROWS
from melodi.layers.products import Numbers, Product, to_int8
from melodi.layers.token import NativeTokenLayer

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
def test_many_windows_at_once(config: ModelConfig) -> None:
    """Without a gradient queues are written in place: many windows, far more than queues hold, give
    the hidden vectors and the memory of one after the other, and the state that they were read
    from stays as it was."""
    model = make(config)
    tokens = random_tokens(2, 16 * WINDOW)
    begun, others = tokens[:, : 3 * WINDOW], tokens[:, 3 * WINDOW :]
    _, state, _ = model.hidden(begun, model.empty_state(2))
    for _ in range(2):
        whole, after, _ = model.hidden(others, state)
        one, parts = state, []
        for window in others.split(WINDOW, dim=1):
            x, one, _ = model.hidden(window, one)
            parts.append(x)
        torch.testing.assert_close(whole, torch.cat(parts, 1), **TOLERANCE)
        for ours, theirs in zip(after.layers, one.layers, strict=True):
            torch.testing.assert_close(tuple(ours), tuple(theirs), **TOLERANCE)


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
@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "torch"])
def test_a_kept_decoder_equals_the_model(
    config: ModelConfig, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept from token to token changes nothing, in one row and in several, in more than the
    kernel takes, by the kernel and by torch."""
    monkeypatch.setenv("MELODI_NATIVE", native)
    for rows in (1, 3, MOST_ROWS + 1):
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
    """Weights that are trained, replaced or moved, parts that are hooked, adapted or exchanged:
    nothing old is used for the next token."""
    model = make(ZOO["melodi-default"])
    decoder, token = KeptDecoder(model), random_tokens(1, 1)
    block = model.layers[1].block
    heard: list[int] = []

    class Adapted(type(block.ffn.hidden)):  # type: ignore[misc]
        pass

    def nothing() -> None:
        pass

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
        handles.append(block.ffn.register_forward_hook(lambda *_: heard.append(1)))

    def unhook() -> None:
        handles.pop().remove()

    def adapt() -> None:
        block.ffn.hidden.__class__ = Adapted

    def undo() -> None:
        block.ffn.hidden.__class__ = Adapted.__base__

    def wrap() -> None:
        block.ffn.hidden.forward = lambda x: 2 * type(block.ffn.hidden).forward(block.ffn.hidden, x)

    def unwrap() -> None:
        del block.ffn.hidden.forward

    handles: list[Any] = []
    others = (hook, adapt, wrap, exchange)
    same = (unhook, undo, unwrap)
    before = None
    for change in (nothing, train, hook, unhook, load, adapt, undo, move, wrap, unwrap, exchange):
        change()
        with torch.inference_mode():
            _, state = model(random_tokens(1, 2), model.empty_state(1))
            expected, _, _ = model.hidden(token, state)
            heard.clear()
            found = decoder(token, state)
        assert (found is None) == (change in others), change
        if found is not None:
            torch.testing.assert_close(found[0], expected, **TOLERANCE)
            if before is not None:
                assert torch.allclose(found[0], before, atol=1e-6) == (change in same), change
            before = found[0]


def test_weights_that_do_not_count_their_writings() -> None:
    """Tensors made in inference mode do not say that they were written to: nothing is kept."""
    with torch.inference_mode():
        model = make(ZOO["melodi-default"])
        decoder, token = KeptDecoder(model), random_tokens(1, 1)
        for _ in range(2):
            _, state = model(random_tokens(1, 2), model.empty_state(1))
            found = decoder(token, state)
            assert found is not None
            torch.testing.assert_close(found[0], model.hidden(token, state)[0], **TOLERANCE)
            for parameter in model.parameters():
                parameter.mul_(0.9)


def test_dropout_is_no_hindrance() -> None:
    """A model that was trained with dropout, in whatever mode, is decoded as others are, with
    narrow weights too; what a first token under autocast found out is not kept."""
    config = replace(ZOO["melodi-default"], dropout=0.0)
    models = [make(config).float(), make(replace(config, dropout=0.5)).float()]
    models.append(make(replace(config, dropout=0.5)).float().train())
    for int8 in (False, True):
        said, expected = [], []
        for model in models:
            reader = StreamReader(model, int8=int8)
            reader.read(random_tokens(WINDOW + 2))
            said.append(list(reader.generate(2 * WINDOW, temperature=0)))
            expected.append(reader._at.place.last_BD)
        assert said[0] == said[1] == said[2]
        assert all(torch.equal(expected[0], other) for other in expected)
    assert models[2].training
    kept = KeptDecoder(model.eval())
    token = random_tokens(1, 1)
    with torch.inference_mode():
        _, state = model(random_tokens(1, 2), model.empty_state(1))
        with torch.autocast("cpu", torch.bfloat16):
            assert kept(token, state) is None
        assert kept(token, state) is not None


@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "torch"])
@pytest.mark.parametrize(("numbers", "near"), [("bf16", 0.05), ("int8", 0.1)])
def test_narrow_weights_are_nearly_the_weights(
    numbers: Numbers, near: float, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden vectors and logits stay near those of all four bytes, without being equal, and follow
    the weights when these change."""
    monkeypatch.setenv("MELODI_NATIVE", native)
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
    off = (Product(weight, None, "int8")(x) - expected).norm(dim=0)
    assert bool((off <= 0.02 * expected.norm(dim=0)).all())


@pytest.fixture
def built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and nothing compiled that is remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native_kernel.compiled.cache_clear()
    yield tmp_path / "melodi"
    native_kernel.compiled.cache_clear()


needs_a_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@needs_a_compiler
def test_the_kernel_is_compiled_once(built_anew: Path) -> None:
    """One file for each kind of weights, whole or absent; a model on the CPU uses it by itself."""
    decoder = Decoder(make(ZOO["melodi-default"]).float())
    assert all(isinstance(layer, NativeTokenLayer) for layer in decoder.layers)
    (first,) = built_anew.iterdir()
    written = first.stat().st_mtime_ns
    native_kernel.compiled.cache_clear()
    assert native_kernel.compiled(torch.float32, "fp32") is not None
    assert [path.stat().st_mtime_ns for path in built_anew.iterdir()] == [written]


@torch.inference_mode()
@pytest.mark.parametrize("change", ["stride", "activation", "meta", "type"])
def test_the_kernel_leaves_other_parts_alone(change: str) -> None:
    """A layer that is not what the kernel takes it for is read by torch, or refused by it."""
    model = make(ZOO["melodi-default"])
    tokens = random_tokens(1, 3)
    _, state = model(tokens[:, :2], model.empty_state(1))
    block = model.layers[1].block
    if change == "stride":
        block.value.weight = torch.nn.Parameter(block.value.weight.T.contiguous().T)
    elif change == "activation":
        block.ffn.activation = torch.tanh
    elif change == "meta":
        block.ffn.to("meta")
    else:
        block.ffn.float()
    decoder = Decoder(model)
    assert not isinstance(decoder.layers[1], NativeTokenLayer)
    assert shutil.which("cc") is None or isinstance(decoder.layers[0], NativeTokenLayer)
    if change == "type":
        with pytest.raises(RuntimeError, match="same dtype"):
            decoder(tokens[:, 2:], state)
    elif change != "meta":
        read = decoder(tokens[:, 2:], state)
        assert read is not None
        part = model.hidden(tokens, model.empty_state(1))[0]
        if change == "stride":
            torch.testing.assert_close(read[0], part[:, 2:], **TOLERANCE)


@torch.inference_mode()
def test_the_kernel_takes_no_other_numbers() -> None:
    """A model that changes its numbers under a reader is told so, as torch does."""
    model = make(ZOO["melodi-default"]).float()
    reader = StreamReader(model)
    reader.read([1, 2, 3])
    model.double()
    with pytest.raises(RuntimeError, match="dtype"):
        list(reader.generate(3))


@needs_a_compiler
@pytest.mark.parametrize("damaged", [b"", b"no library"])
def test_a_damaged_kernel_is_built_anew(
    damaged: bytes, built_anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of which this process has loaded nothing yet."""
    assert native_kernel.compiled(torch.float32, "fp32") is not None
    (path,) = built_anew.iterdir()
    other = tmp_path / "other" / "melodi" / path.name
    other.parent.mkdir(parents=True)
    other.write_bytes(damaged)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    native_kernel.compiled.cache_clear()
    assert native_kernel.compiled(torch.float32, "fp32") is not None
    assert other.stat().st_size > 1000


@needs_a_compiler
def test_what_others_may_have_written_is_not_loaded(built_anew: Path) -> None:
    built_anew.mkdir(parents=True)
    built_anew.chmod(0o777)
    assert native_kernel.compiled(torch.float32, "fp32") is None


@pytest.mark.parametrize("compiler", ["", "#!/bin/sh\nexit 1\n", "#!/bin/sh\nexit 0\n"])
def test_without_a_compiler_torch_reads(
    compiler: str, built_anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is none, where it fails, and where it makes nothing, nobody notices."""
    if compiler:
        (tmp_path / "cc").write_text(compiler)
        (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    decoder = Decoder(make(ZOO["melodi-default"]).float())
    assert not any(isinstance(layer, NativeTokenLayer) for layer in decoder.layers)


@needs_a_compiler
def test_loading_the_kernel_changes_no_rounding(built_anew: Path) -> None:
    """Numbers too small for a full mantissa are still there after it was loaded."""
    assert native_kernel.compiled(torch.float32, "fp32") is not None
    tiny = torch.tensor(1e-40, dtype=torch.float32)
    assert float(tiny * 0.5) > 0
