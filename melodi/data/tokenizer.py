"""Text to token ids and back: three kinds of vocabulary behind one small protocol.

- `ByteTokenizer`: the 256 bytes of UTF-8 and an end-of-document token. Lossless.
- `BPETokenizer`: a `tokenizer.json`. `train_tokenizer` makes byte-level ones, which are lossless
  and have an end-of-document token; those of others are taken as they are.
- `SentencePieceTokenizer`: a `*.model`, taken as it is (the paper's vocabularies are such).

A tokenizer is read from text or bytes and keeps them, so that saving writes what was loaded and its
digest does not depend on the version of a library. Documents are plain text: a special token spelt
out in a document is read as ordinary characters.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from melodi.files import replacing, write_text

END_OF_DOCUMENT = "<|end_of_document|>"
SMALLEST_BPE = 257  # every byte, and the end of a document
LARGEST_BPE = 1 << 20  # several times the largest in use; room for all of it is taken at once


class Tokenizer(Protocol):
    vocab_size: int
    end_of_document: int | None
    """Closes each document of a store; None in vocabularies that are taken as they are."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with no special tokens added."""
        ...

    def encode_next(self, text: str) -> list[int]:
        """The ids of a piece that continues a text which was cut before a space: those that the
        piece has in the whole."""
        ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def save(self, folder: Path) -> None:
        """Writes the file that `load_tokenizer(folder)` finds."""
        ...

    def digest(self) -> str: ...


def load_tokenizer(path: str | Path) -> Tokenizer:
    """From a *.model, a *.json, a folder that holds a saved tokenizer, or "bytes"."""
    if str(path) == "bytes":
        return ByteTokenizer()
    path = Path(path)
    if path.is_dir():
        path = _saved_in(path)
    if not path.is_file():
        raise ValueError(
            f"tokenizer {str(path)!r} does not exist: "
            "give a SentencePiece *.model, a tokenizer.json, or bytes"
        )
    if path.name == ByteTokenizer.FILE:
        return ByteTokenizer()
    try:
        if path.suffix == ".model":
            return SentencePieceTokenizer(path.read_bytes())
        if path.suffix == ".json":
            return BPETokenizer(path.read_text("utf-8"))
    except OSError:
        raise
    # The libraries raise RuntimeError and bare Exception for files they cannot make sense of.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"tokenizer {str(path)!r} is damaged, or something else ({reason}): give another"
        ) from error
    raise ValueError(f"tokenizer {str(path)!r} is of no known kind: give a *.model or a *.json")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A new byte-level BPE vocabulary; smaller than asked for if the texts hold too few pairs."""
    check_vocab_size(vocab_size)
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers, trainers

    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    return BPETokenizer(engine.to_str())


def check_vocab_size(vocab_size: int) -> None:
    """Refuses a size that cannot be trained."""
    if vocab_size < SMALLEST_BPE:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: every byte and the end of a document need "
            f"{SMALLEST_BPE}; give at least that, or --tokenizer bytes"
        )
    if vocab_size > LARGEST_BPE:
        raise ValueError(f"vocab_size={vocab_size} is too large: give at most {LARGEST_BPE}")


def opening(tokenizer: Tokenizer) -> list[int]:
    """What comes before a text that nothing comes before: a line break, which every model knows,
    while the end of a document is never followed by anything in training. SentencePiece models
    without one open with their own beginning of a text, or with what they do not know."""
    ids = tokenizer.encode("\n")
    if not ids and isinstance(tokenizer, SentencePieceTokenizer):
        engine = tokenizer.engine
        ids = [engine.bos_id() if engine.bos_id() >= 0 else max(engine.unk_id(), 0)]
    return ids or [0]


class ByteTokenizer:
    FILE = "tokenizer_bytes.json"
    vocab_size = 257
    end_of_document: int | None = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_next(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i != self.end_of_document).decode(errors="replace")

    def save(self, folder: Path) -> None:
        write_text(folder / self.FILE, json.dumps({"kind": "bytes"}))

    def digest(self) -> str:
        return _digest(b"bytes")


class BPETokenizer:
    FILE = "tokenizer.json"

    def __init__(self, definition: str) -> None:
        from tokenizers import Tokenizer as Engine

        self.definition = definition
        self.engine = Engine.from_str(definition)
        self.engine.no_truncation()
        self.engine.no_padding()
        self.engine.encode_special_tokens = True
        # Ids may have gaps, so counting them is not enough.
        self.vocab_size = max(self.engine.get_vocab().values()) + 1
        self.end_of_document: int | None = self.engine.token_to_id(END_OF_DOCUMENT)

    def encode(self, text: str) -> list[int]:
        # The only call that does not work out offsets takes a list.
        (encoding,) = self.engine.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids

    def encode_next(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self.engine.decode([int(i) for i in ids], skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        write_text(folder / self.FILE, self.definition)

    def digest(self) -> str:
        return _digest(self.definition.encode())


class SentencePieceTokenizer:
    FILE = "tokenizer.model"
    end_of_document: int | None = None

    def __init__(self, definition: bytes) -> None:
        from sentencepiece import SentencePieceProcessor

        self.definition = definition
        self.engine = SentencePieceProcessor(model_proto=definition)
        self.vocab_size = self.engine.get_piece_size()
        # Most models put a space before every text, and would double that of a continued piece.
        self.adds_space = self.encode("a b") == self.encode("a") + self.encode("b")

    def encode(self, text: str) -> list[int]:
        return self.engine.encode(text)

    def encode_next(self, text: str) -> list[int]:
        return self.encode(text[1:] if self.adds_space and text.startswith(" ") else text)

    def decode(self, ids: Iterable[int]) -> str:
        return self.engine.decode([int(i) for i in ids])

    def save(self, folder: Path) -> None:
        with replacing(folder / self.FILE) as partial:
            partial.write_bytes(self.definition)

    def digest(self) -> str:
        return _digest(self.definition)


TOKENIZER_FILES = (BPETokenizer.FILE, SentencePieceTokenizer.FILE, ByteTokenizer.FILE)


def _saved_in(folder: Path) -> Path:
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            return folder / name
    raise ValueError(
        f"folder {str(folder)!r} holds no tokenizer: one of {', '.join(TOKENIZER_FILES)}"
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
