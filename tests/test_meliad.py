"""The dialect `meliad` equals the official code: logits, loss, every gradient, carried memory."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from zoo import KINDS, make

from melodi import LanguageModel, MemoryState, ModelConfig
from melodi.meliad import from_official, state_to_official, to_official

GOLDEN = Path(__file__).parent / "golden"
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
"""One model of each official family, to be carried to the official names and back."""
EXTRAS = {
    "melodi": lambda c: {"long_term_windows": c["Q"]},
    "memorizing": lambda c: {"memory_slots": c["M"], "top_k": c["k"]},
}


def assert_close(ours: np.ndarray, theirs: np.ndarray, name: str, atol: float) -> None:
    worst = np.abs(ours.astype(np.float64) - theirs).max() if ours.size else 0.0
    assert ours.shape == theirs.shape, name
    assert worst <= atol, f"{name}: {worst} > {atol}"


def assert_gradient(ours: np.ndarray, theirs: np.ndarray, name: str) -> None:
    """To 1e-4 of the tensor's largest entry."""
    assert_close(ours, theirs, name, 1e-4 * max(np.abs(theirs).max(), 1e-12))


@pytest.mark.parametrize("name", ["melodi", "transformer_xl", "block_recurrent", "memorizing"])
def test_equals_the_official_code(name: str) -> None:
    """Across segments and a row that starts anew: logits and loss to 1e-5, carried memory to 2e-5,
    every gradient to 1e-4 of its tensor's largest entry (golden/README.md)."""
    golden = np.load(GOLDEN / f"official_{name}.npz")
    sizes = json.loads(bytes(golden["config"]))
    params = {key: golden[key] for key in golden.files if key.startswith("params/")}
    model = from_official(params, sizes["W"], **EXTRAS.get(name, lambda _: {})(sizes))
    state = model.empty_state(sizes["B"])
    for i in range(len(sizes["starts"])):
        tokens = torch.from_numpy(golden[f"seg{i}/tokens"]).long()
        state = state.detach().forget(torch.from_numpy(golden[f"seg{i}/start_of_sequence"]))
        logits, _ = model(tokens, state)
        assert_close(logits.detach().numpy(), golden[f"seg{i}/logits"], "logits", 1e-5)
        model.zero_grad()
        targets = torch.cat([tokens[:, 1:], torch.full((len(tokens), 1), -1)], dim=1)
        loss, state = model.loss(tokens, targets, state)
        loss.backward()
        assert_close(loss.detach().numpy(), golden[f"seg{i}/loss"], "loss", 1e-5)

    ours = to_official(model, grads=True)
    theirs = {k.removeprefix(f"seg{i}/grads/"): golden[k] for k in golden.files if "/grads/" in k}
    for key in theirs.keys() - ours.keys():  # the last layer's M_up, which nothing reads
        assert "token_mixing_summary" in key
        assert not theirs[key].any()
    for key, grad in ours.items():
        assert_gradient(grad, theirs[key], key)

    memory = state_to_official(state)
    stored = {k.split("/", 2)[2]: golden[k] for k in golden.files if "_test" in k}
    assert memory.keys() == stored.keys()
    for key, array in memory.items():
        assert_close(array, stored[key], key, 2e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_round_trip(kind: str) -> None:
    """To official names and back is the same model, sizes read off names and shapes."""
    config = CONFIGS[kind]
    model = make(config).float()
    again = from_official(
        {f"params/{name}": array for name, array in to_official(model).items()},
        window=config.window,
        long_term_windows=config.long_term_windows or None,
        memory_slots=config.memory_slots or None,
    )
    assert again.config.digest() == config.digest()
    assert again.fingerprint() == model.fingerprint()


@pytest.mark.parametrize(
    "change", [{"branching": False}, {"copy_short_to_long": True, "long_term_tokens": 4}]
)
def test_ablations_round_trip(change: dict) -> None:
    """What an official checkpoint lacks tells which ablation it is."""
    config = ModelConfig.from_dict(CONFIGS["melodi"].to_dict() | change)
    again = from_official(to_official(make(config)), window=8, long_term_windows=4)
    assert again.config.digest() == config.digest()


def official(kind: str) -> dict[str, np.ndarray]:
    return to_official(make(CONFIGS[kind]))


def with_five_summary_tokens() -> dict[str, np.ndarray]:
    arrays = official("melodi")
    arrays["layer_stack/summary_embeddings"] = np.zeros((5, 8), np.float32)
    return arrays


def in_a_window(kind: str) -> MemoryState:
    model = make(CONFIGS[kind])
    return model(torch.zeros(1, 3).long(), model.empty_state(1))[1]


REFUSED = {
    "long_term_windows cannot be read off": lambda: from_official(official("melodi"), 8),
    "memory_slots cannot be read off": lambda: from_official(official("memorizing"), 8),
    "long_term_windows=4 is for Melodi only": lambda: from_official(
        official("transformer-xl"), 8, long_term_windows=4
    ),
    "memory_slots=4 is for Memorizing only": lambda: from_official(
        official("melodi"), 8, long_term_windows=4, memory_slots=4
    ),
    "bucketed top-k": lambda: from_official(official("memorizing"), 8, memory_slots=32, top_k=8),
    "only equal numbers of summary and short-term": lambda: from_official(
        with_five_summary_tokens(), 8, long_term_windows=4
    ),
    "check window=|over window=9": lambda: from_official(
        official("melodi"), 9, long_term_windows=4
    ),
    "'embed/embedding' is missing": lambda: from_official({}, 8),
    "'extra/thing' has no place": lambda: from_official(
        official("transformer-xl") | {"extra/thing": np.zeros(1)}, 8
    ),
    "'default' has no official names": lambda: to_official(
        LanguageModel(ModelConfig(vocab_size=4, width=4, num_heads=1, layers=("xl",)))
    ),
    "layer kind 'plain' has no counterpart": lambda: to_official(
        LanguageModel(replace(CONFIGS["melodi"], layers=("plain", "short")))
    ),
    "layer kind 'rmt' has no counterpart": lambda: to_official(
        LanguageModel(replace(KINDS["rmt"], dialect="meliad"))
    ),
    "name layers ": lambda: from_official(
        {k: v for k, v in official("transformer-xl").items() if "transformer0" not in k}, 8
    ),
    "read up to the end of a window": lambda: state_to_official(in_a_window("melodi")),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message: str) -> None:
    """What cannot be mapped is refused in one line."""
    with pytest.raises(ValueError, match=message) as caught:
        REFUSED[message]()
    assert "\n" not in str(caught.value)
