"""What a model is, as data: sizes, layer kinds, dialects, presets.

- A model is a tuple of layer kinds: the sandwich of Fig. 1 is `sandwich(13, long_term=(8,))`.
- An ablation is a config value, and a dialect is a record of values: one answer to each question on
  which the paper and the official code (google-research/meliad) disagree.
- `PRESETS` holds the paper's sizes (Sec. 3.2, Tables 3 and 5) and laptop sizes of the same shape.
"""

import dataclasses
import difflib
import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

MELODI_KINDS = ("short", "long", "long-only")
BASELINE_KINDS = ("xl", "recurrent", "memorizing")
KINDS = (*MELODI_KINDS, "plain", *BASELINE_KINDS)


@dataclass(frozen=True)
class Dialect:
    """One answer to each question on which the paper and the official code disagree."""

    mixer: Literal["matrix", "residual"]
    """matrix: the bare linear map. residual: normalised inputs, a bias, and the summary added."""
    gate: Literal["head", "channel"]
    """head: σ(g) per head, on long-term. channel: σ(g) per head and channel, on self-attention."""
    long_term_store: Literal["pairs", "tokens"]
    """pairs: key-value pairs. tokens: projected anew, with the current weights, in every window."""
    empty_memory: Literal["masked", "zeros"]
    """masked: never attended to. zeros: attended to as zero keys and values."""
    causal_mask: Literal["inclusive", "strict"]
    """strict: a token does not attend to itself."""
    attention: Literal["scaled", "normalised", "normalised-root"]
    """scaled: q·k/√E. normalised: unit q and k times a learned scale per head that also multiplies
    the position bias and starts at 1; normalised-root: the same, starting at √E."""
    activation: Literal["relu", "relu2", "gelu"]
    ffn_bias: bool
    """Biases in the feed-forward of Melodi; the baselines never have them."""
    embedding: Literal["unit", "root"]
    """unit: N(0, 1), logits divided by √D. root: the same function stored divided by √D."""
    memorizing_bias: bool
    """Relative position bias in the Memorizing layer's local attention."""


DIALECTS = {
    "paper": Dialect(
        mixer="matrix",
        gate="head",
        long_term_store="pairs",
        empty_memory="masked",
        causal_mask="inclusive",
        attention="scaled",
        activation="relu",
        ffn_bias=False,
        embedding="unit",
        memorizing_bias=True,
    ),
    "meliad": Dialect(
        mixer="residual",
        gate="channel",
        long_term_store="tokens",
        empty_memory="zeros",
        causal_mask="strict",
        attention="normalised",
        activation="relu",
        ffn_bias=True,
        embedding="unit",
        memorizing_bias=False,
    ),
}
DIALECTS["default"] = replace(
    DIALECTS["paper"], mixer="residual", attention="normalised-root", embedding="root"
)


@functools.cache
def parse_dialect(text: str) -> Dialect:
    """The named dialect, with the single answers that follow the name: "default,gate=channel"."""
    name, *changes = text.split(",")
    if name not in DIALECTS:
        raise ValueError(f"dialect={name!r} is unknown: choose one of {', '.join(DIALECTS)}")
    answers = dict(change.partition("=")[::2] for change in changes)
    _check_keys(Dialect, answers)
    for key, answer in answers.items():
        known = get_args(Dialect.__annotations__[key]) or ("true", "false")
        if answer not in known:
            raise ValueError(f"dialect has {key}={answer!r}: choose one of {', '.join(known)}")
    values: Any = {k: v == "true" if v in ("true", "false") else v for k, v in answers.items()}
    return replace(DIALECTS[name], **values)


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
        _check_keys(cls, values)
        return cls(**values)

    def digest(self) -> str:
        """Equal for two configs iff a memory of one makes sense to the other."""
        values = replace(self, dropout=0.0, head_width=self.head_size).to_dict()
        values["dialect"] = dataclasses.asdict(self.rules)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def sandwich(
    num_layers: int, long_term: Sequence[int] = (), short_term: Sequence[int] | None = None
) -> tuple[str, ...]:
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
    names = {
        (True, True): "long",
        (True, False): "long-only",
        (False, True): "short",
        (False, False): "plain",
    }
    return tuple(names[i in long_term, i in short_term] for i in range(num_layers))


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


def _check_keys(cls: type, values: dict[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(cls)]
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            hint = f": did you mean {near[0]!r}?" if near else f": known are {', '.join(names)}"
            raise ValueError(f"{cls.__name__} has no field {key!r}{hint}")


def _paper(layers: tuple[str, ...], **changes: Any) -> ModelConfig:
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


def _laptop(layers: tuple[str, ...], **changes: Any) -> ModelConfig:
    """The paper's shape at a size that learns in minutes on two cores."""
    sizes: dict[str, Any] = dict(vocab_size=2048, width=128, num_heads=4, ffn_width=512, window=64)
    return ModelConfig(layers=layers, **{**sizes, **changes})


def _at(num_layers: int, index: int, kind: str) -> tuple[str, ...]:
    """A Transformer-XL stack with one layer of another kind."""
    layers = ["xl"] * num_layers
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
    family["transformer-xl"] = _paper(("xl",) * num_layers)
    # The recurrent layer costs about as much as two: the paper gives it one layer fewer.
    family["block-recurrent"] = _paper(_at(num_layers - 1, -3, "recurrent"), recurrent_states=512)
    family["memorizing"] = _paper(
        _at(num_layers, long_term_layer, "memorizing"), memory_slots=65_536
    )
    family["no-memory"] = _paper(("plain",) * num_layers)
    return family


PRESETS: dict[str, ModelConfig] = {
    **{f"paper-{name}": config for name, config in _paper_family(13, 8).items()},
    **{f"paper-{name}-12": config for name, config in _paper_family(12, 6).items()},
    "laptop-melodi": _laptop(
        sandwich(6, long_term=(3,)),
        short_term_tokens=16,
        long_term_tokens=8,
        long_term_windows=64,
    ),
    "laptop-transformer-xl": _laptop(("xl",) * 6),
    # A wider feed-forward makes up for the missing layer, so that all have about the same size.
    "laptop-block-recurrent": _laptop(_at(5, -3, "recurrent"), recurrent_states=64, ffn_width=544),
    "laptop-memorizing": _laptop(_at(6, 3, "memorizing"), memory_slots=4096),
    "laptop-no-memory": _laptop(("plain",) * 6),
}


def preset(name: str) -> ModelConfig:
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(PRESETS)}"
        raise ValueError(f"preset {name!r} is unknown: {hint}")
    return PRESETS[name]
