"""The multiply-adds that a model needs, counted by hand: the work that its speed is measured by.

- Counted are products: projections, feed-forward, attention, mixers, logits; not norms, softmax or
  sums. Attention counts only keys that are seen, averaged over the positions of a window; memory
  counts as full.
- `dense=True` counts self-attention as it is computed, hidden keys included. Then twice the count
  is what torch's FlopCounterMode finds in reading one window; only with `top_k` it finds less,
  because the best pairs are read without a product.
- Training is three times reading: each product has two more of its size in the backward pass.

Letters: D width, HE heads times head width, t queries, L long-term tokens, R states, S write
tokens, d key width, K features.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from melodi.config import ModelConfig
from melodi.config.kinds import KINDS, LayerKind

MANY = 1 << 31
"""More windows than any memory holds: it is full."""
TRAINING = 3
"""Training to reading."""


@dataclass(frozen=True)
class Operations:
    """Multiply-adds of one window and one row."""

    projections: int = 0
    feed_forward: int = 0
    attention: int = 0
    """Over the past and the window."""
    memory: int = 0
    """What the kind reads beside self-attention, and writes: long-term attention, mixers."""
    logits: int = 0

    def __add__(self, other: "Operations") -> "Operations":
        return Operations(*[a + b for a, b in zip(self.values(), other.values(), strict=True)])

    def values(self) -> list[int]:
        return list(asdict(self).values())

    @property
    def all(self) -> int:
        return sum(self.values())


def of_window(config: ModelConfig, windows_read: int = MANY, dense: bool = False) -> Operations:
    """Reading one whole window, after this many."""
    total = Operations(logits=config.window * config.width * config.vocab_size)
    for index in range(len(config.layers)):
        total += of_layer(config, index, windows_read, dense)
    return total


def per_token(config: ModelConfig) -> float:
    """Reading, with full memory."""
    return of_window(config).all / config.window


def of_layer(config: ModelConfig, index: int, windows_read: int, dense: bool) -> Operations:
    kind = config.layers[index]
    D, HE = config.width, inner(config)
    writing = config.write_tokens if index <= config.last_writing_layer else 0
    t, sources = config.window + writing, 2 if kind == "recurrent" else 1
    keys = (KINDS[kind].past(config) + config.window + writing) * t
    pairs = keys if dense else visible_pairs(config, kind, writing, windows_read)
    return Operations(
        projections=t * D * HE * (3 + sources) + past_projections(config, index, windows_read),
        feed_forward=t * 2 * D * config.ffn_width + past_feed_forward(config, index, windows_read),
        attention=2 * HE * (pairs + past_pairs(config, index, windows_read, dense)),
        memory=EXTRA[kind](config, index, t, windows_read),
    )


def inner(config: ModelConfig) -> int:
    return config.num_heads * config.head_size


def visible_pairs(c: ModelConfig, kind: LayerKind, writing: int, windows_read: int) -> int:
    """Pairs of a query and a key that it sees in self-attention, over [past; window; write]."""
    filled = KINDS[kind].filled_past(c, windows_read)
    if c.answers.empty_memory == "zeros":
        filled = KINDS[kind].past(c)
    itself = 0 if c.answers.causal_mask == "strict" else 1
    reach = KINDS[kind].reach(c)
    before = [filled + i for i in range(c.window + writing)]
    if reach is not None:
        before = [min(reach, count) for count in before]
    pairs = sum(count + itself for count in before)
    if KINDS[kind].write_sees(c) == "all":  # the later write tokens, and with "strict" itself
        pairs += writing * (writing - 1) // 2 + writing * (1 - itself)
    return pairs


def running_past(c: ModelConfig, index: int, windows_read: int) -> tuple[int, bool]:
    """Memory tokens that run through this layer before the window, and whether it is the last."""
    kind = KINDS[c.layers[index]]
    if kind.read_sees(c) is None:
        return 0, False
    return kind.filled_past(c, windows_read), index == len(c.layers) - 1


def past_projections(c: ModelConfig, index: int, windows_read: int) -> int:
    """The past of a window that opens, from vectors to pairs."""
    kind, D, HE = c.layers[index], c.width, inner(c)
    if kind in ("short", "long", "compressive"):
        return KINDS[kind].past(c) * D * 2 * HE
    tokens, is_last = running_past(c, index, windows_read)
    return tokens * D * HE * (3 if is_last else 4)


def past_feed_forward(c: ModelConfig, index: int, windows_read: int) -> int:
    tokens, is_last = running_past(c, index, windows_read)
    return 0 if is_last else tokens * 2 * c.width * c.ffn_width


def past_pairs(c: ModelConfig, index: int, windows_read: int, dense: bool) -> int:
    """Memory tokens that attend to each other."""
    tokens, is_last = running_past(c, index, windows_read)
    if is_last or not tokens:
        return 0
    kind = KINDS[c.layers[index]]
    if dense:
        return tokens * kind.past(c)
    if kind.read_sees(c) == "all":
        return tokens * tokens
    itself = 0 if c.answers.causal_mask == "strict" else 1
    return sum(i + itself for i in range(tokens))


Extra = Callable[[ModelConfig, int, int, int], int]
"""Of a config, a layer's index, the queries t and the windows read."""


