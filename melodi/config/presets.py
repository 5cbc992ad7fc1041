"""The paper's sizes (Sec. 3.2, Tables 3 and 5), and laptop sizes of the same shape."""

import difflib
from collections.abc import Sequence
from typing import Any

from melodi.config.kinds import LayerKind
from melodi.config.model import ModelConfig


def sandwich(
    num_layers: int, long_term: Sequence[int] = (), short_term: Sequence[int] | None = None
) -> tuple[LayerKind, ...]:
    """Layer kinds of Melodi: short-term memory in `short_term` (everywhere when not given),
    long-term memory in `long_term`."""
    short_term = range(num_layers) if short_term is None else short_term
    for name, indices in (("long-term", long_term), ("short-term", short_term)):
        for i in indices:
            if not 0 <= i < num_layers:
                raise ValueError(
                    f"{name} layer {i} is outside the stack of {num_layers} layers: "
                    f"choose an index from 0 to {num_layers - 1}"
                )
    names: dict[tuple[bool, bool], LayerKind] = {
        (True, True): "long",
        (True, False): "long-only",
        (False, True): "short",
        (False, False): "plain",
    }
    return tuple(names[i in long_term, i in short_term] for i in range(num_layers))


def _paper(layers: tuple[LayerKind, ...], **changes: Any) -> ModelConfig:
    """The paper's sizes (Sec. 3.2)."""
    return ModelConfig(
        vocab_size=32_000,
        width=1024,
        num_heads=8,
        ffn_width=4096,
        window=512,
        layers=layers,
        dropout=0.05,
        **changes,
    )


def _laptop(layers: tuple[LayerKind, ...], **changes: Any) -> ModelConfig:
    """The paper's shape at a size that learns in minutes on two cores."""
    sizes: dict[str, Any] = dict(vocab_size=2048, width=128, num_heads=4, ffn_width=512, window=64)
    return ModelConfig(layers=layers, **{**sizes, **changes})


def _all(num_layers: int, kind: LayerKind) -> tuple[LayerKind, ...]:
    return (kind,) * num_layers


def _at(num_layers: int, index: int, kind: LayerKind) -> tuple[LayerKind, ...]:
    """A Transformer-XL stack with one layer of another kind."""
    layers: list[LayerKind] = ["xl"] * num_layers
    layers[index] = kind
    return tuple(layers)


def _paper_family(num_layers: int, long_term_layer: int) -> dict[str, ModelConfig]:
    melodi = sandwich(num_layers, long_term=(long_term_layer,))
    family = {
        f"melodi-s{s}-l{m}": _paper(
            melodi, short_term_tokens=s, long_term_tokens=m, long_term_windows=128
        )
        for s, m in ((128, 64), (192, 32), (192, 96))
    }
    family["transformer-xl"] = _paper(_all(num_layers, "xl"))
    # The recurrent layer costs about as much as two: the paper gives it one layer fewer.
    family["block-recurrent"] = _paper(_at(num_layers - 1, -3, "recurrent"), recurrent_states=512)
    family["memorizing"] = _paper(
        _at(num_layers, long_term_layer, "memorizing"), memory_slots=65_536
    )
    family["no-memory"] = _paper(_all(num_layers, "plain"))
    return family


PRESETS: dict[str, ModelConfig] = {
    **{f"paper-{name}": config for name, config in _paper_family(13, 8).items()},
    **{f"paper-{name}-12": config for name, config in _paper_family(12, 6).items()},
    "paper-rmt": _paper(_all(13, "rmt"), memory_tokens=128),
    "paper-autocompressor": _paper(
        _all(13, "autocompressor"), long_term_tokens=32, long_term_windows=128
    ),
    "paper-compressive": _paper(_all(13, "compressive"), compressed_slots=512, compression_rate=4),
    "laptop-melodi": _laptop(
        sandwich(6, long_term=(3,)),
        short_term_tokens=16,
        long_term_tokens=8,
        long_term_windows=64,
    ),
    "laptop-transformer-xl": _laptop(_all(6, "xl")),
    # A wider feed-forward makes up for the missing layer, so that all have about the same size.
    "laptop-block-recurrent": _laptop(_at(5, -3, "recurrent"), recurrent_states=64, ffn_width=544),
    "laptop-memorizing": _laptop(_at(6, 3, "memorizing"), memory_slots=4096),
    "laptop-no-memory": _laptop(_all(6, "plain")),
    "laptop-rmt": _laptop(_all(6, "rmt"), memory_tokens=16),
    "laptop-autocompressor": _laptop(
        _all(6, "autocompressor"), long_term_tokens=4, long_term_windows=64
    ),
    "laptop-compressive": _laptop(_all(6, "compressive"), compressed_slots=64, compression_rate=4),
    "paper-infini": _paper(_all(13, "infini")),
    "laptop-infini": _laptop(_all(6, "infini")),
    # The authors' own sizes for a window of 512; the laptop's feed-forward pays for the matrices.
    "paper-armt": _paper(_all(13, "armt"), memory_tokens=10, associative_width=64),
    "laptop-armt": _laptop(_all(6, "armt"), memory_tokens=10, associative_width=16, ffn_width=432),
}


def preset(name: str) -> ModelConfig:
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(PRESETS)}"
        raise ValueError(f"preset {name!r} is unknown: {hint}")
    return PRESETS[name]
