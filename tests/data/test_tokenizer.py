"""Text to ids and back: what we train loses nothing, what others made is taken as it is."""

import functools
import io
import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer

from melodi.data import text
from melodi.data.tokenizer import (
    END_OF_DOCUMENT,
    ByteTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
    opening,
    train_tokenizer,
)

TEXTS = ["the cat sat on the mat, the cat sat. " * 20, "def f(x):\n    return x\n" * 20]
TRAINED = train_tokenizer(TEXTS, 280)


VOCAB_SIZES = {"bpe": 70, "unigram": 50}


@functools.cache
def sentencepiece(kind: str) -> bytes:
    """A small model of the kinds that others use: byte pairs that keep the text as it is, and a
    unigram model that normalises it."""
    sentence = "the cat x1 (a b). é sat, on the mat. It was the best of times"
    words, model = 9 * sentence.split(), io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([sentence, *(word[i:] for word in words for i in range(3))]),
        model_writer=model,
        model_type=kind,
        vocab_size=VOCAB_SIZES[kind],
        normalization_rule_name="identity" if kind == "bpe" else "nmt_nfkc",
        remove_extra_whitespaces=kind != "bpe",
        minloglevel=2,
    )
    return model.getvalue()


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), TRAINED])
@given(text=st.text())
@example(text=f"a {END_OF_DOCUMENT} b")
@example(text="\r\n\0\t  \ufeff\u200d👩‍👩‍👧")
def test_round_trip_loses_nothing(tokenizer: Tokenizer, text: str) -> None:
    """Any text, special tokens spelt out in it included, comes back; the end token does not."""
    ids = tokenizer.encode(text)
    end = tokenizer.end_of_document
    assert end is not None
    assert end not in ids
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode([*ids, end]) == text


def test_training_is_deterministic() -> None:
    """The same texts give the same vocabulary, of the size asked for, end token included."""
    again = train_tokenizer(TEXTS, 280)
    assert again.digest() == TRAINED.digest()
    assert TRAINED.vocab_size == 280
    assert train_tokenizer(TEXTS, 270).digest() != TRAINED.digest()


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), TRAINED])
def test_saved_and_loaded_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A folder with a saved tokenizer gives it back, digest and end of document included."""
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.digest() == tokenizer.digest()
    assert loaded.end_of_document == tokenizer.end_of_document
    assert loaded.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


def test_foreign_json_is_taken_as_it_is(tmp_path: Path) -> None:
    """A tokenizer.json of others has no end of document, and its truncation is not obeyed."""
    TRAINED.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    definition = json.loads(path.read_text().replace(END_OF_DOCUMENT, "<s>"))
    definition["truncation"] = dict(
        direction="Right", max_length=4, strategy="LongestFirst", stride=0
    )
    path.write_text(json.dumps(definition))
    tokenizer = load_tokenizer(path)
    assert tokenizer.end_of_document is None
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_is_taken_as_it_is(kind: str, tmp_path: Path) -> None:
    """A SentencePiece model has its own size, no end of document, and saves as the same file."""
    (tmp_path / "own.model").write_bytes(sentencepiece(kind))
    tokenizer = load_tokenizer(tmp_path / "own.model")
    assert tokenizer.vocab_size == VOCAB_SIZES[kind]
    assert tokenizer.end_of_document is None
    assert tokenizer.decode(tokenizer.encode("It was the best of times")) == (
        "It was the best of times"
    )
    tokenizer.save(tmp_path)
    assert (tmp_path / "tokenizer.model").read_bytes() == sentencepiece(kind)
    assert load_tokenizer(tmp_path).digest() == tokenizer.digest()


@pytest.mark.parametrize("kind", [None, "bpe", "unigram"])
@given(words=st.lists(st.sampled_from(["the", "cat", "x1", "(a", "b).\n", "\n\n", " ", "é"])))
def test_pieces_encode_as_the_whole(kind: str | None, words: list[str]) -> None:
    """A text cut before a space between two words has the ids of the whole text."""
    tokenizer = SentencePieceTokenizer(sentencepiece(kind)) if kind else TRAINED
    whole = " ".join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "PIECE", 16)
        first, *rest = [*text.cut([whole])] or [""]
    edges = [before[-1:] + after[:2] for before, after in itertools.pairwise([first, *rest])]
    if all(re.fullmatch(r"\S \S", edge) for edge in edges):
        ids = [tokenizer.encode(first), *map(tokenizer.encode_next, rest)]
        assert list(itertools.chain(*ids)) == tokenizer.encode(whole)


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("none.model", None, "'.*none.model' does not exist: give a SentencePiece"),
        ("bad.model", b"not a model", "'.*bad.model' is damaged, or something else"),
        ("bad.json", b'{"version": 1}', "'.*bad.json' is damaged, or something else"),
        ("bad.txt", b"text", "'.*bad.txt' is of no known kind"),
    ],
)
def test_bad_tokenizers_are_refused(
    name: str, contents: bytes | None, message: str, tmp_path: Path
) -> None:
    """A tokenizer that is missing, damaged or of no known kind is refused in one line."""
    if contents is not None:
        (tmp_path / name).write_bytes(contents)
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    """A folder that holds no tokenizer is refused, and a vocabulary without room for all bytes."""
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"vocab_size=256 is too small: .* need 257"):
        train_tokenizer(TEXTS, 256)
    with pytest.raises(ValueError, match=r"vocab_size=1048577 is too large: give at most 1048576"):
        train_tokenizer(TEXTS, (1 << 20) + 1)


def test_every_vocabulary_opens_a_text() -> None:
    """With a line break where it has one; a SentencePiece model that drops it with its own
    beginning."""
    for tokenizer in (ByteTokenizer(), TRAINED):
        assert tokenizer.decode(opening(tokenizer)) == "\n"
    pieces = SentencePieceTokenizer(sentencepiece("unigram"))
    assert pieces.encode("\n") == []
    assert opening(pieces) == [pieces.engine.bos_id()]
