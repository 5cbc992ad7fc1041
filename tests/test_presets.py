"""Memory figures, parameters and names, exactly as in the paper's tables."""

import json
from dataclasses import replace

import pytest
import torch
from zoo import mixer_weights

from melodi import LanguageModel
from melodi.config import PRESETS, ModelConfig, preset, sandwich

PAPER = {
    "transformer-xl": (13_631_488, 0),
    "block-recurrent": (13_107_200, 0),
    "memorizing": (13_631_488, 134_217_728),
    "melodi-s192-l32": (2_555_904, 8_388_608),
    "melodi-s128-l64": (1_703_936, 16_777_216),
    "melodi-s192-l96": (2_555_904, 25_165_824),
    "no-memory": (0, 0),
    "infini": (0, 1_717_248),
    "armt": (0, 5_116_800),
}
PAPER_12 = {
    "transformer-xl": 12_582_912,
    "block-recurrent": 12_058_624,
    "memorizing": 146_800_640,
    "melodi-s192-l32": 10_747_904,
    "melodi-s128-l64": 18_350_080,
    "melodi-s192-l96": 27_525_120,
    "no-memory": 0,
}
LONGER_WINDOWS = {
    ("transformer-xl", 1024): 27_262_976,
    ("transformer-xl", 2048): 54_525_952,
    ("transformer-xl", 3072): 81_788_928,
    ("block-recurrent", 1024): 25_690_112,
    ("block-recurrent", 2048): 50_855_936,
    ("memorizing", 1024): 161_480_704,
    ("memorizing", 2048): 188_743_680,
}
LAPTOP = [name for name in PRESETS if name.startswith("laptop")]


def on_meta(config: ModelConfig) -> LanguageModel:
    with torch.device("meta"):
        return LanguageModel(config)


@pytest.mark.parametrize("name", PAPER)
def test_thirteen_layers(name: str) -> None:
    """Table 5's memory column, in floats, by formula and by the state that a model carries."""
    config = PRESETS[f"paper-{name}"]
    assert config.memory_floats() == PAPER[name]
    assert on_meta(config).empty_state(3).num_floats() == sum(PAPER[name])


def test_the_papers_sizes() -> None:
    """Sec. 3.2 and Appendix B: sizes, dropout, and where the memories sit."""
    for name, config in PRESETS.items():
        if name.startswith("paper-"):
            sizes = (config.vocab_size, config.width, config.num_heads, config.head_size)
            assert sizes == (32_000, 1024, 8, 128)
            assert (config.ffn_width, config.window, config.dropout) == (4096, 512, 0.05)
            assert config.dialect == "default"
    for suffix, count, middle in (("", 13, 8), ("-12", 12, 6)):
        melodi = PRESETS[f"paper-melodi-s128-l64{suffix}"].layers
        assert melodi == tuple("long" if i == middle else "short" for i in range(count))
        memorizing = PRESETS[f"paper-memorizing{suffix}"].layers
        assert memorizing == tuple("memorizing" if i == middle else "xl" for i in range(count))
        recurrent = PRESETS[f"paper-block-recurrent{suffix}"].layers
        assert recurrent == ("xl",) * (count - 4) + ("recurrent", "xl", "xl")
        assert PRESETS[f"paper-transformer-xl{suffix}"].layers == ("xl",) * count
        assert PRESETS[f"paper-no-memory{suffix}"].layers == ("plain",) * count


def test_starts() -> None:
    """Where parameters begin: gates at 0.2, scales at 1 or √E, the rest by its size."""
    torch.manual_seed(0)
    model = LanguageModel(PRESETS["laptop-melodi"])
    assert model.layers[3].gate.alpha().flatten().tolist() == pytest.approx([0.2] * 4)
    assert model.embedding.weight.std().item() == pytest.approx(128**-0.5, rel=0.05)
    assert model.layers[0].block.query.weight.std().item() == pytest.approx(
        0.88 * 128**-0.5, rel=0.05
    )
    assert model.summary.std().item() == pytest.approx(0.88 * 0.25, rel=0.1)
    official = LanguageModel(replace(PRESETS["laptop-melodi"], dialect="meliad"))
    assert official.embedding.weight.std().item() == pytest.approx(1, rel=0.05)
    assert (official.layers[0].block.scale.factor == 1).all()
    assert official.layers[3].gate.logit.std().item() == pytest.approx(0.88 * 0.25, rel=0.3)
    assert model.layers[0].block.scale.factor.tolist() == pytest.approx([32**0.5] * 4)


