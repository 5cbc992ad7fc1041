"""The paper's models at another size.

A `Scale` says how large the paper's window, stack and
queue are here, and makes configs with the same ratios: S/W, L/W, and memory between systems. What
the paper's numbers become:

- tokens of a window (S, L, R, the window itself) shrink with the window, 512 to `window`, to one
  at least;
- the queue of 128 windows becomes `queue` windows, and Memorizing's 65,536 slots as many windows;
- 13 layers become `layers`; where layers are what is counted, the stack keeps `counted_layers`;
- rows whose parameters would differ by more than 1 % from Transformer-XL's get another feed-forward
  (`fitted`); at the paper's own scale they stay as the paper has them.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from melodi.config import ModelConfig, sandwich
from melodi.config.kinds import LayerKind
from melodi.config.training import TrainConfig, recipe
from melodi.paper.costs import cost
from melodi.paper.shapes import DEPTH, QUEUE, SEGMENT, WINDOW, Shape, System

TOLERANCE = 0.01
"""Parameters that differ by a larger share are made equal."""


@dataclass(frozen=True)
class Scale:
    """How large the paper's models are here, and how long they are trained."""

    name: str
    width: int
    num_heads: int
    layers: int
    counted_layers: int
    window: int
    queue: int
    rows: int
    """Documents that a step reads."""
    documents: int
    """Documents under way: where a step reads fewer, sets of rows take turns."""
    segment_windows: int
    """Windows of a segment, at the scale's own window."""
    tokens: int
    """Training tokens of a run."""
    ablation_tokens: int
    """The same of the ablations, which the paper trains for 200k of 500k steps."""
    vocab_size: int
    """Where no store says it."""
    dropout: float = 0.0
    equal: bool = True
    """Whether parameters are made equal."""
    training: Literal["laptop", "paper"] = "laptop"
    """Whose recipe of training."""
    precision: Literal["fp32", "bf16"] = "fp32"

    def config(
        self, shape: Shape, vocab_size: int | None = None, equal: bool | None = None
    ) -> ModelConfig:
        """The model of a row."""
        vocab_size = vocab_size or self.vocab_size
        config = SYSTEMS[shape.system](self, shape, self._common(vocab_size, shape))
        if not (self.equal if equal is None else equal):
            return config
        return fitted(config, reference_parameters(self, vocab_size, shape.depth, shape.counted))

    def train(self, shape: Shape, tokens: int, seed: int) -> TrainConfig:
        """The training of a row: as many tokens as for every other, whatever its segment. Where
        windows are so long that a segment would hold one alone, and nothing would be learned about
        memory, it holds two: of fewer rows, or, as in the paper, of as many."""
        length, window = self.segment_windows * self.window, self.row_window(shape)
        windows = max(length // window, 2)
        rows = self.rows
        if self.training != "paper":
            rows = max(rows * length // (windows * window), 1)
        step = rows * windows * window
        return replace(
            recipe(f"{self.training}-{shape.system}"),
            steps=max(round(tokens / step), 1),
            seed=seed,
            rows=rows,
            turns=max(self.documents // rows, 1),
            segment_windows=windows,
            precision=self.precision,
        )

    def row_window(self, shape: Shape) -> int:
        return self._share(shape.window, self.window)

    def stack(self, shape: Shape) -> int:
        """Layers of a row: one fewer here for each that it has fewer in the paper."""
        return (self.counted_layers if shape.counted else self.layers) + shape.depth - DEPTH

    def layer(self, shape: Shape, index: int) -> int:
        """Where a layer of the paper's stack is in this one."""
        return round(index / (shape.depth - 1) * (self.stack(shape) - 1))

    def per_window(self, tokens: int, shape: Shape) -> int:
        """S or L of a row."""
        return self._share(tokens, self.row_window(shape)) if tokens else 0

    def covered(self, shape: Shape) -> int:
        """Q of a row: a window of half the length has a queue of twice as many, so that it covers
        as much. Where L would be less than one, and is one, the queue has as many slots as if it
        were less."""
        windows = shape.coverage or self.queue * WINDOW // shape.window
        share = shape.long * self.row_window(shape) / WINDOW
        return max(round(windows * share), 1) if 0 < share < 1 else windows

    @property
    def memory_slots(self) -> int:
        return self.queue * self.window

    def _share(self, tokens: int, of: int) -> int:
        return max(round(tokens * of / WINDOW), 1)

    def _common(self, vocab_size: int, shape: Shape) -> dict[str, Any]:
        return dict(
            vocab_size=vocab_size,
            width=self.width,
            num_heads=self.num_heads,
            window=self.row_window(shape),
            dropout=self.dropout,
        )


LAPTOP = Scale(
    name="laptop",
    width=128,
    num_heads=4,
    layers=6,
    counted_layers=13,
    window=32,
    queue=64,
    rows=8,
    documents=128,
    segment_windows=8,
    tokens=4_000_000,
    ablation_tokens=2_000_000,
    vocab_size=2048,
)
PAPER = Scale(
    name="paper",
    width=1024,
    num_heads=8,
    layers=DEPTH,
    counted_layers=DEPTH,
    window=WINDOW,
    queue=QUEUE,
    rows=32,
    documents=32,
    segment_windows=8,
    tokens=500_000 * 32 * SEGMENT,
    ablation_tokens=200_000 * 32 * SEGMENT,
    vocab_size=32_000,
    dropout=0.05,
    equal=False,
    training="paper",
)
SCALES = {scale.name: scale for scale in (LAPTOP, PAPER)}

Common = dict[str, Any]


def melodi(scale: Scale, shape: Shape, common: Common) -> ModelConfig:
    depth = scale.stack(shape)
    long_layers = [scale.layer(shape, index) for index in shape.long_layers] if shape.long else []
    short_layers = None if shape.short_layers is None else spread(shape.short_layers, depth)
    long = scale.per_window(shape.long, shape)
    return ModelConfig(
        layers=sandwich(depth, long_layers, short_layers),
        short_term_tokens=scale.per_window(shape.short, shape),
        long_term_tokens=long,
        long_term_windows=scale.covered(shape) if long else 0,
        branching=shape.branching,
        copy_short_to_long=shape.copying,
        **common,
    )


def transformer_xl(scale: Scale, shape: Shape, common: Common) -> ModelConfig:
    return ModelConfig(layers=every(scale, shape, "xl"), **common)


def block_recurrent(scale: Scale, shape: Shape, common: Common) -> ModelConfig:
    """The recurrent layer, third from the end, costs about as much as two."""
    layers = list(every(scale, shape, "xl"))[1:]
    layers[-min(3, len(layers))] = "recurrent"
    return ModelConfig(layers=tuple(layers), recurrent_states=scale.window, **common)


def memorizing(scale: Scale, shape: Shape, common: Common) -> ModelConfig:
    layers = list(every(scale, shape, "xl"))
    layers[scale.layer(shape, shape.long_layers[0])] = "memorizing"
    return ModelConfig(layers=tuple(layers), memory_slots=scale.memory_slots, **common)


def no_memory(scale: Scale, shape: Shape, common: Common) -> ModelConfig:
    return ModelConfig(layers=every(scale, shape, "plain"), **common)


def compressive(scale: Scale, shape: Shape, common: Common) -> ModelConfig:
    layers, slots = every(scale, shape, "compressive"), scale.window
    return ModelConfig(layers=layers, compressed_slots=slots, compression_rate=4, **common)


def rmt(scale: Scale, shape: Shape, common: Common) -> ModelConfig:
    """As many memory tokens as Melodi's S128."""
    tokens = scale.per_window(128, shape)
    return ModelConfig(layers=every(scale, shape, "rmt"), memory_tokens=tokens, **common)


def autocompressor(scale: Scale, shape: Shape, common: Common) -> ModelConfig:
    """As many tokens of a window as Melodi's L32."""
    return ModelConfig(
        layers=every(scale, shape, "autocompressor"),
        long_term_tokens=scale.per_window(32, shape),
        long_term_windows=scale.covered(shape),
        **common,
    )


def infini(scale: Scale, shape: Shape, common: Common) -> ModelConfig:
    return ModelConfig(layers=every(scale, shape, "infini"), **common)


def armt(scale: Scale, shape: Shape, common: Common) -> ModelConfig:
    """Its authors' ten write tokens; keys of half a head, which is their 64 at the paper's size."""
    return ModelConfig(
        layers=every(scale, shape, "armt"),
        memory_tokens=min(10, scale.window),
        associative_width=scale.width // scale.num_heads // 2,
        **common,
    )


SYSTEMS: dict[System, Callable[[Scale, Shape, Common], ModelConfig]] = {
    "melodi": melodi,
    "transformer-xl": transformer_xl,
    "block-recurrent": block_recurrent,
    "memorizing": memorizing,
    "no-memory": no_memory,
    "compressive": compressive,
    "rmt": rmt,
    "autocompressor": autocompressor,
    "infini": infini,
    "armt": armt,
}


def every(scale: Scale, shape: Shape, kind: LayerKind) -> tuple[LayerKind, ...]:
    return (kind,) * scale.stack(shape)


def spread(count: int, depth: int) -> list[int]:
    """So many layers, evenly from the first to the last; the first alone for one."""
    return [round(i * (depth - 1) / max(count - 1, 1)) for i in range(count)]


@functools.cache
def parameters(config: ModelConfig) -> int:
    return cost(config)["parameters"]


def reference_parameters(scale: Scale, vocab_size: int, depth: int, counted: bool) -> int:
    """What every row of a depth has: Transformer-XL's parameters. Fewer layers than 13 have that
    share of them, so that the step from 13 to 12 is no larger in a stack of few layers."""
    whole = parameters(
        scale.config(Shape("transformer-xl", counted=counted), vocab_size, equal=False)
    )
    embedding = vocab_size * scale.width
    return embedding + round((whole - embedding) * depth / DEPTH)


def fitted(config: ModelConfig, wanted: int) -> ModelConfig:
    """The config with the feed-forward that brings its parameters nearest to what is wanted, in
    steps of eight where that is fine enough."""
    have = parameters(config)
    if abs(have / wanted - 1) <= TOLERANCE:
        return config
    step = 8 if config.ffn_width >= 256 else 1
    each = parameters(replace(config, ffn_width=config.ffn_width + step)) - have
    steps = round((wanted - have) / each)
    return replace(config, ffn_width=max(config.ffn_width + step * steps, 1))
