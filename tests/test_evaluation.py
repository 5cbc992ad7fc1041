"""Figures and how far they can be trusted: intervals over documents, sums of each document."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_runs import make_store, model_config

from melodi import LanguageModel
from melodi.data.store import TokenStore
from melodi.evaluation import intervals
from melodi.evaluation.documents import evaluate
from melodi.evaluation.intervals import Interval, bootstrap, paired
from melodi.evaluation.tallies import PerDocument


def losses(random: np.random.Generator, count: int) -> tuple[NDArray[np.float64], NDArray[np.int_]]:
    """Documents of very different lengths, whose loss is 3 nats on average."""
    predictions = random.integers(50, 2000, count)
    return predictions * random.normal(3.0, 0.4, count), predictions


def test_an_interval_is_of_the_figure() -> None:
    """The value is the ratio of the totals, whatever the lengths; documents without predictions
    change nothing."""
    nats, predictions = losses(np.random.default_rng(0), 12)
    found = bootstrap(nats, predictions)
    assert found.value == pytest.approx(math.exp(nats.sum() / predictions.sum()), rel=1e-12)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value < found.high
    assert bootstrap([*nats, 0.0], [*predictions, 0]) == found
    assert bootstrap(nats, predictions, seed=1) != found


@pytest.mark.parametrize("count", [3, 6, 40])
def test_intervals_hold_the_truth(count: int) -> None:
    """Of many sets of documents about 95 in 100 have an interval that holds the true figure, also
    where there are only a few documents; the bare quantiles do not reach that."""
    random = np.random.default_rng(count)
    sets = [losses(random, count) for _ in range(300)]
    found = [intervals.ratio(*one, samples=500) for one in sets]
    ends = np.array([(one.value, one.low, one.high) for one in found])
    error, below, above = 3 - ends[:, 0], ends[:, 1] - ends[:, 0], ends[:, 2] - ends[:, 0]
    held = np.mean((below < error) & (error < above))
    # Three standard errors of 300 trials are 0.038; documents of unequal lengths cost a little.
    assert 0.90 <= held <= 0.985
    stretch = intervals.widening(count)
    assert np.mean((below < error * stretch) & (error * stretch < above)) < held


def test_pairs_decide_what_intervals_leave_open() -> None:
    """A difference that is the same in every document is found, although documents differ by far
    more; and no difference is not taken for one."""
    random = np.random.default_rng(0)
    nats, predictions = losses(random, 20)
    better = nats - predictions * random.normal(0.02, 0.01, 20)
    a, b = bootstrap(better, predictions), bootstrap(nats, predictions)
    assert a.high is not None
    assert b.low is not None
    assert a.high > b.low
    found = paired(better, nats, predictions)
    assert found.sign == -1
    assert found.value == pytest.approx(-0.02, abs=0.01)
    assert paired(nats, better, predictions).sign == 1
    same = nats + predictions * random.normal(0.0, 0.05, 20)
    assert paired(same, nats, predictions).sign == 0


def test_one_document_has_no_interval() -> None:
    """It says so, and decides nothing."""
    one = paired([5.0, 1.0], [6.0, 1.0], [10, 0])
    assert one == Interval(None, -0.1, None)
    assert one.sign == 0
    assert "no interval" in str(one)
    assert bootstrap([20.0], [10]).value == pytest.approx(math.exp(2))
    for bad in (([], []), ([1.0, 2.0], [1])):
        with pytest.raises(ValueError, match="document"):
            bootstrap(*bad)
    with pytest.raises(ValueError, match="same documents"):
        paired([1.0], [1.0, 2.0], [1, 1])


def test_student() -> None:
    """The quantiles of the printed tables."""
    for freedom, quantile in ((1, 12.7062), (2, 4.3027), (5, 2.5706), (30, 2.0423)):
        assert intervals.student(freedom) == pytest.approx(quantile, abs=2e-4)
    assert intervals.widening(100_000) == pytest.approx(1, abs=1e-4)


def test_many_documents_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that the draws need is bounded, and each sample is there once."""
    nats, predictions = losses(np.random.default_rng(0), 50)
    whole = intervals.draws(nats, predictions, 1000, 0)
    monkeypatch.setattr(intervals, "DRAWN_AT_ONCE", 50 * 300)
    parts = intervals.draws(nats, predictions, 1000, 0)
    assert np.array_equal(whole, parts)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return make_store(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(model_config()).eval()


def test_sums_of_documents_are_those_of_each_alone(store: TokenStore, model: LanguageModel) -> None:
    """What is added up for a document among others is what reading it alone gives, and the totals
    are the sums over documents."""
    documents = store.split("train")
    each = PerDocument(len(documents))
    whole = evaluate(model, documents, rows=3, segment_windows=2, tallies=[each])
    assert each.predictions.sum() == whole.predictions
    assert each.nats.sum() == pytest.approx(whole.nats, rel=1e-12)
    for i in (0, 5, len(documents) - 1):
        alone = evaluate(model, documents, [i], rows=1)
        assert each.nats[i] == pytest.approx(alone.nats, rel=1e-5)
        assert each.predictions[i] == alone.predictions
