"""A SentencePiece vocabulary in transformers: the engine's ids for every text, however odd."""

import functools
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer
from tiny_runs import make_store, start

from melodi import StreamReader, load
from melodi.cli import main
from melodi.data.prepare import prepare
from melodi.data.tokenizer import SentencePieceTokenizer

transformers = pytest.importorskip("transformers")

from melodi.hf import MelodiSentencePiece  # noqa: E402

KINDS = {
    "bpe": dict(model_type="bpe", normalization_rule_name="identity", byte_fallback=True),
    "unigram": dict(model_type="unigram", pad_id=3),
    "bare": dict(model_type="bpe", bos_id=-1, eos_id=-1, add_dummy_prefix=False),
}
SENTENCE = "melodi reads a book, and (a b). é remembers <s> It was the best of times"
ODD = [
    "  two  spaces \n\n a line ",
    "spelt out: <s></s><unk><pad> and on",
    "naïve \ufb01ne\u2026 東京 🙂\u200d\t\r\x00",
    "\u2581a\u2581",
    "",
]


@functools.cache
def definition(kind: str) -> bytes:
    model = io.BytesIO()
    parts = [SENTENCE, *(word[i:] for word in 9 * SENTENCE.split() for i in range(3))]
    fallback = 256 if KINDS[kind].get("byte_fallback") else 0
    SentencePieceTrainer.train(
        sentence_iterator=iter(parts),
        model_writer=model,
        vocab_size=50 + fallback,
        minloglevel=2,
        **KINDS[kind],
    )
    return model.getvalue()


@functools.cache
def pair(kind: str, folder: Path) -> tuple[SentencePieceTokenizer, MelodiSentencePiece]:
    """Ours, and what transformers loads after it was saved once."""
    ours = SentencePieceTokenizer(definition(kind))
    ours.save(folder)
    MelodiSentencePiece(str(folder / "tokenizer.model")).save_pretrained(folder / "saved")
    return ours, MelodiSentencePiece.from_pretrained(folder / "saved")


@pytest.fixture(scope="module", params=KINDS)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[SentencePieceTokenizer, MelodiSentencePiece]:
    return pair(request.param, tmp_path_factory.mktemp(request.param))


@given(text=st.text() | st.sampled_from(ODD) | st.text(alphabet=SENTENCE + "<s>/\u2581"))
def test_the_same_ids(both: tuple[SentencePieceTokenizer, MelodiSentencePiece], text: str) -> None:
    """Ids and text are the engine's, control symbols that are spelt out included."""
    ours, theirs = both
    ids = ours.encode(text)
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == ours.decode(ids)


def test_batches_are_padded(both: tuple[SentencePieceTokenizer, MelodiSentencePiece]) -> None:
    """On the left, with a piece that is in the vocabulary; nothing is added to it."""
    ours, theirs = both
    batch = theirs(["a", "It was the best"], padding=True)
    count = len(batch["input_ids"][1]) - len(ours.encode("a"))
    assert batch["attention_mask"][0] == [0] * count + [1] * len(ours.encode("a"))
    assert batch["input_ids"][0][count:] == ours.encode("a")
    assert len(theirs) == theirs.vocab_size == ours.vocab_size
    assert all(0 <= i < ours.vocab_size for i in batch["input_ids"][0])


def test_an_exported_run(tmp_path: Path) -> None:
    """A run over a SentencePiece vocabulary is exported, found by the auto classes, and says what
    it says here."""
    make_store(tmp_path)
    (tmp_path / "own.model").write_bytes(definition("unigram"))
    store = prepare(
        sorted(tmp_path.glob("*.txt")), tmp_path / "pieces", tokenizer=f"{tmp_path}/own.model"
    )
    start(tmp_path / "run", store, steps=1).run_all()
    main(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert isinstance(tokenizer, MelodiSentencePiece)
    model, prompt = load(tmp_path / "run"), "It was a book"
    reader = StreamReader(model)
    reader.read(prompt)
    ids = model.tokenizer.encode(prompt) + list(reader.generate(9, temperature=0))
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    how = dict(max_new_tokens=9, do_sample=False)
    said = exported.generate(**tokenizer(prompt, return_tensors="pt"), **how)
    assert said[0].tolist() == ids
    assert tokenizer.decode(said[0]) == model.tokenizer.decode(ids)
    write = transformers.pipeline("text-generation", str(tmp_path / "out"), device="cpu")
    (text,) = write(prompt, **how)
    assert text["generated_text"].startswith(prompt)
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == definition("unigram")