def nothing(c: ModelConfig, index: int, t: int, windows_read: int) -> int:
    return 0


def mixers(c: ModelConfig, index: int, t: int, windows_read: int) -> int:
    """M_up and M_right."""
    if not c.branching or c.family != "melodi":
        return 0
    count = (index < c.last_writing_layer) + (KINDS[c.layers[index]].past(c) > 0)
    return count * (c.window + c.short_term_tokens) * c.short_term_tokens * c.width


def long_term(c: ModelConfig, index: int, t: int, windows_read: int) -> int:
    """Attention to the queue, M_long, and its tokens' keys and values."""
    D, HE, L = c.width, inner(c), c.long_term_tokens
    slots = filled(c, L * c.long_term_windows, L, windows_read)
    count = mixers(c, index, t, windows_read) + 2 * t * slots * HE
    if not c.copy_short_to_long:
        count += (c.window + c.short_term_tokens) * L * D
    projected = L if c.answers.long_term_store == "pairs" else slots
    return count + projected * D * 2 * HE


def memorizing(c: ModelConfig, index: int, t: int, windows_read: int) -> int:
    slots = filled(c, c.memory_slots, c.window, windows_read)
    if c.top_k is None or c.top_k >= slots:
        return 2 * t * slots * inner(c)
    return t * (slots + 2 * c.top_k) * inner(c)


def filled(c: ModelConfig, slots: int, per_window: int, windows_read: int) -> int:
    """Slots of a queue that are read."""
    return slots if c.answers.empty_memory == "zeros" else min(slots, per_window * windows_read)


def recurrent(c: ModelConfig, index: int, t: int, windows_read: int) -> int:
    """Tokens read the states; the states read themselves, the cache and the window."""
    D, HE, R = c.width, inner(c), c.recurrent_states
    read = t * D * HE + R * D * 2 * HE + 2 * t * R * HE
    return read + R * D * 4 * HE + 2 * R * (R + 2 * c.window) * HE + R * 2 * HE * D


def infini(c: ModelConfig, index: int, t: int, windows_read: int) -> int:
    read = inner(c) * (c.head_size + 1)
    again = read if c.infini_update == "delta" else 0
    return t * read + c.window * (inner(c) * c.head_size + again)


def armt(c: ModelConfig, index: int, t: int, windows_read: int) -> int:
    D, d, S = c.width, c.associative_width, c.memory_tokens
    K = 6 * d
    read = t * (D * d + K * (D + 1))
    return read + S * (D * d + D * D + D) + S * (K * (D + 1) + K * D + K)


def compressive(c: ModelConfig, index: int, t: int, windows_read: int) -> int:
    """The convolution; the mean is no product. Its own loss, in training only, is not counted."""
    return c.window * c.width * c.width if c.compressor == "convolution" else 0


EXTRA: dict[LayerKind, Extra] = {
    "short": mixers,
    "long": long_term,
    "long-only": long_term,
    "plain": mixers,
    "xl": nothing,
    "recurrent": recurrent,
    "memorizing": memorizing,
    "rmt": nothing,
    "autocompressor": nothing,
    "compressive": compressive,
    "infini": infini,
    "armt": armt,
}


def weights_read(config: ModelConfig) -> int:
    D, HE = config.width, inner(config)
    total = config.vocab_size * D
    for kind in config.layers:
        total += D * HE * (5 if kind == "recurrent" else 4) + 2 * D * config.ffn_width
    return total


def memory_read(config: ModelConfig) -> float:
    """Pairs of the window and its past, and what else a kind reads."""
    total = 0.0
    for kind in config.layers:
        total += 2 * inner(config) * visible_pairs(config, kind, 0, MANY) / config.window
        total += MEMORY_READ.get(kind, lambda c: 0)(config)
    return total


MEMORY_READ: dict[LayerKind, Callable[[ModelConfig], int]] = {
    "long": lambda c: 2 * inner(c) * c.long_term_tokens * c.long_term_windows,
    "long-only": lambda c: 2 * inner(c) * c.long_term_tokens * c.long_term_windows,
    "memorizing": lambda c: 2 * inner(c) * c.memory_slots,
    "recurrent": lambda c: c.width * inner(c) + 2 * inner(c) * c.recurrent_states,
    "infini": lambda c: inner(c) * (c.head_size + 1),
    "armt": lambda c: c.width * c.associative_width + 6 * c.associative_width * (c.width + 1),
}
