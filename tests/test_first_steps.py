"""A refactor changes no number: the first training steps of the laptop presets are pinned.

The numbers are in golden/first_steps.json. They may be written anew (`python
tests/test_first_steps.py`) only by a change that means to alter what is computed: a preset, a
recipe, a dialect's answer, an initialisation. Say so in docs/decisions.md. They hold to float
noise on any machine, and say nothing about bits.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from melodi import LanguageModel
from melodi.config import PRESETS
from melodi.config.training import recipe
from melodi.training.optimizers import make_optimizer, schedule

PATH = Path(__file__).parent / "golden" / "first_steps.json"
NAMES = [name for name in PRESETS if name.startswith("laptop-")]
ROWS, WINDOWS, STEPS = 2, 3, 3
EXPECTED = json.loads(PATH.read_text()) if PATH.exists() else {}


def first_steps(name: str) -> list[dict[str, float]]:
    """Loss, gradient norm and the sum of all weights of the first steps, on synthetic tokens."""
    torch.manual_seed(0)
    model = LanguageModel(PRESETS[name]).train()
    settings = recipe(name).optimizer
    optimizer = make_optimizer(model, settings)
    state, steps = model.empty_state(ROWS), []
    length = WINDOWS * model.config.window
    random = np.random.default_rng(0)
    for step in range(1, STEPS + 1):
        ids = torch.from_numpy(random.zipf(1.3, (ROWS, length + 1)) % model.config.vocab_size)
        state = state.detach().forget([step == 3, False])
        loss, state = model.loss(ids[:, :-1], ids[:, 1:], state)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = schedule(step, settings.peak, settings.floor, settings.warmup, 100)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["multiplier"]
        optimizer.step()
        optimizer.zero_grad()
        weights = sum(p.detach().double().abs().sum().item() for p in model.parameters())
        steps.append({"loss": loss.item(), "gradient_norm": norm.item(), "weights": weights})
    return steps


@pytest.mark.parametrize("name", NAMES)
def test_the_first_steps_are_what_they_were(name: str) -> None:
    """Loss, gradient norm and weights of three steps, with carried memory and a reset."""
    close: Any = pytest.approx
    for step, (ours, theirs) in enumerate(zip(first_steps(name), EXPECTED[name], strict=True), 1):
        assert ours == close(theirs, rel=2e-4), (
            f"step {step} of {name} computes other numbers than before. If this was meant (another "
            "preset, recipe, dialect or initialisation), run `python tests/test_first_steps.py` "
            "and say why in docs/decisions.md; if not, it is a fault."
        )


if __name__ == "__main__":
    PATH.write_text(json.dumps({name: first_steps(name) for name in NAMES}, indent=1) + "\n")
    print(f"{PATH} written")
