"""Related memory systems equal the public implementations, by stored numbers in float64.

Each golden/related/NAME.npz holds parameters under our names, tokens, and what the authors' code
(ARMT) or a public package (Infini-attention) made of them: logits, loss, gradients through all
windows, and what is carried after each window. The last window stays open.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from zoo import KINDS, WINDOW, ZOO, make, random_tokens

from melodi import LanguageModel, ModelConfig

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
        model.load_state_dict(self.under("params"), strict=True)
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
    """After every window, whether it was read whole or in pieces."""
    golden = Golden(name)
    model, window = golden.model(), golden.config.window
    state = model.empty_state(2)
    for k in range(4):
        for part in golden.tokens_BT[:, k * window : (k + 1) * window].split(piece, dim=1):
            _, state = model(part, state)
        for layer, letter, theirs in golden.memories(k + 1):
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
