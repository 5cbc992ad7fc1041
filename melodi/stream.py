"""StreamReader: reads any length of text in constant memory, and goes on from there.

- `read` gives the nats of every token; what was read is in `reader.state`.
- `generate` samples the continuation one token at a time, remembering what it says.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from melodi.memory import MemoryState
from melodi.model import LanguageModel

CHUNK_WINDOWS = 8
"""Windows that `read` gives to the model at once."""


class StreamReader:
    """One document, read and continued; several readers of one model do not disturb each other."""

    def __init__(self, model: LanguageModel, state: MemoryState | None = None) -> None:
        self.model = model.eval()
        self.state = model.empty_state(1) if state is None else state
        self.logits_V: Tensor | None = None
        """What is expected next; None before the first token."""

    @torch.inference_mode()
    def read(self, ids: Sequence[int]) -> Tensor:
        """Reads on. Nats per token; NaN for a token that nothing came before."""
        if not ids:
            raise ValueError("there is nothing to read: give at least one token id")
        device = self.model.embedding.weight.device
        nats = []
        for tokens_T in torch.tensor(ids).split(CHUNK_WINDOWS * self.model.config.window):
            logits_1TV, self.state = self.model(tokens_T[None].to(device), self.state)
            before_TV = logits_1TV[0, :-1]
            first = self.logits_V
            if first is None:
                first = torch.full_like(logits_1TV[0, 0], float("nan"))
            expected_TV = torch.cat([first[None], before_TV]).float()
            nats.append(F.cross_entropy(expected_TV, tokens_T.to(device), reduction="none").cpu())
            self.logits_V = logits_1TV[0, -1]
        return torch.cat(nats)

    def generate(
        self,
        max_tokens: int,
        temperature: float = 0.8,
        top_k: int | None = None,
        seed: int | None = None,
        stop: int | None = None,
    ) -> Iterator[int]:
        """Samples tokens one at a time, up to `max_tokens` or the token `stop`.

        Temperature 0 always takes the most likely token.
        """
        if self.logits_V is None:
            raise ValueError("generation needs something to go on from: read at least one token")
        if temperature < 0:
            raise ValueError(f"temperature={temperature} must be at least 0")
        random = torch.Generator()
        random.manual_seed(torch.seed() if seed is None else seed)
        for _ in range(max_tokens):
            token = sample(self.logits_V.float().cpu(), temperature, top_k, random)
            if token == stop:
                return
            yield token
            self.read([token])


def sample(logits_V: Tensor, temperature: float, top_k: int | None, random: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        lowest = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < lowest, float("-inf"))
    return int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=random))
