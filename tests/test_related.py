"""Related memory systems equal the public implementations, by stored numbers in float64.

Each golden/related/NAME.npz holds parameters under our names, tokens, and what the authors' code
(ARMT) or a public package (Infini-attention) made of them: logits, loss, gradients through all
windows, and what is carried after the second and the fourth. The last window stays open.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from zoo import KINDS, WINDOW, ZOO, make, random_tokens

from melodi import LanguageModel, ModelConfig
from melodi.config import PRESETS
from melodi.layers import armt, associative, infini

FOLDER = Path(__file__).parent / "golden" / "related"
TOLERANCE = 1e-10
SYSTEMS: dict[str, dict[str, Any]] = {
    "infini": dict(kind="infini"),
    "infini_delta": dict(kind="infini", infini_update="delta"),
    "armt": dict(kind="armt", memory_tokens=3, associative_width=4),
}
"""The layer kind, and its config fields."""
CUTS = {
    "whole": [],
    "in pieces": list(itertools.accumulate([5, 3, 7, 1, 16, 2, 20, 9])),
    "token by token": list(range(1, 69)),
}

every_system = pytest.mark.parametrize("name", SYSTEMS)


class Golden:
    """One file: the model that it belongs to, and what that model must compute."""

    def __init__(self, name: str) -> None:
        with np.load(FOLDER / f"{name}.npz") as file:
            self.arrays = {key: torch.from_numpy(file[key]) for key in file}
        with np.load(FOLDER / f"{name.partition('_')[0]}.npz") as file:  # variants share weights
            self.params = {
                key.removeprefix("params/"): torch.from_numpy(file[key])
                for key in file
                if key.startswith("params/")
            }
        sizes = json.loads(bytes(self.arrays.pop("config").numpy()))
        fields = dict(SYSTEMS[name])
        self.config = ModelConfig(
            vocab_size=sizes["V"],
            width=sizes["D"],
            num_heads=sizes["H"],
            head_width=sizes["E"],
            ffn_width=sizes["ffn"],
            window=sizes["W"],
            layers=(fields.pop("kind"),) * sizes["N"],
            dialect="paper",
            **fields,
        )
        self.tokens_BT = self.arrays["tokens"]
        self.logits_BTV = self.arrays["logits"]

    def model(self) -> LanguageModel:
        model = LanguageModel(self.config).double()
        model.load_state_dict(self.params, strict=True)
        return model

    def under(self, folder: str) -> dict[str, Tensor]:
        prefix = f"{folder}/"
        found = {k.removeprefix(prefix): v for k, v in self.arrays.items() if k.startswith(prefix)}
        assert found, folder
        return found

    def memories(self, windows: int) -> Iterator[tuple[int, str, Tensor]]:
        """Layer, letter and value of what is carried after so many windows."""
        for name, value in self.under(f"state/{windows - 1}").items():
            _, layer, letter = name.split(".")
            yield int(layer), letter, value


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """To 1e-10, relative to the largest entry where that is above one."""
    atol = TOLERANCE * max(1.0, theirs.abs().max().item())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@every_system
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_logits_and_gradients_are_the_public_ones(name: str, cuts: list[int]) -> None:
    """Logits, loss and gradients, however the stream is cut."""
    golden = Golden(name)
    model, length = golden.model(), golden.tokens_BT.size(1)
    state, parts = model.empty_state(2), []
    for start, stop in itertools.pairwise([0, *cuts, length]):
        logits, state = model(golden.tokens_BT[:, start:stop], state)
        parts.append(logits)
    logits_BTV = torch.cat(parts, dim=1)
    assert_close(logits_BTV, golden.logits_BTV)
    loss = torch.nn.functional.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1), golden.tokens_BT[:, 1:].flatten()
    )
    assert_close(loss, golden.arrays["loss"])
    loss.backward()
    expected = golden.under("grads")
    assert expected.keys() == dict(model.named_parameters()).keys()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_close(parameter.grad, expected[key])


@every_system
@pytest.mark.parametrize("piece", [1, 5, 16])
def test_the_carried_state_is_the_public_one(name: str, piece: int) -> None:
    """After the second and the fourth window, whether they were read whole or in pieces."""
    golden = Golden(name)
    model, window = golden.model(), golden.config.window
    state = model.empty_state(2)
    for windows in (2, 4):
        two = golden.tokens_BT[:, (windows - 2) * window : windows * window]
        for part in two.split(piece, dim=1):
            _, state = model(part, state)
        for layer, letter, theirs in golden.memories(windows):
            (field,) = [f for f in state.layers[layer]._fields if f.startswith(f"{letter}_")]
            assert_close(getattr(state.layers[layer], field), theirs)


@every_system
def test_a_reset_row_starts_the_public_run_anew(name: str) -> None:
    """Beside a row that goes on, and at another place of its window."""
    golden = Golden(name)
    model, tokens_BT = golden.model(), golden.tokens_BT
    _, state = model(tokens_BT[:, :21], model.empty_state(2))
    state = state.forget([True, False])
    shifted = torch.stack([tokens_BT[0, :48], tokens_BT[1, 21:69]])
    logits_BTV, _ = model(shifted, state)
    assert_close(logits_BTV[0], golden.logits_BTV[0, :48])
    assert_close(logits_BTV[1], golden.logits_BTV[1, 21:69])


associative_kinds = pytest.mark.parametrize(
    "config",
    [config for name, config in ZOO.items() if name.startswith(("infini", "armt"))],
    ids=[name for name in ZOO if name.startswith(("infini", "armt"))],
)


@associative_kinds
def test_a_row_that_has_read_nothing_has_a_gradient(config: ModelConfig) -> None:
    """What is stored is zero in it, and so is the sum to divide by: no gradient becomes NaN, and
    those of the row are the same beside a row that has read as alone."""
    model = make(config).float()
    _, state = model(random_tokens(2, 2 * WINDOW + 1), model.empty_state(2))
    tokens = random_tokens(2, 2 * WINDOW, seed=1)
    logits, _ = model(tokens, state.detach().forget([True, False]))
    beside = torch.autograd.grad(logits[0].square().sum(), list(model.parameters()))
    logits, _ = model(tokens[:1], model.empty_state(1))
    alone = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
    for a, b in zip(beside, alone, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * (1 + b.abs().max().item()))


@pytest.mark.parametrize(("name", "module"), [("infini", infini), ("armt", armt)])
def test_sums_over_a_document_are_exact(
    name: str, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under autocast what is read and stored is computed in float32: sums that grow with every
    window would lose in bfloat16 what is added late."""
    seen: list[torch.dtype] = []

    def watched(function: Any) -> Any:
        def run(*args: Any) -> Tensor:
            result: Tensor = function(*args)
            seen.append(result.dtype)
            assert not torch.is_autocast_enabled("cpu")
            assert {a.dtype for a in args if isinstance(a, Tensor)} == {torch.float32}
            return result

        return run

    monkeypatch.setattr(module, "recalled", watched(associative.recalled))
    monkeypatch.setattr(module, "stored", watched(associative.stored))
    model = make(KINDS[name]).float()
    with torch.autocast("cpu", torch.bfloat16):
        model(random_tokens(1, 2 * WINDOW), model.empty_state(1))
    assert set(seen) == {torch.float32}


