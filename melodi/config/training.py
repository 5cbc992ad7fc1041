"""How a model is trained, as data: the recipe, the optimizer, and how a run is carried out."""

from dataclasses import dataclass
from typing import Literal

from melodi.config.checks import check_least, check_types, from_dict

Precision = Literal["fp32", "bf16", "auto"]
SEEDS, MOST_STEPS = 1 << 24, 1 << 28
"""Both share the 64 bits of a step's seed, with 12 bits for the process."""
MOST_ROWS = 1 << 16
"""Far more, and where each of them stands fills the memory before anything is read."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its rates. The paper's: ("adafactor", peak=0.01, floor=0.001, warmup=1000).

    The horizon of the schedule is the number of steps of the run, and not said here.
    """

    name: Literal["adafactor", "adamw", "muon"]
    """adafactor, adamw, or muon: Muon for the matrices and AdamW for everything else."""
    peak: float
    """Learning rate at which the cosine starts."""
    floor: float
    """Learning rate at which the cosine ends."""
    warmup: int
    """Steps of linear warm-up."""
    weight_decay: float = 0.0
    """Pull of the matrices to zero, times the learning rate, whatever the optimizer."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's first and second moment."""
    momentum: float = 0.95
    """Decay of Muon's momentum. Adafactor's is the paper's, 0.9."""
    gate_multiplier: float = 1.0
    """Learning rate of gates and attention scales, relative to the rest."""
    mixer_multiplier: float = 1.0
    """Learning rate of Melodi's token mixers, relative to the rest. Muon turns a matrix of any size
    around in some ten steps: a mixer that hands on tokens has then forgotten which."""

    def __post_init__(self) -> None:
        if isinstance(self.betas, list):  # as JSON has it
            object.__setattr__(self, "betas", tuple(self.betas))
        check_types(self)
        if self.peak <= 0:
            raise ValueError(f"peak={self.peak} must be above 0: with it nothing would be learned")
        if not 0 <= self.floor <= self.peak:
            raise ValueError(
                f"floor={self.floor} is not between 0 and peak={self.peak}: the learning rate "
                "falls from the peak to the floor"
            )
        check_least(self, warmup=0, weight_decay=0, gate_multiplier=0, mixer_multiplier=0)
        if not all(0 <= decay < 1 for decay in (*self.betas, self.momentum)):
            raise ValueError(
                f"betas={self.betas} and momentum={self.momentum} must be at least 0 and below 1"
            )


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained. Everything that the result depends on is here or in ModelConfig."""

    optimizer: OptimizerConfig
    steps: int = 500
    """Updates of the weights."""
    horizon: int | None = None
    """Steps of the learning-rate schedule; as many as `steps` when not given."""
    seed: int = 0
    rows: int = 16
    """Documents that a step reads, over all processes."""
    turns: int = 1
    """Sets of rows that take turns, a step each, so that rows × turns documents are under way;
    fewer where there are not so many documents."""
    segment_windows: int = 8
    """Windows that a step reads of each document, and that gradients flow through."""
    accumulate: int = 1
    """Parts into which each process cuts its rows; their gradients are added up."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 leaves it as it is."""
    precision: Precision = "fp32"
    """bf16: autocast; weights and memory stay in float32. auto: bf16 where this machine is clearly
    faster with it; the run keeps what was found at its start."""
    validate_every: int = 100
    """Steps between validations; there is always one at the end."""
    validation_tokens: int = 100_000
    """Whole validation documents are read until they hold about this many tokens."""
    save_every: int = 50
    """Steps between checkpoints."""

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, dict):  # as JSON has it
            object.__setattr__(self, "optimizer", from_dict(OptimizerConfig, self.optimizer))
        check_types(self)
        check_least(self, steps=1, horizon=1, seed=0, rows=1, turns=1, segment_windows=1)
        check_least(self, accumulate=1, clip=0, validate_every=1, validation_tokens=1, save_every=1)
        for name, end in (("seed", SEEDS), ("steps", MOST_STEPS), ("rows", MOST_ROWS)):
            if getattr(self, name) >= end:
                raise ValueError(f"{name}={getattr(self, name)} must be below {end}")


@dataclass(frozen=True)
class Execution:
    """How a run is carried out, which does not change what it computes."""

    sharding: Literal["ddp", "fsdp"] = "ddp"
    """What many processes do: copy the model, or share it out."""
    compile: bool = False
    """Compile each layer."""
    checkpoint_windows: bool = False
    """Keep only what windows carry, and compute the rest again in the backward pass."""
    keep: int = 3
    """Checkpoints that are kept."""
    log_every: int = 10
    """Steps between lines of metrics."""
    tensorboard: bool = False
    """Log to RUN/tensorboard as well (extra: tensorboard)."""

    def __post_init__(self) -> None:
        check_types(self)
        check_least(self, keep=1, log_every=1)


def recipe(preset: str) -> TrainConfig:
    """The paper's recipe (Appendix B) for its presets, and one that learns in minutes for ours."""
    if preset.startswith("paper-"):
        return TrainConfig(
            optimizer=OptimizerConfig("adafactor", peak=0.01, floor=0.001, warmup=1000),
            steps=500_000,
            rows=32,
            clip=0.0,
            validate_every=5_000,
            validation_tokens=1_000_000,
            save_every=1_000,
        )
    return TrainConfig(
        optimizer=OptimizerConfig("muon", peak=0.02, floor=0.002, warmup=20, mixer_multiplier=0.04),
        steps=800,
        turns=8,
        segment_windows=2,
        validate_every=200,
        save_every=100,
    )
