"""StreamReader: reads any length of text in constant memory, and goes on from there.

- `read` gives the nats of every token, `read_windows` those of each window of a source that may
  have no end, `read_batch` those of several documents, each in a row of its own.
- `generate` samples the continuation one token at a time. A token is read before it is given, so
  that whoever stops listening finds it in the memory.
- `save` and `load`: what was read, what is expected next, and where the reader stands.

Neither the model's mode nor any global random state is changed.

Shapes: B rows, T tokens, D width, V vocabulary.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from melodi import boundary
from melodi.config.training import Precision
from melodi.data.tokenizer import Tokenizer
from melodi.decoding import KeptDecoder
from melodi.layers.nats import linear_nats
from melodi.memory import MemoryState
from melodi.memory_file import Place
from melodi.model import LanguageModel
from melodi.precision import autocast, resolve
from melodi.reading import portions
from melodi.stream.sampling import Choices, Sampling
from melodi.stream.source import Feed, Source, host_ids
from melodi.stream.spoken import Spoken

CHUNK_WINDOWS = 16
"""Windows that `read` gives to the model at once: several go through the layers side by side."""


class WindowRead(NamedTuple):
    """What `read_windows` gives."""

    first: int
    """Tokens of the document before it."""
    nats_T: Tensor
    """Of each of its tokens; NaN for the very first."""


class Standing(NamedTuple):
    """All that reading changes, in one value, so that an interruption leaves the old or the new."""

    state: MemoryState
    place: Place


class StreamReader:
    """One document, or one in each of several rows, read and continued; several readers of one
    model do not disturb each other."""

    def __init__(
        self,
        model: LanguageModel,
        state: MemoryState | None = None,
        rows: int | None = None,
        precision: Precision = "fp32",
        int8: bool = False,
    ) -> None:
        """From nothing, or from a state: then the first token has no score, because a state does
        not tell what is expected next. `StreamReader.load` does.

        What is remembered is in float32, whatever the precision of products is. With `int8` tokens
        are generated with weights of one byte, on a CPU; what is read is read with all of them."""
        state = model.empty_state(1 if rows is None else rows) if state is None else state
        if rows is not None and rows != state.batch_size:
            raise ValueError(f"rows={rows}, but the memory has {state.batch_size}: leave rows out")
        self.model = model
        self.tokenizer: Tokenizer | None = model.tokenizer
        weight, config = model.embedding.weight, model.config
        self.precision = resolve(precision, weight.device, config)
        self.int8 = int8
        if self.precision == "bf16" and weight.dtype == torch.float16:
            raise ValueError("precision='bf16' is not for weights in float16: use model.float()")
        check_int8(int8, self.precision, weight.device)
        state = state.to(weight.device)
        model.check_owner(state)
        read_B = state.tokens_B > 0
        last_BD = torch.zeros(
            state.batch_size, model.config.width, device=weight.device, dtype=weight.dtype
        )
        digest = None if self.tokenizer is None else self.tokenizer.digest()
        self._at = Standing(state, Place.unknown(last_BD, read_B, digest))

    @property
    def state(self) -> MemoryState:
        """What was read."""
        return self._at.state

    @property
    def rows(self) -> int:
        return self.state.batch_size

    @property
    def tokens_read(self) -> list[int]:
        """By each row."""
        return [int(tokens) for tokens in self.state.tokens_B]

    @property
    def recent(self) -> list[list[int]]:
        """The last ids of each row, 64 at most, as far as they are known."""
        return [[i for i in row if i >= 0] for row in self._at.place.recent_BR.tolist()]

    def read(self, source: Source) -> Tensor:
        """Reads on. Nats per token; NaN for a token before which nothing came.

        The source is a text, an open text file, or ids in any form. All ids are checked before
        anything is read.
        """
        self._check_one_row("read_batch")
        return self._read_rows([self._feed(source, 0).take()])[0]

    def read_batch(self, sources: Sequence[Source]) -> list[Tensor]:
        """The same for all rows at once; a row may get nothing, but not all of them."""
        if isinstance(sources, str) or len(sources) != self.rows:
            raise ValueError(
                f"{len(sources)} sources for {self.rows} rows: give one for each, [] for none"
            )
        return self._read_rows([self._feed(source, i).take() for i, source in enumerate(sources)])

    def read_windows(self, source: Source, ahead: int = 1) -> Iterator[WindowRead]:
        """Reads on, and gives each window when it is read; the last may be shorter. Of ids no more
        are taken than the next window needs, so the source may be without end; with `ahead` as many
        as so many windows need, which are read together, and faster. A text is taken in pieces of
        262,144 characters, cut where its tokenizer does not see it."""
        self._check_one_row("read_batch")
        if ahead < 1:
            raise ValueError(
                f"ahead={ahead} must be at least 1: the windows that are read together"
            )
        feed, window = self._feed(source, 0), self.model.config.window

        def windows() -> Iterator[WindowRead]:
            while len(ids := feed.take(ahead * window - int(self.state.open_B[0]))):
                first = self.tokens_read[0]
                nats_T, left = self._read_rows([ids])[0], window - first % window
                for part_T in filter(len, (nats_T[:left], *nats_T[left:].split(window))):
                    yield WindowRead(first, part_T)
                    first += len(part_T)

        return windows()

    def generate(
        self, max_tokens: int, temperature: float = 0.8, **choices: Unpack[Choices]
    ) -> Iterator[int]:
        """Samples up to `max_tokens` tokens, one at a time; fewer where one of `stop` or
        `stop_strings` ends the text. All choices are in `Sampling`."""
        self._check_one_row("generate_batch")
        tokens = self.generate_batch(max_tokens, temperature, **choices)
        return (token for row in tokens for token in row if token is not None)

    def generate_batch(
        self, max_tokens: int, temperature: float = 0.8, **choices: Unpack[Choices]
    ) -> Iterator[list[int | None]]:
        """The same for all rows at once, wherever each stands; None for rows that have ended."""
        sampling = Sampling(temperature, **choices)
        if max_tokens < 0:
            raise ValueError(f"max_tokens={max_tokens} must be at least 0")
        if max_tokens and not bool(self._at.place.known_B.all()):
            row = self._at.place.known_B.tolist().index(False)
            raise ValueError(
                "generation needs something to go on from: read at least one token"
                + (f" in row {row}" if self.rows > 1 else "")
                + ", or give it a prompt"
            )
        # What narrow weights are copies of is kept for this generation only.
        decoder = KeptDecoder(self.model, "int8" if self.int8 else self.precision)
        return self._sampled(max_tokens, sampling, self._spoken(sampling), decoder)

    def generate_text(
        self, max_tokens: int, temperature: float = 0.8, **choices: Unpack[Choices]
    ) -> Iterator[str]:
        """As `generate`, but whole characters, and without the string that ended the text."""
        self._check_one_row("generate_batch")
        sampling = Sampling(temperature, **choices)
        spoken = Spoken(self._needed_tokenizer(), self.recent[0], sampling.texts)
        tokens = self.generate(max_tokens, temperature, **choices)

        def pieces() -> Iterator[str]:
            yield from filter(None, map(spoken.push, tokens))
            yield from filter(None, [spoken.rest()])

        return pieces()

    def save(self, path: str | Path, dtype: str | None = None) -> None:
        """Writes a memory file from which `load` goes on as if nothing had happened; with "bf16" as
        dtype in half of the space, and nearly so. It holds content of what was read."""
        place = self._at.place
        unknown = bool(((self.state.tokens_B > 0) & ~place.known_B).any())
        self.state.save(path, dtype, None if unknown else place)

    @classmethod
    def load(
        cls,
        model: LanguageModel,
        path: str | Path,
        precision: Precision = "fp32",
        int8: bool = False,
    ) -> "StreamReader":
        """A reader that goes on from a memory file of this model."""
        state, place = MemoryState.load_with_place(path)
        try:
            reader = cls(model, state, precision=precision, int8=int8)
            if place is not None:
                reader._at = Standing(reader.state, reader._checked(place))
        except ValueError as error:
            raise ValueError(f"{path} cannot be used here: {error}") from None
        return reader

    def _checked(self, place: Place) -> Place:
        """A file's place, on the model's device, if it is one of this model and tokenizer."""
        ours = self._at.place
        if place.last_BD.shape != ours.last_BD.shape:
            raise ValueError(f"the reader's part has shape {tuple(place.last_BD.shape)}")
        if place.tokenizer and ours.tokenizer and place.tokenizer != ours.tokenizer:
            raise ValueError(
                f"it was read with another tokenizer ({place.tokenizer}, the model has "
                f"{ours.tokenizer})"
            )
        boundary.check_ids("token", place.recent_BR, -1, self.model.config.vocab_size)
        return place._replace(
            last_BD=place.last_BD.to(ours.last_BD), tokenizer=place.tokenizer or ours.tokenizer
        )

    def _feed(self, source: Source, row: int) -> Feed:
        goes_on = self.tokens_read[row] > 0
        return Feed(source, self.model.config.vocab_size, self.tokenizer, goes_on)

    def _read_rows(self, ids: list[Tensor]) -> list[Tensor]:
        """Reads ids that were checked, one tensor for each row, and scores them."""
        if not any(map(len, ids)):
            raise ValueError("there is nothing to read: give at least one token id")
        nats: list[list[Tensor]] = [[] for _ in ids]
        longest, place = max(map(len, ids)), int(self.state.open_B.max())
        for cut in portions(longest, place, self.model.config.window, CHUNK_WINDOWS):
            chunk = [row[cut] for row in ids]
            before = self._at.place
            scores = self._scores(chunk, self._advance(chunk), before)
            for row, new in zip(nats, scores, strict=True):
                row.append(new)
        return [torch.cat(row) for row in nats]

    @torch.inference_mode()
    def _advance(self, ids: list[Tensor], decoder: KeptDecoder | None = None) -> Tensor:
        """Reads the ids of each row; their final hidden vectors. The only pass through the model,
        and the only place where the reader changes."""
        lengths = [len(row) for row in ids]
        tokens_BT = pad_sequence(ids, batch_first=True).to(self.model.embedding.weight.device)
        read = None
        if decoder is not None and set(lengths) == {1}:
            random = self.model.config.dropout > 0
            with evaluating(self.model) if random else contextlib.nullcontext():
                read = decoder(tokens_BT, self.state)
        if read is None:
            ragged = lengths if len(set(lengths)) > 1 else None
            with evaluating(self.model), self._numbers():
                read = self.model.hidden(tokens_BT, self.state, ragged)[:2]
        x_BTD, state = read
        self._at = Standing(state, self._at.place.after(ids, x_BTD))
        return x_BTD

    @torch.inference_mode()
    def _scores(self, ids: list[Tensor], x_BTD: Tensor, before: Place) -> list[Tensor]:
        """Nats of ids that were read: each is expected by the token before it."""
        expecting_BTD = torch.cat([before.last_BD[:, None], x_BTD[:, :-1]], dim=1)
        targets_BT = pad_sequence(ids, batch_first=True, padding_value=-1).to(x_BTD.device)
        weight_VD, scale = self.model.embedding.weight, self.model.output_scale
        with self._numbers():
            flat_BT = linear_nats(
                expecting_BTD.flatten(0, 1), weight_VD, targets_BT.flatten(), scale
            )
        nats_BT = flat_BT.view_as(targets_BT).cpu()
        nats_BT[~before.known_B, 0] = torch.nan
        return [row[: len(new)].clone() for row, new in zip(nats_BT, ids, strict=True)]

    @torch.inference_mode()
    def _expected(self, decoder: KeptDecoder) -> Tensor:
        """Logits of the next token of each row, on the host."""
        return decoder.logits(self._at.place.last_BD).cpu()

    def _sampled(
        self,
        max_tokens: int,
        sampling: Sampling,
        spoken: dict[int, Spoken],
        decoder: KeptDecoder,
    ) -> Iterator[list[int | None]]:
        """One token for each row that goes on, until none does."""
        going, chance = set(range(self.rows)), sampling.generators(self.rows)
        ends = sampling.ends
        nothing: list[list[int]] = [[]] * self.rows
        for _ in range(max_tokens):
            logits_BV = self._expected(decoder)
            recent = nothing if sampling.repetition_penalty == 1.0 else self.recent
            tokens: list[int | None] = [None] * self.rows
            for row in sorted(going):
                token = sampling.choose(logits_BV[row], recent[row], chance[row])
                if token in ends:
                    going.remove(row)
                else:
                    tokens[row] = token
            if not going:
                return
            ids = [host_ids([] if t is None else [t]) for t in tokens]
            self._advance(ids, decoder)
            yield tokens
            for row, heard in spoken.items():
                if (said := tokens[row]) is not None:
                    heard.push(said)
                    going -= {row} if heard.ended else set()
            if not going:
                return

    def _numbers(self) -> AbstractContextManager[None]:
        """Those in which products are computed."""
        return autocast(self.precision, self.model.embedding.weight.device)

    def _spoken(self, sampling: Sampling) -> dict[int, Spoken]:
        """What listens in each row for strings that end the text, if there are any."""
        if not sampling.texts:
            return {}
        tokenizer = self._needed_tokenizer()
        return {row: Spoken(tokenizer, ids, sampling.texts) for row, ids in enumerate(self.recent)}

    def _needed_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                "the model has no tokenizer, and text needs one: use a model that melodi.load gave"
            )
        return self.tokenizer

    def _check_one_row(self, instead: str) -> None:
        if self.rows != 1:
            raise ValueError(f"the reader has {self.rows} rows: use {instead}")


def check_int8(int8: bool, precision: str, device: torch.device) -> None:
    """Weights of one byte are for a CPU, and stand in for those of four."""
    if int8 and precision != "fp32":
        raise ValueError(f"int8 weights and precision {precision} exclude each other: choose one")
    if int8 and device.type != "cpu":
        raise ValueError(
            f"int8 weights are for a CPU, and the model is on {device}: leave them out"
        )


@contextlib.contextmanager
def evaluating(model: LanguageModel) -> Iterator[None]:
    """The model without dropout; afterwards every part is in the mode that it was in."""
    modules: list[nn.Module | None] = [model]
    for module in modules:  # model.modules() takes several times as long, and each token pays it
        if module is not None:
            modules.extend(module._modules.values())
    training = [module for module in modules if module is not None and module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
