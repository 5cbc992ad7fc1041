"""A small model learns a recall task from nothing: the microscope for what a memory can learn.

Every step reads fresh documents of the task, whole, so that gradients flow through all of their
windows. Any model and any optimizer; `tiny_config` makes a small model of the same kind out of any
preset. The order of documents, the weights at the start and so the result follow from the seed.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from melodi.config import ModelConfig
from melodi.config.kinds import LayerKind
from melodi.config.training import OptimizerConfig
from melodi.evaluation.tasks import Task
from melodi.model import LanguageModel
from melodi.training.optimizers import make_optimizer, schedule

OPTIMIZER = OptimizerConfig("muon", peak=0.02, floor=0.002, warmup=20, gate_multiplier=10)
"""What tiny models of all kinds learn with, the same for each."""
WIDTH, HEADS = 32, 4


@dataclass(frozen=True)
class Learned:
    """A model and how it came about."""

    model: LanguageModel
    losses: list[float]
    """Nats per answer, of each step."""


def learn(
    config: ModelConfig,
    task: Task,
    optimizer: OptimizerConfig = OPTIMIZER,
    steps: int = 400,
    rows: int = 32,
    seed: int = 0,
    clip: float = 1.0,
    enough: float = 0.0,
    progress: Callable[[int, float], object] | None = None,
) -> Learned:
    """Trains a new model for so many steps, fewer when the mean loss of the last ten falls below
    `enough`.

    The schedule is that of all steps. `progress` hears of each step and its loss.
    """
    if config.vocab_size < task.vocabulary.size:
        raise ValueError(
            f"vocab_size={config.vocab_size} is too small for the task {task.name}, which has "
            f"{task.vocabulary.size} tokens"
        )
    if config.window != task.sizes.window:
        raise ValueError(
            f"window={config.window} of the model is not window={task.sizes.window} of the task: "
            "distances are counted in windows; give both the same"
        )
    torch.manual_seed(seed)
    model, random = LanguageModel(config).train(), np.random.default_rng([seed, 0])
    updates = make_optimizer(model, optimizer)
    losses: list[float] = []
    for step in range(1, steps + 1):
        examples = task.make(random, rows)
        tokens, targets = (torch.from_numpy(array) for array in examples[:2])
        loss, _ = model.loss(tokens, targets, model.empty_state(rows))
        updates.zero_grad()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        rate = schedule(step, optimizer.peak, optimizer.floor, optimizer.warmup, steps)
        for group in updates.param_groups:
            group["lr"] = rate * group["multiplier"]
        updates.step()
        losses.append(loss.item())
        if progress is not None:
            progress(step, losses[-1])
        if not math.isfinite(losses[-1]):
            raise ValueError(
                f"the loss became {losses[-1]} at step {step}: lower peak={optimizer.peak}"
            )
        if len(losses) >= 10 and sum(losses[-10:]) / 10 < enough:
            break
    return Learned(model.eval(), losses)


def tiny_config(config: ModelConfig, task: Task) -> ModelConfig:
    """A model of three layers and width 32 of the same kind: tokens of memory shrink as the window
    does, and what lasts for many windows lasts for the whole document."""
    window, windows = task.sizes.window, task.sizes.windows
    share = window / config.window

    def tokens(count: int) -> int:
        return max(round(count * share), 1) if count else 0

    return replace(
        config,
        vocab_size=task.vocabulary.size,
        width=WIDTH,
        num_heads=HEADS,
        head_width=None,
        ffn_width=2 * WIDTH,
        window=window,
        layers=tiny_stack(config),
        dropout=0.0,
        short_term_tokens=tokens(config.short_term_tokens),
        long_term_tokens=tokens(config.long_term_tokens),
        long_term_windows=min(config.long_term_windows, windows),
        recurrent_states=tokens(config.recurrent_states),
        memory_slots=min(config.memory_slots, windows * window),
        memory_tokens=tokens(config.memory_tokens),
        compressed_slots=tokens(config.compressed_slots),
        top_k=None,
    )


def tiny_stack(config: ModelConfig) -> tuple[LayerKind, ...]:
    """Three layers: of the one kind, or with the rarer kind in the middle."""
    by_count = [kind for kind, _ in Counter(config.layers).most_common()]
    usual, rarest = by_count[0], by_count[-1]
    return (usual, rarest, usual)
