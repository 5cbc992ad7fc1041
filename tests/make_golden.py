"""Writes tests/golden.npz: outputs of tiny official-style models, small enough to commit.

The weights are drawn from seeds, so only the outputs are stored. They were computed by this package
when it agreed with the official golden files; the test that reads them keeps that agreement
everywhere. Run it again only after `pytest tests/test_meliad.py` has passed beside those files.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from melodi import LanguageModel, ModelConfig
from melodi.meliad import Arrays, state_to_official, to_official

PATH = Path(__file__).parent / "golden.npz"
SEGMENTS, ROWS = 3, 2
STARTS = [[True, True], [False, False], [False, True]]

_SIZES = dict(vocab_size=12, width=8, num_heads=2, ffn_width=12, window=8, dialect="meliad")
CONFIGS = {
    "melodi": ModelConfig(
        layers=("short", "long", "long", "short"),
        short_term_tokens=4,
        long_term_tokens=3,
        long_term_windows=4,
        head_width=6,
        **_SIZES,
    ),
    "transformer-xl": ModelConfig(layers=("xl", "xl"), **_SIZES),
    "block-recurrent": ModelConfig(layers=("recurrent", "xl"), recurrent_states=5, **_SIZES),
    "memorizing": ModelConfig(layers=("memorizing", "xl"), memory_slots=32, **_SIZES),
}


def draw(config: ModelConfig) -> LanguageModel:
    """A model with weights that depend on nothing but NumPy's generator."""
    rng = np.random.default_rng(0)
    model = LanguageModel(config).eval()
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = rng.normal(size=parameter.shape) * 0.4 + (parameter.dim() == 1) * 0.6
            parameter.copy_(torch.from_numpy(noise))
    return model


def draw_tokens(config: ModelConfig, segment: int) -> Tensor:
    # The official Memorizing is only defined for one window a segment.
    windows = 1 if "memorizing" in config.layers else 2
    rng = np.random.default_rng(segment + 1)
    return torch.from_numpy(rng.integers(0, config.vocab_size, (ROWS, windows * config.window)))


def run(model: LanguageModel) -> Arrays:
    """Logits, loss, gradients and memory of every segment, under the official names."""
    arrays: Arrays = {}
    state = model.empty_state(ROWS)
    for segment in range(SEGMENTS):
        tokens = draw_tokens(model.config, segment)
        state = state.detach().forget(STARTS[segment])
        targets = torch.cat([tokens[:, 1:], torch.full((ROWS, 1), -1)], dim=1)
        logits, _ = model(tokens, state)
        model.zero_grad()
        loss, state = model.loss(tokens, targets, state)
        loss.backward()
        arrays[f"{segment}/logits"] = logits.detach().numpy()
        arrays[f"{segment}/loss"] = loss.detach().numpy()
        for name, array in to_official(model, grads=True).items():
            arrays[f"{segment}/grads/{name}"] = array
        for name, array in state_to_official(state).items():
            arrays[f"{segment}/state/{name}"] = array
    return arrays


if __name__ == "__main__":
    outputs = {
        f"{kind}/{name}": array
        for kind, config in CONFIGS.items()
        for name, array in run(draw(config)).items()
    }
    np.savez_compressed(PATH, **outputs)
    print(f"{PATH}: {PATH.stat().st_size:,} bytes, {len(outputs)} arrays")