def test_features_of_infini_stay_above_zero() -> None:
    """elu(a) + 1 exactly, and not zero where the exponential is far below the precision of one."""
    a = torch.linspace(-8, 8, 101).double()
    torch.testing.assert_close(infini.features(a), torch.nn.functional.elu(a) + 1)
    assert (infini.features(torch.tensor([-30.0, -80.0])) > 0).all()


def test_a_vanishing_scale_leaves_infini_finite() -> None:
    """Queries are freed of the learned attention scale, also where that passes through zero."""
    model = make(KINDS["infini-delta"])
    with torch.no_grad():
        model.layers[0].block.scale.factor[0] = 0
    logits, _ = model(random_tokens(1, 2 * WINDOW), model.empty_state(1))
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_armt_starts_as_a_model_without_memory() -> None:
    """W_v is zero: before training nothing is stored, and earlier windows change no logit."""
    model = LanguageModel(PRESETS["laptop-armt"]).eval()
    tokens = torch.arange(2 * 64)[None]
    logits, state = model(tokens, model.empty_state(1))
    alone, _ = model(tokens[:, 64:], model.empty_state(1))
    torch.testing.assert_close(logits[:, 64:], alone)
    assert all((memory.A_BKD == 0).all() and memory.z_BK.any() for memory in state.layers)


def test_laptop_sizes_of_associative_memory() -> None:
    """N·H·E·(E + 1) and N·K·(D + 1) floats."""
    assert PRESETS["laptop-infini"].memory_floats() == (0, 25_344)
    assert PRESETS["laptop-armt"].memory_floats() == (0, 74_304)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("infini", dict(infini_update="fast"), "infini_update='fast' is unknown: choose one of"),
        ("no-memory", dict(infini_update="delta"), "infini_update='delta' without effect"),
        ("armt", dict(memory_tokens=0), "memory_tokens=0: a 'armt' layer needs at least 1"),
        ("armt", dict(associative_width=0), "associative_width=0: a 'armt' layer needs"),
        ("armt", dict(layers=("armt", "infini")), "layers mix 'armt' with 'infini'"),
    ],
)
def test_what_cannot_be_built(kind: str, change: dict[str, Any], message: str) -> None:
    """Is refused with the value and the cure."""
    with pytest.raises(ValueError, match=message):
        replace(KINDS[kind], **change)
