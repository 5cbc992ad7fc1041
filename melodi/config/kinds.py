"""The layer kinds, one row each: what a memory system is, as far as it can be said without torch.

To add a memory system, add a row here and the file in melodi/layers that its `layer` names: the
model, its memory, training and decoding know a kind by its row alone. A row says which config
fields the kind needs, what it carries, and who sees what in its self-attention, whose keys are
[past; window; write tokens]. CONTRIBUTING.md says where else a kind has a name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from melodi.config.model import ModelConfig

LayerKind = Literal[
    "short",
    "long",
    "long-only",
    "plain",
    "xl",
    "recurrent",
    "memorizing",
    "rmt",
    "autocompressor",
    "compressive",
    "infini",
    "armt",
]
Sees = Literal["causal", "all", "none"]
Config: TypeAlias = "ModelConfig"


def nothing(c: Config) -> int:
    return 0


@dataclass(frozen=True)
class Kind:
    """One row. c is the model's config, n a number of windows that a row has read."""

    layer: str
    """Module and class, below melodi.layers."""
    family: str
    """Kinds of one family share a stack; those of the family "any" go with every other."""
    needs: tuple[str, ...] = ()
    """Config fields that must be at least 1."""
    choices: tuple[str, ...] = ()
    """Config fields that this kind alone reads, beside those: elsewhere they have no effect."""
    check: Callable[[Config], Any] = nothing
    """Refuses what else cannot be built."""
    floats: Callable[[Config], tuple[int, int]] = lambda c: (0, 0)
    """Short-term and long-term capacity of one layer, in floats per document."""
    stack_floats: Callable[[Config], tuple[int, int]] = lambda c: (0, 0)
    """The same of a memory that the whole stack has in common, kept in its first layer."""
    past: Callable[[Config], int] = nothing
    """Slots of earlier windows that precede the window in self-attention."""
    filled: Callable[[Config, int], int] | None = None
    """How many of these slots, the newest, hold something after n windows; all after the first
    window when not given."""
    reach: Callable[[Config], int | None] = lambda c: None
    """The furthest that a token sees; None: all that is there."""
    write_tokens: Callable[[Config], int] = nothing
    """Tokens that run behind a full window and compress it: the paper's summary tokens."""
    write_sees: Callable[[Config], Sees] = lambda c: "causal"
    """Which of each other these tokens see, beside all that precedes them."""
    table: str = "summary"
    """The name of the learned tokens that they start from."""
    read_sees: Callable[[Config], Sees | None] = lambda c: None
    """Where the past is made of tokens that run through the whole stack: what they see of each
    other."""
    biased: Callable[[Config], bool] = lambda c: True
    """Whether self-attention has a relative position bias."""

    def filled_past(self, c: Config, n: int) -> int:
        if self.filled is not None:
            return self.filled(c, n)
        return self.past(c) if n > 0 else 0


def pair(c: Config) -> int:
    """Floats of one key-value pair."""
    return 2 * c.num_heads * c.head_size


def short_term(c: Config) -> int:
    return c.short_term_tokens * c.width


def long_term(c: Config) -> int:
    entry = pair(c) if c.answers.long_term_store == "pairs" else c.width
    return c.long_term_tokens * c.long_term_windows * entry


def cache(c: Config) -> int:
    return c.window * pair(c)


def check_melodi(c: Config) -> None:
    if c.short_term_tokens < 1:
        raise ValueError(
            f"short_term_tokens={c.short_term_tokens} leaves Melodi without summary tokens: "
            "give at least 1"
        )
    check_compression(c, "short_term_tokens")


def check_long_term(c: Config) -> None:
    check_melodi(c)
    for name in ("long_term_tokens", "long_term_windows"):
        if getattr(c, name) < 1:
            raise ValueError(
                f"{name}={getattr(c, name)} leaves the long-term layer without memory: "
                "give at least 1, or make the layer 'short'"
            )
    check_compression(c, "long_term_tokens")
    if c.copy_short_to_long and c.short_term_tokens != c.long_term_tokens:
        raise ValueError(
            f"copy_short_to_long needs as many short-term as long-term tokens, not "
            f"{c.short_term_tokens} and {c.long_term_tokens}: set both to the same number"
        )


def check_long_only(c: Config) -> None:
    check_long_term(c)
    if c.copy_short_to_long:
        raise ValueError(
            "copy_short_to_long cannot copy in a 'long-only' layer, which has no short-term "
            "memory: make the layer 'long'"
        )


def check_compression(c: Config, name: str) -> None:
    if getattr(c, name) > c.window:
        raise ValueError(
            f"{name}={getattr(c, name)} exceeds window={c.window}: a window cannot be "
            f"compressed into more tokens than it has; lower it to {c.window} or less"
        )


def check_memorizing(c: Config) -> None:
    if c.top_k is not None and not 1 <= c.top_k <= c.memory_slots:
        raise ValueError(
            f"top_k={c.top_k} must be from 1 to memory_slots={c.memory_slots}, or None for all"
        )


