"""From tokens to segments: how rows walk through documents, in training and in evaluation."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from melodi.data.segments import NONE, Segment, Walker
from melodi.data.store import Documents


def documents_of(lengths: list[int]) -> Documents:
    """Every token of every document is different, so that its place can be read off."""
    ends = np.cumsum(lengths)
    return Documents.in_memory(
        [np.arange(end - n, end) + 1 for n, end in zip(lengths, ends, strict=True)]
    )


def predictions(documents: Documents) -> dict[int, list[tuple[int, int]]]:
    """The n - 1 predictions of each document that has any, by its number."""
    return {
        i: [(int(t), int(t) + 1) for t in documents[i][:-1]]
        for i in range(len(documents))
        if len(documents[i]) >= 2
    }


def walks(segments: list[Segment], row: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """Each document that a row began, with the predictions that it gave."""
    found: list[tuple[int, list[tuple[int, int]]]] = []
    for segment in segments:
        if segment.documents[row] == NONE:
            assert not segment.starts[row]
            assert (segment.targets[row] < 0).all()
            continue
        if segment.starts[row]:
            found.append((int(segment.documents[row]), []))
        document, pairs = found[-1]
        assert (document, len(pairs)) == (segment.documents[row], segment.positions[row])
        both = zip(segment.tokens[row].tolist(), segment.targets[row].tolist(), strict=True)
        pairs += [pair for pair in both if pair[1] >= 0]
    return found


def assert_equal(a: Segment, b: Segment) -> None:
    for name in ("tokens", "targets", "starts", "positions", "documents"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda x: max(x) >= 2)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 9), st.integers(0, 3), st.integers(1, 4))
def test_training_walks_every_document_once_an_epoch(
    lengths: list[int], num_rows: int, length: int, seed: int, turns: int
) -> None:
    """In each epoch each document of two tokens or more is walked once, by one row, from start to
    end: n-1 predictions of the next token across segment edges, then padding. Sets of rows that
    take turns are no more than there are documents for."""
    documents = documents_of(lengths)
    walker = Walker.shuffled(documents, num_rows, length, seed, turns=turns)
    whole = predictions(documents)
    assert walker.turns == max(min(turns, len(whole) // num_rows), 1)
    segments = []
    while walker.epoch < 3:
        segments.append(walker.next())
    found = []
    for turn in range(walker.turns):
        for row in range(num_rows):
            *done, last = walks(segments[turn :: walker.turns], row)
            assert all(pairs == whole[document] for document, pairs in done)
            assert last[1] == whole[last[0]][: len(last[1])]
            found += [*done, last]
    counts = [sum(document == i for document, _ in found) for i in whole]
    assert sum(counts) == round(walker.epoch * len(whole))
    assert min(counts) >= 3
    assert max(counts) - min(counts) <= 1
    filled = sum(-(-(len(pairs)) // length) for _, pairs in found)
    assert filled == num_rows * len(segments)  # no segment is empty or more than filled
    for segment in segments:
        assert (segment.tokens[segment.targets < 0] == 0).all()


@given(LENGTHS, st.integers(1, 5), st.integers(1, 9), st.data())
def test_evaluation_walks_the_chosen_documents_once(
    lengths: list[int], num_rows: int, length: int, data: st.DataObject
) -> None:
    """Each chosen document of two tokens or more is walked once from start to end, the longest
    first, rows that find nothing more are padding, and no segment is padding alone."""
    documents = documents_of(lengths)
    everything = list(range(len(lengths)))
    chosen = data.draw(st.none() | st.lists(st.sampled_from(everything), unique=True))
    segments = list(Walker.once(documents, num_rows, length, chosen))
    found = [walk for row in range(num_rows) for walk in walks(segments, row)]
    whole = predictions(documents)
    expected = [i for i in (everything if chosen is None else chosen) if i in whole]
    assert sorted(document for document, _ in found) == sorted(expected)
    assert all(pairs == whole[document] for document, pairs in found)
    assert all((segment.targets >= 0).any() for segment in segments)
    begun = [lengths[i] for segment in segments for i in segment.documents[segment.starts]]
    assert begun == sorted(begun, reverse=True)


@given(LENGTHS, st.integers(1, 3), st.integers(1, 3), st.booleans(), st.integers(0, 3))
def test_processes_walk_together_and_read_their_own_rows(
    lengths: list[int], world: int, each: int, for_ever: bool, seed: int
) -> None:
    """The rows of all processes, side by side, are those of a process that has them all; each knows
    the predictions of all, and reads the tokens of no other process's documents."""

    class Watched(Documents):
        def __getitem__(self, i: int) -> np.ndarray:
            read.append(i)
            return super().__getitem__(i)

    read: list[int] = []
    whole = documents_of(lengths)
    documents = Watched(whole.tokens, np.stack([whole.offsets, whole.offsets]))
    shares = [None, *(range(i * each, (i + 1) * each) for i in range(world))]
    if for_ever:
        walkers = [Walker.shuffled(documents, world * each, 4, seed, mine, 2) for mine in shares]
        steps = zip(*([walker.next() for _ in range(20)] for walker in walkers), strict=True)
    else:
        walkers = [Walker.once(documents, world * each, 4, None, mine) for mine in shares]
        steps = zip(*walkers, strict=True)
    for everyone, *parts in steps:
        for i, part in enumerate(parts):
            assert_equal(part, everyone.take(slice(i * each, (i + 1) * each)))
    assert len({walker.predictions for walker in walkers}) == 1
    alone = Walker.shuffled(documents, world * each, 4, seed, range(each))
    read.clear()
    segment = alone.next()
    assert read == [i for i in segment.documents if i != NONE]
    everyone = Walker.shuffled(documents, world * each, 4, seed).next()
    assert alone.predictions == (everyone.targets >= 0).sum()


