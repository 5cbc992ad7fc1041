"""How far back a model remembers: right answers by distance, on tasks and on real documents.

- `accuracy`: a model that was trained on a task of tasks.py, on new documents of it.
- `forgetting`: of any run, on any documents. While a document is read, a window that was read k
  windows ago is shown again, from a copy of the memory, so that the reading goes on undisturbed.
  What it costs now is set against what it cost when it was met first; and so is the window that
  comes k windows later, which has never been met, and tells what the strange place costs. Both are
  of the same document, so that knowing its words and manner does not pass for remembering.
- `passkey_in_text`: of any run. A sentence with a number is put into the first window of a
  document; k windows later the sentence begins again. Of ten numbers, the true one should be the
  one that has become likelier by most, compared with the document when it holds another number.

Shapes: R rows, T tokens, C candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from melodi.data.store import Documents
from melodi.data.tokenizer import Tokenizer
from melodi.evaluation.intervals import ratio
from melodi.evaluation.tasks import Task
from melodi.memory import MemoryState
from melodi.model import LanguageModel
from melodi.stream.reader import evaluating

SENTENCE, CANDIDATES, KEY_DIGITS = " The pass key is", 10, 5


def accuracy(
    model: LanguageModel, task: Task, rows: int = 256, seed: int = 1, with_memory: bool = True
) -> list[dict[str, Any]]:
    """The share of right answers by distance in windows, and the questions behind it; memory is
    kept, or dropped at every window."""
    examples = task.make(np.random.default_rng([seed, 1]), rows)
    tokens_RT, asked_RT = examples.tokens_RT, examples.targets_RT >= 0
    if not with_memory:  # every window is a document
        tokens_RT = tokens_RT.reshape(-1, task.sizes.window)
        asked_RT = asked_RT.reshape(tokens_RT.shape)
    with evaluating(model), torch.inference_mode():
        device = model.embedding.weight.device
        state = model.empty_state(len(tokens_RT))
        x_RTD, _, _ = model.hidden(torch.from_numpy(tokens_RT).to(device), state)
        logits = model.logits(x_RTD[torch.from_numpy(asked_RT).to(device)])
        # Other tokens are no answer: a model at chance is right once in as many as there are.
        chosen = logits[:, : task.vocabulary.answers].argmax(-1).cpu().numpy()
    asked_RT = examples.targets_RT >= 0
    right = chosen == examples.targets_RT[asked_RT]
    distances = examples.distances_RT[asked_RT]
    return [
        {
            "distance": int(distance),
            "accuracy": float(right[distances == distance].mean()),
            "questions": int((distances == distance).sum()),
        }
        for distance in np.unique(distances)
    ]


@dataclass
class Meetings:
    """Sums of nats for each document and distance."""

    rows: int
    first: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    again: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    strange: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    """What windows that are still to come cost here, less what they cost where they belong."""
    tokens: dict[int, NDArray[np.float64]] = field(default_factory=dict)

    def add(self, distance: int, first: Tensor, again: Tensor, strange: Tensor) -> None:
        sums = (first.sum(1), again.sum(1), strange.sum(1), torch.full((self.rows,), first.size(1)))
        for of, new in zip((self.first, self.again, self.strange, self.tokens), sums, strict=True):
            of[distance] = of.get(distance, 0) + new.cpu().double().numpy()

    def curve(self) -> list[dict[str, Any]]:
        """Nats per token by distance; "remembered" is what the second meeting saves against a
        window that has never been met, at the same place, with its interval over documents."""
        found = []
        for k, tokens in sorted(self.tokens.items()):
            first, again, strange = self.first[k], self.again[k], self.strange[k]
            saved = first - again + strange
            found.append(
                {
                    "distance": k,
                    "first": float(first.sum() / tokens.sum()),
                    "again": float(again.sum() / tokens.sum()),
                    "strange": float((first + strange).sum() / tokens.sum()),
                    "remembered": ratio(saved, tokens)._asdict(),
                    "tokens": int(tokens.sum()),
                    "documents": self.rows,
                }
            )
        return found


def forgetting(
    model: LanguageModel,
    documents: Documents,
    distances: Sequence[int] = (1, 2, 4, 8, 16, 32),
    rows: int = 8,
    probes: int = 16,
) -> list[dict[str, Any]]:
    """The forgetting curve on the longest documents, from `probes` places of each."""
    window = model.config.window
    tokens_RT = longest(documents, rows, window, 2 * max(distances) + 4 * probes)
    rows, count = len(tokens_RT), (tokens_RT.size(1) - 1) // window
    reach = min(max(distances), (count - 1) // 2)
    if not reach:
        raise ValueError(
            f"the documents have {count} windows of {window} tokens: one before, one after and one "
            "between them are needed; give longer ones"
        )
    places = {int(place) for place in np.linspace(reach, count - 1 - reach, probes).round()}
    tokens_RT = tokens_RT.to(model.embedding.weight.device)
    windows = [tokens_RT[:, i * window : (i + 1) * window + 1] for i in range(count)]
    firsts: list[Tensor] = []
    shown: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    with evaluating(model), torch.inference_mode():
        state = model.empty_state(rows)
        for place, here in enumerate(windows):
            for k in distances if place in places else ():
                if k <= place < count - k:
                    again = nats_of(model, windows[place - k], state)
                    shown[place, k] = again, nats_of(model, windows[place + k], state)
            scored = model.nats(here[:, :-1], here[:, 1:], state)
            firsts.append(scored.nats_BT)
            state = scored.state
    meetings = Meetings(rows)
    for (place, k), (again, ahead) in shown.items():
        strange = ahead - firsts[place + k]
        meetings.add(k, firsts[place - k][:, 1:], again[:, 1:], strange[:, 1:])
    return meetings.curve()


def nats_of(model: LanguageModel, tokens_RT: Tensor, state: MemoryState) -> Tensor:
    """Of a window, from a copy of the memory."""
    return model.nats(tokens_RT[:, :-1], tokens_RT[:, 1:], state).nats_BT


def longest(documents: Documents, rows: int, window: int, windows: int) -> Tensor:
    """The longest documents side by side, all cut to the same length: those that have as many
    windows as wanted, or else the two longest."""
    if rows < 2:
        raise ValueError(f"rows={rows} must be at least 2: documents are compared")
    order = np.argsort(documents.lengths, kind="stable")[::-1][:rows]
    enough = int((documents.lengths[order] > windows * window).sum())
    chosen = order[: max(enough, 2)]
    if len(chosen) < 2:
        raise ValueError(
            f"documents are compared, and the split has {len(documents)}: choose another --split, "
            "or prepare more documents"
        )
    length = int(documents.lengths[chosen].min())
    if length <= 2 * window:
        raise ValueError(
            f"no two documents have {2 * window + 1} tokens, two windows: give longer ones"
        )
    length = min(length, windows * window + 1)
    return torch.stack(
        [torch.from_numpy(documents[int(i)][:length].astype(np.int64)) for i in chosen]
    )


def passkey_in_text(
    model: LanguageModel,
    documents: Documents,
    distances: Sequence[int] = (1, 2, 4, 8, 16, 32),
    rows: int = 8,
    numbers: int = 4,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """How often the planted number is the one that planting makes likelier by most, of ten, by
    windows since it was planted; in each document several numbers, at least two, one at a time."""
    window, random = model.config.window, np.random.default_rng(seed)
    begun, before = model.tokenizer.encode_next(SENTENCE), window // 2
    # A number is a space, its digits and a full stop: a token each at most.
    windows = max(distances) + 1 + (len(begun) + KEY_DIGITS + 2) // window
    texts_RT = longest(documents, rows, window, windows).repeat_interleave(numbers, 0)
    choices = [candidates_of(model.tokenizer, random) for _ in texts_RT]
    planted_at = before + len(begun) + max(len(choice[0]) for choice in choices)
    planted = [
        [*text[:before], *begun, *choice[0], *text[before:]][: texts_RT.size(1)]
        for text, choice in zip(texts_RT.tolist(), choices, strict=True)
    ]
    tokens_RT = torch.tensor(planted, device=model.embedding.weight.device)
    found, read = [], 0
    with evaluating(model), torch.inference_mode():
        state = model.empty_state(len(planted))
        for k in distances:
            end = planted_at + k * window
            if end > tokens_RT.size(1):
                break
            _, state, _ = model.hidden(tokens_RT[:, read:end], state)
            read, right = end, 0.0
            for row, choice in enumerate(choices):
                # The same document with another number: only the number makes the difference.
                other = row - row % numbers + (row + 1) % numbers
                now, usual = (costs(model, state.select([i]), begun, choice) for i in (row, other))
                best = now - usual == (now - usual).min()
                right += float(best[0] / best.sum())  # of numbers that are alike one is guessed
            found.append(
                {"distance": k, "accuracy": right / len(choices), "questions": len(choices)}
            )
    if not found:
        raise ValueError(
            f"the longest {rows} documents have {texts_RT.size(1)} tokens at least, too few to ask "
            f"for a number that is {planted_at} tokens from their beginning: give longer ones"
        )
    return found


def candidates_of(tokenizer: Tokenizer, random: np.random.Generator) -> list[list[int]]:
    """Ten numbers as they end the sentence; the first is the true one."""
    keys = random.choice(10**KEY_DIGITS, CANDIDATES, replace=False)
    return [tokenizer.encode_next(f" {key:0{KEY_DIGITS}}.") for key in keys]


def costs(
    model: LanguageModel, state: MemoryState, begun: list[int], candidates: list[list[int]]
) -> Tensor:
    """Nats of each candidate after the beginning of the sentence, from a copy of the memory."""
    length = len(begun) + max(map(len, candidates))
    tokens_CT = torch.zeros(len(candidates), length, dtype=torch.long)
    targets_CT = torch.full_like(tokens_CT, -1)
    for i, ids in enumerate(candidates):
        tokens_CT[i, : len(begun) + len(ids)] = torch.tensor([*begun, *ids])
        targets_CT[i, len(begun) - 1 : len(begun) + len(ids) - 1] = torch.tensor(ids)
    device, copies = model.embedding.weight.device, state.select([0] * len(candidates))
    return model.nats(tokens_CT.to(device), targets_CT.to(device), copies).nats_BT.sum(1)