def check_autocompressor(c: Config) -> None:
    check_compression(c, "long_term_tokens")
    check_whole_stack(c)


def check_whole_stack(c: Config) -> None:
    other = next((kind for kind in c.layers if KINDS[kind].family != c.family), None)
    if other is not None:
        raise ValueError(
            f"layers mix {c.family!r} with {other!r}: its memory tokens run through every layer; "
            f"make all layers {c.family!r}"
        )


def check_compressive(c: Config) -> None:
    if c.window % c.compression_rate:
        raise ValueError(
            f"compression_rate={c.compression_rate} does not divide window={c.window}: "
            "choose a divisor of the window"
        )


def filled_compressive(c: Config, n: int) -> int:
    """The window before, and what those before it were compressed into."""
    if n == 0:
        return 0
    return c.window + min((n - 1) * (c.window // c.compression_rate), c.compressed_slots)


KINDS: dict[LayerKind, Kind] = {
    "short": Kind(
        layer="melodi.ShortTermLayer",
        family="melodi",
        check=check_melodi,
        floats=lambda c: (short_term(c), 0),
        past=lambda c: c.short_term_tokens,
        write_tokens=lambda c: c.short_term_tokens,
    ),
    "long": Kind(
        layer="melodi.LongTermLayer",
        family="melodi",
        check=check_long_term,
        floats=lambda c: (short_term(c), long_term(c)),
        past=lambda c: c.short_term_tokens,
        write_tokens=lambda c: c.short_term_tokens,
    ),
    "long-only": Kind(
        layer="melodi.LongTermLayer",
        family="melodi",
        check=check_long_only,
        floats=lambda c: (0, long_term(c)),
        write_tokens=lambda c: c.short_term_tokens,
    ),
    "plain": Kind(layer="melodi.ShortTermLayer", family="any"),
    "xl": Kind(
        layer="transformer_xl.XLLayer",
        family="xl",
        floats=lambda c: (cache(c), 0),
        past=lambda c: c.window,
        reach=lambda c: c.window,
    ),
    "recurrent": Kind(
        layer="block_recurrent.RecurrentLayer",
        family="xl",
        needs=("recurrent_states",),
        floats=lambda c: (cache(c) + c.recurrent_states * c.width, 0),
        past=lambda c: c.window,
        reach=lambda c: c.window,
    ),
    "memorizing": Kind(
        layer="memorizing.MemorizingLayer",
        family="xl",
        needs=("memory_slots",),
        choices=("top_k",),
        check=check_memorizing,
        floats=lambda c: (cache(c), c.memory_slots * pair(c)),
        past=lambda c: c.window,
        reach=lambda c: c.window,
        biased=lambda c: c.answers.memorizing_bias,
    ),
    "rmt": Kind(
        layer="rmt.RMTLayer",
        family="rmt",
        needs=("memory_tokens",),
        choices=("memory_mask",),
        check=check_whole_stack,
        stack_floats=lambda c: (c.memory_tokens * c.width, 0),
        past=lambda c: c.memory_tokens,
        filled=lambda c, n: c.memory_tokens,
        write_tokens=lambda c: c.memory_tokens,
        write_sees=lambda c: "all" if c.memory_mask == "blocks" else "causal",
        table="memory",
        read_sees=lambda c: "all" if c.memory_mask == "blocks" else "causal",
    ),
    "autocompressor": Kind(
        layer="autocompressor.AutoCompressorLayer",
        family="autocompressor",
        needs=("long_term_tokens", "long_term_windows"),
        check=check_autocompressor,
        stack_floats=lambda c: (0, c.long_term_tokens * c.long_term_windows * c.width),
        past=lambda c: c.long_term_tokens * c.long_term_windows,
        filled=lambda c, n: c.long_term_tokens * min(n, c.long_term_windows),
        write_tokens=lambda c: c.long_term_tokens,
        read_sees=lambda c: "causal",
    ),
    "compressive": Kind(
        layer="compressive.CompressiveLayer",
        family="xl",
        needs=("compressed_slots", "compression_rate"),
        choices=("compressor",),
        check=check_compressive,
        floats=lambda c: (c.window * c.width, c.compressed_slots * c.width),
        past=lambda c: c.compressed_slots + c.window,
        filled=filled_compressive,
    ),
    "infini": Kind(
        layer="infini.InfiniLayer",
        family="xl",
        choices=("infini_update",),
        floats=lambda c: (0, c.num_heads * c.head_size * (c.head_size + 1)),
    ),
    "armt": Kind(
        layer="armt.ARMTLayer",
        family="armt",
        needs=("memory_tokens", "associative_width"),
        # DPFP-3 makes six features of each entry of a key.
        floats=lambda c: (0, 6 * c.associative_width * (c.width + 1)),
        write_tokens=lambda c: c.memory_tokens,
        table="memory",
    ),
}