@given(LENGTHS, st.integers(1, 4), st.integers(0, 40), st.integers(0, 3), st.integers(1, 3))
def test_walkers_resume_exactly(
    lengths: list[int], num_rows: int, step: int, seed: int, turns: int
) -> None:
    """The state after any step, through JSON, leads to the same segments as going on."""
    documents = documents_of(lengths)
    walker, resumed = (Walker.shuffled(documents, num_rows, 4, seed, turns=turns) for _ in range(2))
    for _ in range(step):
        walker.next()
    resumed.load_state_dict(json.loads(json.dumps(walker.state_dict())))
    for _ in range(20):
        assert_equal(walker.next(), resumed.next())
    assert walker.state_dict() == resumed.state_dict()


def test_saved_positions_are_a_format() -> None:
    """Checkpoints hold this; the order of documents is part of it."""
    walker = Walker.shuffled(documents_of([9, 1, 4, 30, 6]), 3, 4, seed=5)
    for _ in range(4):
        walker.next()
    assert walker.state_dict() == {
        "epoch": 1,
        "place": 2,
        "documents": [3, 0, 3],
        "positions": [8, 4, 16],
        "turn": 0,
    }


@given(LENGTHS, st.integers(1, 4), st.integers(1, 5), st.integers(1, 200))
def test_the_length_of_a_run_in_epochs(
    lengths: list[int], num_rows: int, length: int, steps: int
) -> None:
    """How many epochs so many steps are is known beforehand, but for the documents that the rows
    are reading at the end."""
    documents = documents_of(lengths)
    walker = Walker.shuffled(documents, num_rows, length)
    for _ in range(steps):
        walker.next()
    # At most a document a row has been taken and not read yet, and within an epoch documents of
    # different lengths count alike.
    segments = [-(-(n - 1) // length) for n in lengths if n >= 2]
    ahead = num_rows * max(segments) / sum(segments)
    assert abs(walker.epoch - walker.epochs_in(steps)) <= 1 + ahead


def test_seeds_and_epochs_shuffle_differently() -> None:
    """The order is another one for each seed and each epoch."""
    documents = documents_of([2] * 50)

    def firsts(seed: int) -> list[int]:
        walker = Walker.shuffled(documents, 1, 4, seed)
        return [int(walker.next().tokens[0, 0]) for _ in range(100)]

    assert firsts(1) == firsts(1)
    assert firsts(1) != firsts(2)
    assert firsts(1)[:50] != firsts(1)[50:]
    assert sorted(firsts(1)[:50]) == sorted(firsts(1)[50:])


def test_a_long_document_does_not_starve_short_ones() -> None:
    """A very long document takes one row, and all others pass by in the rest."""
    for seed in range(5):
        walker = Walker.shuffled(documents_of([50_000] + [5] * 60), 4, 4, seed)
        segments = [walker.next() for _ in range(12)]
        begun = {int(i) for segment in segments for i in segment.documents[segment.starts]}
        assert len(begun - {0}) >= 3 * 12
        assert sum(document == 0 for document in walker.row_documents) <= 1


def test_walkers_refuse_what_they_cannot_walk() -> None:
    """No document with two tokens, no rows, and a state of another store or size are refused."""
    with pytest.raises(ValueError, match="none of the 2 documents has two tokens"):
        Walker.shuffled(documents_of([1, 0]), 2, 4)
    with pytest.raises(ValueError, match="num_rows=0"):
        Walker.shuffled(documents_of([5]), 0, 4)
    walker = Walker.shuffled(documents_of([50, 50]), 2, 4)
    walker.next()
    with pytest.raises(ValueError, match="has 2 rows and this run has 3"):
        Walker.shuffled(documents_of([50, 50]), 3, 4).load_state_dict(walker.state_dict())
    with pytest.raises(ValueError, match="is not in these documents"):
        Walker.shuffled(documents_of([3, 3]), 2, 4).load_state_dict(walker.state_dict())
