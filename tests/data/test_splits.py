"""Which documents are held out, and that the vocabulary knows nothing of them."""

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from texts import stories, texts_of, write_folder

from melodi.data import vocabulary
from melodi.data.corpus import open_source
from melodi.data.prepare import prepare
from melodi.data.splits import Shares, assign_splits, place_of
from melodi.data.tokenizer import train_tokenizer
from melodi.data.vocabulary import sample


@given(st.integers(1, 300), st.integers(0, 50))
def test_splits_are_never_empty_where_possible(count: int, seed: int) -> None:
    """One document trains, of two one is held out, three or more fill every split."""
    places = np.array([place_of(f"{seed}/{i}") for i in range(count)])
    splits = assign_splits(places, np.full(count, -1), Shares(0.02, 0.02))
    found = set(splits.tolist())
    assert 0 in found
    assert len(found) == min(count, 3)


@given(st.integers(300, 600), st.integers(1, 300))
def test_adding_documents_moves_no_other(count: int, more: int) -> None:
    """A document's split depends on its name alone, and the shares are about those asked for."""
    places = np.array([place_of(str(i)) for i in range(count + more)])
    shares = Shares(0.1, 0.1)
    before = assign_splits(places[:count], np.full(count, -1), shares)
    after = assign_splits(places, np.full(count + more, -1), shares)
    assert (after[:count] == before).all()
    assert 0.03 < (before == 1).mean() < 0.2
    assert 0.03 < (before == 2).mean() < 0.2


def test_the_sample_is_even_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary is trained on a bounded part of the training documents, from all over them."""
    monkeypatch.setattr(vocabulary, "SAMPLE_CHARACTERS", 1000)
    texts = {f"{i:04}.txt": f"{i:04}" * 5 for i in range(1000)}
    source = open_source(write_folder(tmp_path / "in", texts))
    numbers = [int(block[:4]) for block in sample([source], Shares(0.2, 0.2))]
    assert 25 <= len(numbers) <= 50
    assert max(np.diff(numbers)) < 100
    held_out = Shares(0.2, 0.2).splits(np.array([place_of(f"{i:04}.txt") for i in numbers]))
    assert not held_out.any()


@pytest.mark.parametrize("seed", range(12))
def test_the_vocabulary_is_that_of_the_training_documents(seed: int, tmp_path: Path) -> None:
    """A trained vocabulary equals one trained on the documents of the training split and nothing
    else, also where documents had to move to fill a split, among duplicates and empty ones, and
    where the source says its splits."""
    draw = random.Random(seed)
    texts: dict[str, str | bytes] = dict(stories(draw.randrange(1, 9), seed))
    texts |= {f"{seed}-{i}.txt": draw.choice(["", " ", *texts.values()]) for i in range(4)}
    if seed % 4 == 0:
        texts = {f"{draw.choice(['train', 'dev'])}/{name}": text for name, text in texts.items()}
        texts |= {"train/x.txt": "one more of these", "dev/y.txt": "and another of those"}
    shares = dict(validation_share=0.3, test_share=0.3 * (seed % 2))
    store = prepare(write_folder(tmp_path / "in", texts), tmp_path / "out", 300, **shares)
    expected = train_tokenizer(texts_of(store, "train"), 300)
    assert len(store.split("train")) > 0
    assert store.tokenizer.digest() == expected.digest()
