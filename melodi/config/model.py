"""What a model is, as data: its sizes and its layer kinds.

- A model is a tuple of layer kinds: the sandwich of Fig. 1 is `sandwich(13, long_term=(8,))`.
- An ablation is a config value.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from melodi.config.dialects import Dialect, check_keys, parse_dialect

MELODI_KINDS = ("short", "long", "long-only")
BASELINE_KINDS = ("xl", "recurrent", "memorizing")
KINDS = (*MELODI_KINDS, "plain", *BASELINE_KINDS)


@dataclass(frozen=True)
class ModelConfig:
    """The architecture. The letters in brackets are the paper's, used in shape suffixes."""

    vocab_size: int
    """Number of token ids [V]."""
    width: int
    """Width of a token vector [D]."""
    num_heads: int
    """Attention heads [H]."""
    head_width: int | None = None
    """Width of a head [E]; width / num_heads when not given."""
    ffn_width: int = 0
    """Hidden width of the feed-forward; 4 · width when 0."""
    window: int = 512
    """Tokens in a context window [W]."""
    short_term_tokens: int = 0
    """Short-term memory tokens per layer, and as many summary tokens [S = U]."""
    long_term_tokens: int = 0
    """Long-term memory tokens per window [L]."""
    long_term_windows: int = 0
    """Windows that the long-term queue holds [Q]."""
    layers: tuple[str, ...] = ()
    """One kind per layer: short, long, long-only, plain, xl, recurrent, memorizing."""
    dialect: str = "default"
    """default, paper or meliad; single answers can be changed: "default,activation=gelu"."""
    branching: bool = True
    """Separate mixers for the next layer and the next window (Table 4)."""
    copy_short_to_long: bool = False
    """Store the short-term tokens as long-term tokens (Table 7)."""
    recurrent_states: int = 0
    """State vectors of the Block-Recurrent layer [R]."""
    memory_slots: int = 0
    """Key-value pairs, in tokens, that the Memorizing layer holds."""
    top_k: int | None = None
    """Memorizing reads only the k best pairs per head and query; all of them when not given."""
    dropout: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.ffn_width:
            object.__setattr__(self, "ffn_width", 4 * self.width)
        _check(self)

    @property
    def rules(self) -> Dialect:
        return parse_dialect(self.dialect)

    @property
    def head_size(self) -> int:
        return self.head_width or self.width // self.num_heads

    @property
    def has_summary(self) -> bool:
        """Summary tokens run through the stack iff some layer compresses windows into memory."""
        return any(kind in MELODI_KINDS for kind in self.layers)

    @property
    def last_summary_layer(self) -> int:
        """The last layer that needs summary tokens: it has no M_up, and none run above it."""
        return max((i for i, k in enumerate(self.layers) if k in MELODI_KINDS), default=-1)

    @property
    def past_slots(self) -> int:
        """Slots of earlier windows before the window's own in a layer's self-attention."""
        if self.has_summary:
            return self.short_term_tokens
        return self.window if any(kind in BASELINE_KINDS for kind in self.layers) else 0

    def memory_floats(self) -> tuple[int, int]:
        """Short-term and long-term capacity, in floats per document (the paper's Memory column)."""
        count = {kind: self.layers.count(kind) for kind in KINDS}
        pair = 2 * self.num_heads * self.head_size
        entry = pair if self.rules.long_term_store == "pairs" else self.width
        short = (count["short"] + count["long"]) * self.short_term_tokens * self.width
        short += sum(count[kind] for kind in BASELINE_KINDS) * self.window * pair
        short += count["recurrent"] * self.recurrent_states * self.width
        long = (count["long"] + count["long-only"]) * self.long_term_tokens * self.long_term_windows
        return short, long * entry + count["memorizing"] * self.memory_slots * pair

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        check_keys(cls, values)
        return cls(**values)

    def digest(self) -> str:
        """Equal for two configs iff a memory of one makes sense to the other."""
        values = replace(self, dropout=0.0, head_width=self.head_size).to_dict()
        values["dialect"] = dataclasses.asdict(self.rules)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _check(c: ModelConfig) -> None:
    """Refuses what cannot be built, with the value and the cure."""
    for name in ("vocab_size", "width", "num_heads", "ffn_width", "window"):
        if getattr(c, name) < 1:
            raise ValueError(f"{name}={getattr(c, name)} must be at least 1")
    if c.head_width is None and c.width % c.num_heads:
        raise ValueError(
            f"num_heads={c.num_heads} does not divide width={c.width}: "
            "choose a divisor of the width, or give head_width"
        )
    if c.head_width is not None and c.head_width < 1:
        raise ValueError(f"head_width={c.head_width} must be at least 1, or None")
    parse_dialect(c.dialect)
    if not 0 <= c.dropout < 1:
        raise ValueError(f"dropout={c.dropout} must be at least 0 and below 1")
    _check_layers(c)
    if c.has_summary:
        _check_melodi(c)
    _check_baselines(c)


def _check_layers(c: ModelConfig) -> None:
    if not c.layers:
        raise ValueError("layers=() is empty: name one kind per layer, e.g. ('short', 'long')")
    for kind in c.layers:
        if kind not in KINDS:
            raise ValueError(f"layer kind {kind!r} is unknown: choose one of {', '.join(KINDS)}")
    others = [kind for kind in c.layers if kind in BASELINE_KINDS]
    if c.has_summary and others:
        raise ValueError(
            f"layers mix Melodi with {others[0]!r}: only 'plain' layers go with either family"
        )


def _check_melodi(c: ModelConfig) -> None:
    if c.short_term_tokens < 1:
        raise ValueError(
            f"short_term_tokens={c.short_term_tokens} leaves Melodi without summary tokens: "
            "give at least 1"
        )
    has_long = "long" in c.layers or "long-only" in c.layers
    for name in ("short_term_tokens", "long_term_tokens"):
        if getattr(c, name) > c.window and (has_long or name == "short_term_tokens"):
            raise ValueError(
                f"{name}={getattr(c, name)} exceeds window={c.window}: a window cannot be "
                f"compressed into more tokens than it has; lower it to {c.window} or less"
            )
    for name in ("long_term_tokens", "long_term_windows"):
        if has_long and getattr(c, name) < 1:
            raise ValueError(
                f"{name}={getattr(c, name)} leaves the long-term layer without memory: "
                "give at least 1, or make the layer 'short'"
            )
    if c.copy_short_to_long and has_long:
        if c.short_term_tokens != c.long_term_tokens:
            raise ValueError(
                f"copy_short_to_long needs as many short-term as long-term tokens, not "
                f"{c.short_term_tokens} and {c.long_term_tokens}: set both to the same number"
            )
        if "long-only" in c.layers:
            raise ValueError(
                "copy_short_to_long cannot copy in a 'long-only' layer, which has no short-term "
                "memory: make the layer 'long'"
            )


def _check_baselines(c: ModelConfig) -> None:
    for kind, name in (("recurrent", "recurrent_states"), ("memorizing", "memory_slots")):
        if kind in c.layers and getattr(c, name) < 1:
            raise ValueError(f"{name}={getattr(c, name)}: a {kind!r} layer needs at least 1")
    if c.top_k is not None and "memorizing" not in c.layers:
        raise ValueError(f"top_k={c.top_k} without effect: there is no 'memorizing' layer")
    if c.top_k is not None and not 1 <= c.top_k <= c.memory_slots:
        raise ValueError(
            f"top_k={c.top_k} must be from 1 to memory_slots={c.memory_slots}, or None for all"
        )