@pytest.mark.parametrize("name", PAPER_12)
def test_twelve_layers(name: str) -> None:
    assert sum(PRESETS[f"paper-{name}-12"].memory_floats()) == PAPER_12[name]


@pytest.mark.parametrize(("name", "window"), LONGER_WINDOWS)
def test_longer_windows(name: str, window: int) -> None:
    """Table 6: a longer window changes the caches and nothing else."""
    config = replace(PRESETS[f"paper-{name}"], window=window)
    assert sum(config.memory_floats()) == LONGER_WINDOWS[name, window]


def test_the_meliad_dialect_stores_tokens() -> None:
    """Tokens instead of pairs halve the long-term memory."""
    config = replace(PRESETS["paper-melodi-s128-l64"], dialect="meliad")
    assert config.memory_floats() == (1_703_936, 16_777_216 // 2)
    assert on_meta(config).empty_state(1).num_floats() == sum(config.memory_floats())


def test_mixers_are_small() -> None:
    """The two mixers of a layer hold (W + S)·S·2 weights (Sec. 2.2)."""
    mixers = mixer_weights(on_meta(PRESETS["paper-melodi-s128-l64"]), layer=0)
    assert mixers["up"].numel() + mixers["right"].numel() == 163_840


@pytest.mark.parametrize("name", PRESETS)
def test_no_parameter_is_unused(name: str) -> None:
    """The last summary mixer does not exist: every parameter gets a gradient in two windows."""
    sizes = dict(vocab_size=11, width=16, num_heads=2, ffn_width=8, window=8, short_term_tokens=4)
    memories = dict(long_term_tokens=2, long_term_windows=2, recurrent_states=3, memory_slots=16)
    model = LanguageModel(replace(PRESETS[name], **sizes, **memories))
    tokens = torch.arange(24)[None] % 11
    loss, _ = model.loss(tokens, tokens, model.empty_state(1))
    loss.backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]


def test_laptop_presets_are_comparable() -> None:
    """At most 2 M parameters, equal within 3 %; Memorizing : Melodi stays the paper's 8×."""
    sizes = {name: on_meta(PRESETS[name]).num_parameters for name in LAPTOP}
    assert len(sizes) >= 10
    assert max(sizes.values()) <= 2_000_000
    assert max(sizes.values()) / min(sizes.values()) <= 1.03
    ratio = sum(PRESETS["laptop-memorizing"].memory_floats()) / sum(
        PRESETS["laptop-melodi"].memory_floats()
    )
    assert ratio == pytest.approx(8, abs=0.05)


def test_short_term_layers_are_spread() -> None:
    """The sandwich is data: kinds follow from where short-term and long-term memory sit."""
    assert sandwich(4, long_term=(2,)) == ("short", "short", "long", "short")
    assert sandwich(4, long_term=(1, 2), short_term=(0, 2)) == (
        "short",
        "long-only",
        "long",
        "plain",
    )


def test_config_round_trips_through_json() -> None:
    for config in PRESETS.values():
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_digest_sees_what_memory_depends_on() -> None:
    config = PRESETS["laptop-melodi"]
    assert config.digest() == replace(config, dropout=0.3, head_width=32).digest()
    assert config.digest() != replace(config, long_term_windows=65).digest()
    assert config.digest() != replace(config, dialect="paper").digest()
    spelled_out = "paper,attention=normalised-root,embedding=root"
    assert config.digest() == replace(config, dialect=spelled_out).digest()


def test_unknown_preset() -> None:
    with pytest.raises(ValueError, match="did you mean 'laptop-melodi'"):
        preset("laptop-melodie")
