"""From what a model expects to one token: the choices of a sampler, checked before the first.

The order is fixed: the penalty for repeating, temperature, the k most likely, the most likely that
hold a share p, those at least min_p times as likely as the first; then one of what is left.

Shapes: V vocabulary.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor


class Choices(TypedDict, total=False):
    """What can be chosen beside the temperature; explained in `Sampling`."""

    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    seed: int | None
    stop: int | Collection[int] | None
    stop_strings: str | Sequence[str]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and when to stop."""

    temperature: float = 0.8
    """0 always takes the most likely token."""
    top_k: int | None = None
    """Only the k most likely."""
    top_p: float | None = None
    """Only the most likely that together hold this share of the probability."""
    min_p: float | None = None
    """Only those that are at least this many times as likely as the most likely."""
    repetition_penalty: float = 1.0
    """Logits of the last 64 tokens are divided by it if positive, else multiplied; 1 is none."""
    seed: int | None = None
    """The same seed gives the same tokens; row r of a batch has seed + r."""
    stop: int | Collection[int] | None = None
    """Ids that end the text: they are neither given nor read."""
    stop_strings: str | Sequence[str] = ()
    """Texts that end the text: the token that completes one is the last, and is read."""

    def __post_init__(self) -> None:
        checks = {
            "temperature": (0.0 <= self.temperature < math.inf, "at least 0, and finite"),
            "top_k": (self.top_k is None or self.top_k >= 1, "at least 1"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (self.min_p is None or 0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "above 0, and finite"),
            "seed": (self.seed is None or 0 <= self.seed < 1 << 63, "from 0 to 2**63 - 1"),
            "stop_strings": (all(self.texts), "not empty"),
        }
        for name, (right, must_be) in checks.items():
            if not right:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {must_be}")

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end the text."""
        if self.stop is None:
            return frozenset()
        return frozenset([self.stop] if isinstance(self.stop, int) else self.stop)

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that end the text."""
        one = isinstance(self.stop_strings, str)
        return (str(self.stop_strings),) if one and self.stop_strings else tuple(self.stop_strings)

    def generators(self, rows: int) -> list[torch.Generator]:
        """A source of chance for each row; the global one is never touched."""
        found = [torch.Generator() for _ in range(rows)]
        for row, random in enumerate(found):
            if self.seed is None:
                random.seed()
            else:
                random.manual_seed((self.seed + row) % (1 << 63))
        return found

    def choose(self, logits_V: Tensor, recent: Sequence[int], random: torch.Generator) -> int:
        """One token."""
        if not bool(logits_V.isfinite().all()):
            raise ValueError(
                "the model's logits are not finite (NaN or infinity): its weights or its memory "
                "are broken; use other weights, or read the document again"
            )
        logits_V = penalised(logits_V.double(), recent, self.repetition_penalty)
        if self.temperature == 0:
            return int(logits_V.argmax())
        # The largest becomes 0 first, so that no temperature, however small, makes it infinite.
        p_V = ((logits_V - logits_V.max()) / self.temperature).softmax(-1)
        return int(torch.multinomial(self._likely(p_V), 1, generator=random))

    def _likely(self, p_V: Tensor) -> Tensor:
        """The probabilities that are left, not normalised; the first is always among them."""
        if self.top_k is self.top_p is self.min_p is None:
            return p_V
        sorted_V, place_V = p_V.sort(descending=True, stable=True)
        kept_V = torch.ones_like(sorted_V, dtype=torch.bool)
        if self.top_k is not None:
            kept_V[self.top_k :] = False
        if self.top_p is not None:
            among_V = sorted_V * kept_V
            before_V = among_V.cumsum(0) - among_V
            kept_V &= before_V < self.top_p * among_V.sum()
        if self.min_p is not None:
            kept_V &= sorted_V >= self.min_p * sorted_V[0]
        kept_V[0] = True
        return torch.zeros_like(p_V).scatter(0, place_V, sorted_V * kept_V)


def penalised(logits_V: Tensor, recent: Sequence[int], penalty: float) -> Tensor:
    """Tokens that were just there become less likely, if the penalty is above 1."""
    if penalty == 1.0 or not recent:
        return logits_V
    ids = torch.tensor(sorted(set(recent)), device=logits_V.device)
    theirs = logits_V[ids]
    return logits_V.index_copy(0, ids, torch.where(theirs > 0, theirs / penalty, theirs * penalty))
