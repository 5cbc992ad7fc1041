"""What `melodi bench` measures: sizes of models, and plans of how much to measure. No torch.

Every model of a size has the same width, depth, vocabulary and window, and gets the same tokens.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from melodi.config import PRESETS, ModelConfig

REFERENCE = "melodi"
"""The kind that all others are compared with."""


@dataclass(frozen=True)
class Size:
    """Models of every kind, and the segment that they train on."""

    models: dict[str, ModelConfig]
    rows: int
    segment_windows: int
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of all products; memory is in float32."""

    @property
    def reference(self) -> ModelConfig:
        return self.models[REFERENCE]

    @property
    def segment(self) -> int:
        """Tokens of a row in one training step."""
        return self.segment_windows * self.reference.window


@dataclass(frozen=True)
class Plan:
    """How much is measured. Parts get seconds, not repetitions: a slow machine measures less."""

    kinds: tuple[str, ...]
    """Kinds of ours; all when empty. All alternatives are beside them."""
    speed_seconds: float
    """For training, reading and generation, all kinds and alternatives in turn."""
    length_seconds: float
    """For whole documents, each length."""
    growth_seconds: float
    """For reading ahead to the last position of the growth."""
    lengths: tuple[int, ...]
    """Documents, in tokens, that are read whole."""
    positions: tuple[int, ...]
    """Places of one long document at which the cost of reading on is compared."""
    memory_lengths: tuple[int, ...]
    """Documents, in tokens, that are trained on, for peak memory."""
    peak_seconds: float
    """For peak memory, each in a process of its own; what does not fit is left out."""
    context: int
    """Tokens that full attention has before it when it generates."""
    buffer_mb: int = 256
    """What the bandwidth is measured on: more than any cache."""
    models: tuple[str, ...] = ()
    """These of ours and of the alternatives, beside the reference, instead of all."""


def scaled(presets: str, **changes: Any) -> dict[str, ModelConfig]:
    """The presets of a prefix at other sizes; a field that a preset does not use stays zero."""
    models = {}
    for name, config in PRESETS.items():
        if not name.startswith(presets):
            continue
        used = {key: value for key, value in changes.items() if getattr(config, key)}
        models[name.removeprefix(presets)] = replace(config, **used)
    return models


def deeper(models: dict[str, ModelConfig], depth: int, index: int) -> dict[str, ModelConfig]:
    """Stacks of another depth: the kind that most layers have, with the single other at `index`."""
    changed = {}
    for name, config in models.items():
        most = max(config.layers, key=config.layers.count)
        layers = [most] * (depth - (len(config.layers) < len(models[REFERENCE].layers)))
        for kind in set(config.layers) - {most}:
            layers[index] = kind
        changed[name] = replace(config, layers=tuple(layers))
    return changed


_SMALL = scaled(
    "laptop-",
    **dict(vocab_size=4096, width=256, num_heads=4, ffn_width=1024, window=128),
    **dict(short_term_tokens=32, long_term_tokens=16, long_term_windows=128),
    **dict(recurrent_states=128, memory_slots=16_384, memory_tokens=32, compressed_slots=128),
)
_MID = deeper(
    scaled(
        "laptop-",
        **dict(vocab_size=32_000, width=512, num_heads=8, ffn_width=2048, window=512),
        **dict(short_term_tokens=128, long_term_tokens=64, long_term_windows=128),
        **dict(recurrent_states=512, memory_slots=65_536, memory_tokens=128),
        **dict(compressed_slots=512, associative_width=64),
    ),
    depth=13,
    index=8,
)

for _models, _windows in ((_SMALL, 16), (_MID, 8)):
    # Every layer attends to all slots and keeps its scores: a queue like Melodi's is tens of GB.
    _models["autocompressor"] = replace(_models["autocompressor"], long_term_windows=_windows)

SIZES = {
    "laptop": Size(scaled("laptop-"), rows=4, segment_windows=8),
    "small": Size(_SMALL, rows=8, segment_windows=8),
    "mid": Size(_MID, rows=1, segment_windows=8),
}
PLANS = {
    "quick": Plan(
        kinds=("melodi", "transformer-xl", "memorizing", "no-memory"),
        speed_seconds=36,
        length_seconds=6,
        growth_seconds=8,
        peak_seconds=45,
        lengths=(4096, 16_384),
        positions=(4096, 16_384, 65_536),
        memory_lengths=(2048, 8192),
        context=32_768,
    ),
    "full": Plan(
        kinds=(),
        speed_seconds=420,
        length_seconds=150,
        growth_seconds=600,
        peak_seconds=600,
        lengths=(4096, 16_384, 32_768, 65_536),
        positions=(16_384, 65_536, 262_144, 1_048_576),
        memory_lengths=(1024, 4096, 16_384, 65_536),
        context=32_768,
    ),
}
