"""Memory can be learned: a tiny model, trained here from nothing, recalls what it read before.

A document has five windows. One of sixteen keys is planted somewhere in the first, among fillers;
every later window asks for it once, somewhere. Training counts only the answers.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from zoo import KINDS

from melodi import LanguageModel

WINDOW, WINDOWS, ANSWERED = 8, 5, 0.01
KEYS, FILLERS = 16, 4
QUESTION = KEYS + FILLERS
SIZES = replace(
    KINDS["melodi"],
    vocab_size=QUESTION + 1,
    width=32,
    head_width=None,
    ffn_width=64,
    window=WINDOW,
    short_term_tokens=4,
    long_term_tokens=2,
    long_term_windows=WINDOWS,
    memory_slots=WINDOWS * WINDOW,
)
MODELS = {
    "short-term": replace(SIZES, layers=("short", "short")),
    "long-term": replace(SIZES, layers=("plain", "long-only")),
    "block-recurrent": replace(SIZES, layers=("recurrent", "xl")),
    "memorizing": replace(SIZES, layers=("xl", "memorizing")),
}


def documents(rows: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and targets (rows, windows, window); targets are -1 but for the answers."""
    tokens = torch.randint(KEYS, QUESTION, (rows, WINDOWS, WINDOW), generator=random)
    place = torch.randint(0, WINDOW, (rows, WINDOWS, 1), generator=random)
    key = torch.randint(0, KEYS, (rows, 1, 1), generator=random)
    asked = tokens.scatter(2, place, QUESTION)
    asked[:, :1] = tokens[:, :1].scatter(2, place[:, :1], key)
    targets = torch.where(asked == QUESTION, key, -1)
    return asked, targets


def train(model: LanguageModel, random: torch.Generator) -> None:
    """At most 400 steps, fewer when all answers are right."""
    vectors = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": matrices}, {"params": vectors, "lr": 0.05}]  # gates and scales learn late
    optimizer = torch.optim.AdamW(groups, lr=0.005, weight_decay=0.0)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
    for _ in range(400):
        tokens, targets = documents(32, random)
        loss, _ = model.loss(tokens.flatten(1), targets.flatten(1), model.empty_state(32))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        if loss < ANSWERED:
            return


def recalled(model: LanguageModel, random: torch.Generator, keep: bool) -> float:
    """The share of right answers in the last window, four windows after the key was planted."""
    tokens, targets = documents(1024, random)
    with torch.inference_mode():
        _, state = model(tokens[:, :-1].flatten(1), model.empty_state(1024))
        state = state if keep else state.forget([True] * 1024)
        logits, _ = model(tokens[:, -1], state)
    asked = targets[:, -1] >= 0
    return (logits.argmax(-1) == targets[:, -1])[asked].float().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_planted_key_is_recalled(kind: str) -> None:
    """A trained tiny model recalls a key planted four windows back, and cannot with its memory
    dropped: then it is no better than chance."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    model = LanguageModel(MODELS[kind])
    train(model, random)
    model.eval()
    assert recalled(model, random, keep=True) > 0.9
    assert recalled(model, random, keep=False) < 2 / KEYS
