"""Batches are built ahead of the step, and neither they nor what is saved can tell."""

import json

import numpy as np
import pytest
import torch
from zoo import KINDS

from melodi import LanguageModel
from melodi.boundary import ids_checked
from melodi.data.segments import Walker
from melodi.data.store import Documents
from melodi.training.batches import Batches

LENGTHS = (9, 1, 40, 30, 6, 2, 17)


def walker(mine: range | None = None) -> Walker:
    documents = Documents.in_memory([np.arange(length) for length in LENGTHS])
    return Walker.shuffled(documents, 4, 5, seed=3, mine=mine)


@pytest.mark.parametrize("mine", [None, range(2, 4)])
def test_batches_are_the_walk(mine: range | None) -> None:
    """Each batch is the next segment of these rows, and says where the walk stands after it, though
    the walker itself is one segment further."""
    plain, batches = walker(mine), Batches(walker(mine), vocab_size=40)
    for _ in range(20):
        segment, batch = plain.next(), batches.next()
        np.testing.assert_array_equal(batch.tokens_BT.numpy(), segment.tokens)
        np.testing.assert_array_equal(batch.targets_BT.numpy(), segment.targets)
        np.testing.assert_array_equal(batch.starts_B.numpy(), segment.starts)
        assert batch.predictions == plain.predictions
        assert batches.state_dict() == plain.state_dict()


@pytest.mark.parametrize("taken", [0, 1, 7])
def test_what_was_built_and_not_used_is_built_again(taken: int) -> None:
    """From the saved position others go on with the batch that was waiting, and so do the same
    batches when they are put back."""
    batches = Batches(walker(), vocab_size=40)
    for _ in range(taken):
        batches.next()
    saved = json.loads(json.dumps(batches.state_dict()))
    expected = [batches.next() for _ in range(5)]
    other = Batches(walker(), vocab_size=40)
    for again in (other, batches):
        again.load_state_dict(saved)
        assert again.state_dict() == saved
        for ours, theirs in zip((again.next() for _ in range(5)), expected, strict=True):
            assert torch.equal(ours.tokens_BT, theirs.tokens_BT)
            assert ours.after == theirs.after


def test_what_goes_wrong_ahead_is_said_by_the_step_that_meets_it() -> None:
    """An id outside the vocabulary is refused on the host, when its batch is asked for."""
    batches = Batches(walker(), vocab_size=39)
    with pytest.raises(ValueError, match="target id 39 is outside the vocabulary: ids go from 0"):
        _ = [batches.next() for _ in range(20)]


def test_checked_ids_are_not_looked_at_again() -> None:
    """Where the host has checked ids, the model does not wait for its device to look at them."""
    model = LanguageModel(KINDS["melodi"])
    tokens = torch.full((1, 3), model.config.vocab_size)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        model(tokens, model.empty_state(1))
    with ids_checked(), pytest.raises(IndexError):  # the embedding's own complaint
        model(tokens, model.empty_state(1))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        model(tokens, model.empty_state(1))
