"""RMT, AutoCompressor and the Compressive Transformer equal the numbers of their public code.

golden/related holds them: tiny models in float64, parameters under our names. Beside them, what the
common laws do not say of these kinds.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from zoo import KINDS, WINDOW, make, random_tokens

from melodi import LanguageModel, MemoryState, ModelConfig
from melodi.config import PRESETS

FOLDER = Path(__file__).parent / "golden" / "related"
CUTS = {"whole": [], "pieces": [5, 3, 7, 1, 16, 2, 9, 11, 4], "tokens": [1] * 80}
stack_kinds = pytest.mark.parametrize("name", ["rmt", "rmt_causal", "autocompressor"])
cuts = pytest.mark.parametrize("cut", CUTS)


class Golden:
    """One file: its sizes, its tensors by name, and the model that it describes."""

    def __init__(self, name: str) -> None:
        with np.load(FOLDER / f"{name}.npz") as file:
            self.sizes = json.loads(file["config"].tobytes())
            self.tensors = {k: torch.from_numpy(file[k]) for k in file.files if k != "config"}
        with np.load(FOLDER / f"{name.partition('_')[0]}.npz") as file:  # variants share weights
            for key in file.files:
                if key.startswith("params/"):
                    self.tensors[key] = torch.from_numpy(file[key])
        self.model = LanguageModel(self.config()).double()
        self.model.load_state_dict(self.under("params"))

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def under(self, folder: str) -> dict[str, Tensor]:
        prefix = f"{folder}/"
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }

    def config(self) -> ModelConfig:
        sizes: dict[str, Any] = self.sizes
        if "mask" in sizes:
            own = dict(memory_tokens=sizes["R"], memory_mask=sizes["mask"])
        elif "S" in sizes:  # their memory has no bound: ours holds as many windows as are read
            own = dict(long_term_tokens=sizes["S"], long_term_windows=5)
        else:
            own = dict(compressed_slots=sizes["slots"], compression_rate=sizes["ratio"])
            own["compressor"] = "convolution"
        kind = "rmt" if "mask" in sizes else "autocompressor" if "S" in sizes else "compressive"
        return ModelConfig(
            vocab_size=sizes["V"],
            width=sizes["D"],
            num_heads=sizes["H"],
            ffn_width=sizes["ffn"],
            window=sizes["W"],
            layers=(kind,) * sizes["N"],
            dialect="paper",
            **own,
        )

    def same_state(self, state: MemoryState, window: int) -> None:
        """What is carried after a window: of a queue, the slots that are filled."""
        stored = self.under(f"state/{window}")
        assert stored, window
        for name, theirs in stored.items():
            i = int(name.split(".")[1]) if "." in name else 0
            ours = getattr(state.layers[i], STATE[name.rpartition(".")[2], self.sizes["W"]])
            same(ours[:, ours.size(1) - theirs.size(1) :], theirs, name)


STATE = {
    ("memory", 16): "tokens_BMD",
    ("memory", 8): "memory_BWD",
    ("compressed", 8): "compressed_BCD",
}


def same(ours: Tensor, theirs: Tensor, name: str) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10, msg=lambda m: f"{name}: {m}")


def pieces(length: int, sizes: list[int]) -> list[tuple[int, int]]:
    edges = [0, *itertools.accumulate(itertools.chain(sizes, [length]))]
    return list(itertools.pairwise(sorted({min(edge, length) for edge in edges})))


def gradients(model: LanguageModel, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: g for name, g in zip(names, found, strict=True) if g is not None}


@stack_kinds
@cuts
def test_equals_the_public_code(name: str, cut: str) -> None:
    """Logits, loss, carried state and every gradient through all windows, in any cut."""
    golden = Golden(name)
    model, tokens, window = golden.model, golden["tokens"], golden.sizes["W"]
    state, parts = model.empty_state(len(tokens)), []
    for start, stop in pieces(tokens.size(1), CUTS[cut]):
        part, state = model(tokens[:, start:stop], state)
        parts.append(part)
        if stop % window == 0:
            golden.same_state(state, stop // window - 1)
    logits = torch.cat(parts, dim=1)
    same(logits, golden["logits"], "logits")
    golden.same_state(state, tokens.size(1) // window - 1)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    same(loss, golden["loss"], "loss")
    found, theirs = gradients(model, loss), golden.under("grads")
    assert found.keys() == theirs.keys()
    for parameter, grad in theirs.items():
        same(found[parameter], grad, parameter)


@pytest.mark.parametrize("name", ["rmt", "rmt_causal", "autocompressor", "compressive"])
def test_rows_that_start_anew_equal_the_public_code(name: str) -> None:
    """A row is reset in the middle of a window beside one that goes on: both stay the golden
    document."""
    golden = Golden(name)
    tokens, ahead = golden["tokens"], golden.sizes["W"] * 2 + 3
    theirs = golden["logits"]
    _, state = golden.model(tokens[:, :ahead], golden.model.empty_state(2))
    state = state.forget([True, False])
    read, length = [0, ahead], tokens.size(1)
    while read[1] < length:
        size = min(7, length - read[1])
        rows = torch.stack([tokens[row, r : r + size] for row, r in enumerate(read)])
        logits, state = golden.model(rows, state)
        for row, r in enumerate(read):
            same(logits[row], theirs[row, r : r + size], f"row {row}")
        read = [r + size for r in read]


@cuts
def test_compressive_equals_the_public_code(cut: str) -> None:
    """Loss and reconstruction loss, window by window; both memories after every second one, and the
    gradients of both losses in early and late ones. Memory is constant between windows there."""
    golden = Golden("compressive")
    model, tokens, window = golden.model, golden["tokens"], golden.sizes["W"]
    state, length = model.empty_state(len(tokens)), tokens.size(1)
    targets = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -1)], dim=1)
    for i, start in enumerate(range(0, length, window)):
        state, nats, extra = state.detach(), [], None
        size = min(window, length - start)
        for a, b in pieces(size, CUTS[cut]):
            scored = model.nats(
                tokens[:, start + a : start + b], targets[:, start + a : start + b], state
            )
            state = scored.state
            nats.append(scored.nats_BT)
            extra = scored.extra_loss
        valid = targets[:, start : start + size] >= 0
        loss = torch.cat(nats, dim=1)[valid].mean()
        same(loss, golden[f"window/{i}/loss"], f"loss of window {i}")
        ours, theirs = gradients(model, loss), golden.under(f"window/{i}/grads")
        assert bool(theirs) == (i in (3, 6))
        for name, grad in theirs.items():
            same(ours[name], grad, f"{name} in window {i}")
        if size == window:
            if i % 2:
                golden.same_state(state, i)
            assert extra is not None
            same(extra, golden[f"window/{i}/aux"].sum(), f"reconstruction in window {i}")
            ours, theirs = gradients(model, extra), golden.under(f"window/{i}/aux_grads")
            assert bool(theirs) == (i in (1, 5))
            for name, grad in theirs.items():
                same(ours[name], grad, f"{name} in window {i}")


def test_the_compressor_learns_from_its_own_loss_alone() -> None:
    """The reconstruction loss has a gradient in the convolution and nowhere else, the
    language-model loss everywhere else and not there."""
    model = make(replace(KINDS["compressive-convolution"], layers=("compressive",) * 2))
    tokens = random_tokens(2, 4 * WINDOW)
    nats, _, extra_loss = model.nats(tokens, tokens, model.empty_state(2))
    assert extra_loss is not None
    own = {name for name, _ in model.named_parameters() if ".compress." in name}
    everything = {name for name, _ in model.named_parameters()}
    for loss, expected in ((extra_loss, own), (nats.sum(), everything - own)):
        found = gradients(model, loss)
        model.zero_grad()
        assert {name for name, grad in found.items() if grad.abs().sum() > 0} == expected


def test_the_first_window_of_a_row_compresses_nothing() -> None:
    """Beside a row that compresses, a row at its first window pushes nothing and counts as zero in
    the mean over rows, so that rows in two parts give the loss of all. Where no row compresses
    there is a gradient, zero: every process has one."""
    model = make(KINDS["compressive-convolution"])
    first, second = random_tokens(2, WINDOW, seed=1), random_tokens(2, WINDOW, seed=2)
    _, state = model(first, model.empty_state(2))
    _, after = model(second, state)
    _, beside, one = model.nats(second, second, state.forget([True, False]))
    _, _, alone = model.nats(second[1:], second[1:], state.select([1]))
    assert one is not None
    assert alone is not None
    same(one, alone / 2, "reconstruction loss")
    assert (after.layers[0].compressed_BCD[0, -3:] != 0).all()
    assert (beside.layers[0].compressed_BCD[0] == 0).all()
    same(beside.layers[0].compressed_BCD[1], after.layers[0].compressed_BCD[1], "compressed")
    _, _, nothing = model.nats(first, first, model.empty_state(2))
    assert nothing is not None
    assert nothing == 0
    grads = gradients(model, nothing)
    assert grads
    assert all((grad == 0).all() for grad in grads.values())


@pytest.mark.parametrize("mask", ["blocks", "causal"])
def test_rmt_learns_its_first_memory(mask: Any) -> None:
    """The table has a gradient from the first window, and from later ones through the memory."""
    model = make(replace(KINDS["rmt"], memory_mask=mask))
    logits, state = model(random_tokens(1, 3 * WINDOW), model.empty_state(1))
    assert model.memory is not None
    for window in range(3):
        part = logits[:, window * WINDOW : (window + 1) * WINDOW]
        (grad,) = torch.autograd.grad(part.sum(), model.memory, retain_graph=True)
        assert (grad.abs().sum(-1) > 0).all()
    logits, _ = model(random_tokens(1, WINDOW), state.detach())
    (grad,) = torch.autograd.grad(logits.sum(), model.memory)
    assert (grad == 0).all()


def reached(config: ModelConfig, windows: int) -> list[bool]:
    """Of each earlier window, whether the logits of the last one change with its tokens."""
    model = make(config)
    tokens = random_tokens(1, windows * WINDOW)
    expected, _ = model(tokens, model.empty_state(1))
    found = []
    for window in range(windows - 1):
        other = tokens.clone()
        part = slice(window * WINDOW, (window + 1) * WINDOW)
        other[:, part] = (other[:, part] + 1) % config.vocab_size
        logits, _ = model(other, model.empty_state(1))
        found.append(not torch.allclose(logits[:, -WINDOW:], expected[:, -WINDOW:], atol=1e-12))
    return found


def test_compressed_memory_reaches_exactly_as_far_as_it_holds() -> None:
    """In a single layer the window sees the one before and C·c/W compressed ones, whole or in
    part, and nothing older; in one call over more windows than the queue holds."""
    config = replace(KINDS["compressive"], layers=("compressive",), compressed_slots=6)
    assert reached(config, 6) == [False, False, True, True, True]
    assert reached(replace(config, compressed_slots=7), 6) == [False, True, True, True, True]
    convolution = replace(config, compressor="convolution")
    assert reached(convolution, 6) == [False, False, True, True, True]


def test_summaries_are_dropped_after_exactly_q_windows() -> None:
    """A summary is read in the Q windows after its own and not in the next; what windows wrote is
    there, oldest first."""
    config = replace(KINDS["autocompressor"], layers=("autocompressor",) * 2)
    model = make(config)
    windows, per_window = config.long_term_windows, config.long_term_tokens
    state, written = model.empty_state(1), []
    for k in range(windows + 2):
        _, state = model(random_tokens(1, WINDOW, seed=k), state)
        queue = state.layers[0].tokens_BMD.detach()
        written.append(queue[:, -per_window:])
        held = min(k + 1, windows) * per_window
        assert torch.equal(queue[:, -held:], torch.cat(written, dim=1)[:, -held:])
        assert (queue[:, :-held] == 0).all()
        changed = queue.clone().requires_grad_()
        memory = state.layers[0]._replace(tokens_BMD=changed)
        held_state = replace(state.detach(), layers=(memory, *state.layers[1:]))
        logits, _ = model(random_tokens(1, WINDOW, seed=99), held_state)
        (grad,) = torch.autograd.grad(logits.sum(), changed)
        assert (grad[0, -held:].abs().sum(-1) > 0).all()
        assert (grad[0, :-held] == 0).all()


@pytest.mark.parametrize("kind", ["autocompressor", "compressive"])
def test_a_whole_document_equals_its_windows(kind: str) -> None:
    """One call over more windows than the queue holds, in which the filled part grows, equals a
    call for every window."""
    model = make(KINDS[kind])
    tokens = random_tokens(2, 7 * WINDOW)
    whole, _ = model(tokens, model.empty_state(2))
    state, parts = model.empty_state(2), []
    for window in tokens.split(WINDOW, dim=1):
        logits, state = model(window, state)
        parts.append(logits)
    same(torch.cat(parts, dim=1), whole, "logits")


@pytest.mark.parametrize("kind", ["rmt", "autocompressor", "compressive-convolution"])
def test_memory_is_exact_under_autocast(kind: str) -> None:
    """What is carried stays in single precision, and training in bfloat16 has finite gradients."""
    model = make(KINDS[kind]).float()
    tokens = random_tokens(2, 4 * WINDOW)
    with torch.autocast("cpu", torch.bfloat16):
        loss, state = model.loss(tokens, tokens, model.empty_state(2))
        loss.backward()
    assert {t.dtype for memory in state.layers for t in memory} == {torch.float32}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("kind", ["rmt", "autocompressor", "compressive-convolution"])
def test_windows_computed_again_give_the_same_gradients(kind: str) -> None:
    """Keeping only the edges of windows changes no gradient, the reconstruction loss included."""
    model, tokens = make(KINDS[kind]), random_tokens(2, 4 * WINDOW)
    found = []
    for model.checkpoint_windows in (False, True):
        loss, _ = model.loss(tokens, tokens, model.empty_state(2))
        found.append(gradients(model, loss))
    for name, grad in found[0].items():
        same(found[1][name], grad, name)


@pytest.mark.parametrize("kind", ["rmt", "autocompressor", "compressive-convolution"])
def test_static_shapes_change_nothing(kind: str) -> None:
    """Reading the whole queue, full or not, gives what reading its filled part gives."""
    model, tokens = make(KINDS[kind]), random_tokens(2, 5 * WINDOW)
    expected, _ = model(tokens, model.empty_state(2))
    model.static_shapes = True
    same(model(tokens, model.empty_state(2))[0], expected, "logits")


@pytest.mark.parametrize("kind", ["rmt", "autocompressor", "compressive-convolution"])
def test_memory_files(kind: str, tmp_path: Path) -> None:
    """A saved memory goes on as if never stopped, in the middle of a window too."""
    model, tokens = make(KINDS[kind]), random_tokens(1, 4 * WINDOW)
    expected, _ = model(tokens, model.empty_state(1))
    _, state = model(tokens[:, : 2 * WINDOW + 2], model.empty_state(1))
    state.save(tmp_path / "memory.safetensors")
    again = MemoryState.load(tmp_path / "memory.safetensors")
    same(model(tokens[:, 2 * WINDOW + 2 :], again)[0], expected[:, 2 * WINDOW + 2 :], "logits")


FLOATS = {
    "paper-rmt": (131_072, 0),
    "paper-autocompressor": (0, 4_194_304),
    "paper-compressive": (6_815_744, 6_815_744),
    "laptop-rmt": (2_048, 0),
    "laptop-autocompressor": (0, 32_768),
    "laptop-compressive": (49_152, 49_152),
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats(name: str) -> None:
    """Capacity by formula and by the state that a model carries; the Compressive Transformer has
    exactly that of Transformer-XL."""
    config = PRESETS[name]
    assert config.memory_floats() == FLOATS[name]
    with torch.device("meta"):
        assert LanguageModel(config).empty_state(3).num_floats() == sum(FLOATS[name])
    if "compressive" in name:
        cache = PRESETS[name.replace("compressive", "transformer-xl")].memory_floats()
        assert sum(FLOATS[name]) == sum(cache)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("rmt", dict(memory_tokens=0), "memory_tokens=0: a 'rmt' layer needs at least 1"),
        (
            "rmt",
            dict(memory_mask="full"),
            "memory_mask='full' is unknown: choose one of blocks, causal",
        ),
        ("rmt", dict(layers=("rmt", "plain")), "make all layers 'rmt'"),
        ("rmt", dict(layers=("rmt", "autocompressor")), "only kinds of one family"),
        ("autocompressor", dict(layers=("plain", "autocompressor")), "make all layers 'autoc"),
        ("autocompressor", dict(long_term_windows=0), "long_term_windows=0"),
        ("autocompressor", dict(long_term_tokens=7), "long_term_tokens=7 exceeds window=6"),
        ("compressive", dict(compressed_slots=0), "compressed_slots=0"),
        ("compressive", dict(compression_rate=0), "compression_rate=0"),
        ("compressive", dict(compression_rate=4), "does not divide window=6"),
        (
            "compressive",
            dict(compressor="max"),
            "compressor='max' is unknown: choose one of mean, conv",
        ),
    ],
)
def test_refusals(kind: str, changes: dict[str, Any], message: str) -> None:
    """What cannot be built is refused with the value and the cure, in one line."""
    with pytest.raises(ValueError, match=message) as caught:
        replace(KINDS[kind], **changes)
    assert "\n" not in str(caught.value)
