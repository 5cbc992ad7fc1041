"""What a model is, as data: its sizes and its layer kinds.

- A model is a tuple of layer kinds: the sandwich of Fig. 1 is `sandwich(13, long_term=(8,))`.
- An ablation is a config value.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any, Literal

from melodi.config.checks import check_types, from_dict
from melodi.config.dialects import STARTS, Dialect, parse_dialect
from melodi.config.kinds import KINDS, LayerKind


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
    layers: tuple[LayerKind, ...] = ()
    """One kind per layer."""
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
    memory_tokens: int = 0
    """Memory tokens of RMT, and write tokens of ARMT [R]."""
    memory_mask: Literal["blocks", "causal"] = "blocks"
    """RMT's memory tokens see each other whole, as in its paper, or only the earlier ones."""
    compressed_slots: int = 0
    """Compressed vectors that a layer of the Compressive Transformer holds [C]."""
    compression_rate: int = 0
    """Neighbouring vectors that the Compressive Transformer makes into one [c]."""
    compressor: Literal["mean", "convolution"] = "mean"
    """How it makes them into one; the convolution is learned, by a loss of its own."""
    infini_update: Literal["linear", "delta"] = "linear"
    """How Infini-attention writes: linear adds the values of a window, delta what they differ by
    from the values that are already stored under their keys."""
    associative_width: int = 0
    """Width of ARMT's keys, from which its features are made [d_mem]."""
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.layers, list):  # as in a file
            object.__setattr__(self, "layers", tuple(self.layers))
        check_types(self)
        if not self.ffn_width:
            object.__setattr__(self, "ffn_width", 4 * self.width)
        _check(self)

    @property
    def answers(self) -> Dialect:
        """The dialect, resolved."""
        return parse_dialect(self.dialect)

    @property
    def head_size(self) -> int:
        return self.head_width or self.width // self.num_heads

    @property
    def family(self) -> str:
        """What the layers have in common; "any" if none of them remembers."""
        families = [KINDS[kind].family for kind in self.layers]
        return next((family for family in families if family != "any"), "any")

    @property
    def write_tokens(self) -> int:
        """Tokens that run behind a full window to compress it; in Melodi the summary tokens."""
        return max(KINDS[kind].write_tokens(self) for kind in self.layers)

    @property
    def last_writing_layer(self) -> int:
        """The last layer that needs write tokens: none run above it. -1 if none does."""
        writing = [i for i, kind in enumerate(self.layers) if KINDS[kind].write_tokens(self)]
        return writing[-1] if writing else -1

    @property
    def table(self) -> str | None:
        """The name of the learned tokens that write tokens start from, if there are any."""
        return KINDS[self.layers[self.last_writing_layer]].table if self.write_tokens else None

    def memory_floats(self) -> tuple[int, int]:
        """Short-term and long-term capacity, in floats per document (the paper's Memory column)."""
        floats = [KINDS[kind].floats(self) for kind in self.layers]
        floats.append(KINDS[self.layers[0]].stack_floats(self))
        return sum(short for short, _ in floats), sum(long for _, long in floats)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        return from_dict(cls, values)

    def digest(self) -> str:
        """Equal for two configs iff a memory of one makes sense to the other."""
        config = replace(self, dropout=0.0, head_width=self.head_size)
        # A field at its default is left out, so that a later version may add fields.
        values: dict[str, Any] = {
            field.name: getattr(config, field.name)
            for field in dataclasses.fields(config)
            if getattr(config, field.name) != field.default
        }
        values["dialect"] = dataclasses.asdict(self.answers)
        for start in STARTS:
            del values["dialect"][start]
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
    for kind, row in KINDS.items():
        for name in row.choices:
            value = getattr(c, name)
            if kind not in c.layers and value != getattr(type(c), name):
                raise ValueError(f"{name}={value!r} without effect: there is no {kind!r} layer")


def _check_layers(c: ModelConfig) -> None:
    if not c.layers:
        raise ValueError("layers=() is empty: name one kind per layer, e.g. ('short', 'long')")
    for kind in c.layers:
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"layer kind {kind!r} is unknown: choose one of {', '.join(KINDS)}")
    for kind in c.layers:
        if KINDS[kind].family not in (c.family, "any"):
            raise ValueError(
                f"layers mix {c.family!r} with {kind!r}: only kinds of one family, and "
                "'plain', share a stack"
            )
    for kind in dict.fromkeys(c.layers):
        for name in KINDS[kind].needs:
            if getattr(c, name) < 1:
                raise ValueError(f"{name}={getattr(c, name)}: a {kind!r} layer needs at least 1")
        KINDS[kind].check(c)
