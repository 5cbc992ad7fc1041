"""Our models, as things that train, read and generate.

Memory counts as full: it is filled with random numbers, since reading until it is full would take
longer than what is to be measured.

Shapes: B rows, T tokens.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from melodi.bench.measure import Task, rate
from melodi.bench.operations import TRAINING, memory_read, per_token, weights_read
from melodi.bench.sizes import REFERENCE, Size
from melodi.config import ModelConfig
from melodi.layers.frame import named
from melodi.memory import MemoryState
from melodi.model import LanguageModel
from melodi.stream import StreamReader

LONG_AGO = 1 << 20
"""Windows read, so that every memory is full."""

Run = Callable[[], object]


@dataclass(frozen=True)
class Subject:
    """A model of ours or another's; None for what it cannot do."""

    name: str
    train: Run | None = None
    """Forward and backward of one segment, all rows."""
    read: Run | None = None
    """The nats of one segment, all rows, without gradient."""
    generate: Run | None = None
    """One document goes on by `generated` tokens."""
    generated: int = 0
    train_work: float | None = None
    """Operations that a token needs in training."""
    read_work: float | None = None
    generate_work: float | None = None
    """Bytes that a generated token must read."""
    optional: bool = True

    def tasks(self, size: Size) -> list[Task]:
        tokens = size.rows * size.segment
        return [
            Task(self.name, metric, rate(run, units), work, self.optional, self.name == REFERENCE)
            for metric, run, units, work in (
                ("train", self.train, tokens, self.train_work),
                ("read", self.read, tokens, self.read_work),
                ("generate", self.generate, self.generated, self.generate_work),
            )
            if run is not None
        ]


def our_subject(name: str, config: ModelConfig, size: Size) -> Subject:
    torch.manual_seed(0)
    model = LanguageModel(config).eval()
    tokens_BT = random_tokens(config, size.rows, size.segment)
    state, targets_BT = filled_state(model, size.rows), tokens_BT.roll(-1, 1)
    opened = StreamReader(model, filled_state(model, 1), precision=size.precision)
    opened.read(tokens_BT[0, : max(config.window // 2, 1)].tolist())

    def train() -> None:
        loss, _ = model.loss(tokens_BT, targets_BT, state)
        loss.backward()
        model.zero_grad(set_to_none=True)

    @torch.inference_mode()
    def read() -> None:
        model.nats(tokens_BT, targets_BT, state)

    def generate() -> None:
        reader = copy.copy(opened)  # states are values: each time goes on from the same place
        with torch.autocast("cpu", enabled=False):  # the reader sees to its precision itself
            # As many as a window has, from the middle of one: the end of a window counts once.
            for _ in reader.generate(config.window, temperature=0):
                pass

    work = 2 * per_token(config)
    return Subject(
        name,
        train,
        read,
        generate,
        config.window,
        train_work=TRAINING * work,
        read_work=work,
        generate_work=(2 if size.precision == "bf16" else 4) * weights_read(config)
        + 4 * memory_read(config),
        optional=False,
    )


def read_document(model: LanguageModel, length: int, chunk: int) -> MemoryState:
    """Reads a document of random tokens from its start, one row, a chunk at a time."""
    tokens_1T = random_tokens(model.config, 1, min(chunk, length))
    state = model.empty_state(1)
    for start in range(0, length, chunk):
        state = read_on(model, tokens_1T[:, : length - start], state)
    return state


@torch.inference_mode()
def read_on(model: LanguageModel, tokens_1T: Tensor, state: MemoryState) -> MemoryState:
    return model.nats(tokens_1T, tokens_1T.roll(-1, 1), state).state


def train_on_document(model: LanguageModel, rows: int, length: int, segment: int) -> None:
    """Segment after segment of one document, gradients dropped after each."""
    tokens_BT = random_tokens(model.config, rows, min(length, segment))
    state = filled_state(model, rows)
    for _ in range(max(length // segment, 1)):
        loss, state = model.loss(tokens_BT, tokens_BT.roll(-1, 1), state)
        loss.backward()
        model.zero_grad(set_to_none=True)
        state = state.detach()


def filled_state(model: LanguageModel, rows: int) -> MemoryState:
    """The memory of rows that have read for long, with random numbers in it, all positive: sums
    that are divided by must not be zero."""
    empty = model.empty_state(rows)
    random = torch.Generator().manual_seed(0)
    layers = tuple(
        named(type(memory), [torch.rand(tensor.shape, generator=random) for tensor in memory])
        for memory in empty.layers
    )
    return replace(empty, windows_B=torch.full_like(empty.windows_B, LONG_AGO), layers=layers)


def random_tokens(config: ModelConfig, rows: int, length: int) -> Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randint(1, config.vocab_size, (rows, length), generator=random)
