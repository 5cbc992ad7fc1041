"""Figures and how far they can be trusted: intervals over documents, sums of each document."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_runs import make_store, model_config
from zoo import KINDS, VOCAB, WINDOW, make

from melodi import LanguageModel
from melodi.data.store import Documents, TokenStore
from melodi.evaluation import intervals
from melodi.evaluation.documents import evaluate
from melodi.evaluation.drops import PARTS, remaining, without
from melodi.evaluation.intervals import Interval, bootstrap, paired
from melodi.evaluation.probes import attention, shares_by_age
from melodi.evaluation.record import Reading, figures
from melodi.evaluation.tallies import PerDocument
from melodi.layers.frame import Probe
from melodi.layers.gate import Gate


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
    assert intervals.widening(3) == pytest.approx(math.sqrt(3 / 2) * 4.30265 / 1.95996, abs=1e-3)


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


def test_one_memory_can_be_left_out(store: TokenStore, model: LanguageModel) -> None:
    """With the gate shut, nothing changes without long-term memory, and without short-term memory
    the model reads as if all were dropped at every window; with the gate open both matter."""
    documents, chosen = store.split("train"), [0, 1, 5]
    (gate,) = [module for module in model.modules() if isinstance(module, Gate)]

    def nats(lacking: str) -> float:
        left = without(model, lacking) if lacking in PARTS else model
        assert left is not None
        return evaluate(left, documents, chosen, with_memory=lacking != "memory").nats

    opened = {lacking: nats(lacking) for lacking in ("nothing", "memory", *PARTS)}
    assert len({round(value, 3) for value in opened.values()}) == 4
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.fill_(-1e9)
    assert nats("long_term") == pytest.approx(nats("nothing"), rel=1e-6)
    assert nats("short_term") == pytest.approx(nats("memory"), rel=1e-6)
    assert nats("long_term") == pytest.approx(opened["long_term"], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_says_which_memory_it_can_lack(kind: str) -> None:
    """Only what has both, and never to the cost of the other."""
    config = model_config(kind)
    left = {part: remaining(config, part) for part in PARTS}
    both = all(config.memory_floats())
    for i, part in enumerate(PARTS):
        found = left[part]
        if found is not None:
            assert both
            assert found.memory_floats()[i] == 0
            assert found.memory_floats()[1 - i] == config.memory_floats()[1 - i]
    if "long" in config.layers and not config.copy_short_to_long:
        assert None not in left.values()
    if set(config.layers) == {"xl", "memorizing"}:
        assert left["long_term"] is not None


def test_loss_by_place(store: TokenStore, model: LanguageModel) -> None:
    """Every prediction is counted once, by its place in the document and in the window, and by
    the windows before it; the first window is the same without memory."""
    documents, window = store.split("train"), model.config.window
    read = Reading(documents, list(range(len(documents))), 3, 2)
    kept, dropped = read(model, "nothing"), read(model, "memory")
    for tally in (*kept.places.values(), *dropped.places.values()):
        assert sum(bucket["predictions"] for bucket in tally.means()) == kept.sums.predictions
        nats = sum(bucket["nats"] * bucket["predictions"] for bucket in tally.means())
        assert nats == pytest.approx(tally.nats.sum())
    first, *later = kept.places["by_window"].means()
    most = int(documents.lengths.max()) - 2
    assert [bucket["first"] for bucket in (first, *later)] == [0, 1, 2, 4, 8, 16, 32][
        : len(later) + 1
    ]
    assert later[-1]["first"] <= most // window < 2 * later[-1]["first"]
    assert first["nats"] == pytest.approx(dropped.places["by_window"].means()[0]["nats"], rel=1e-5)
    assert first["predictions"] == np.minimum(documents.lengths - 1, window).sum()
    starts = kept.places["by_place_in_window"].means()[0]
    assert starts["predictions"] == (-(-(documents.lengths - 1) // window)).sum()
    assert kept.places["by_position"].means()[0]["predictions"] == (documents.lengths > 1).sum()
    record = figures([kept, dropped])
    assert record["perplexity"] == kept.sums.perplexity
    assert record["perplexity_interval"]["value"] == pytest.approx(record["perplexity"])
    worth = record["worth"]["memory"]["value"]
    assert worth == pytest.approx(dropped.sums.loss - kept.sums.loss, rel=1e-6)


def test_attention_says_what_it_is_of(store: TokenStore, model: LanguageModel) -> None:
    """Documents shorter than a window have no past, and are not measured."""
    documents, window = store.split("train"), model.config.window
    found = attention(model, documents, list(range(len(documents))))
    assert found["documents"] == 4
    assert window < found["tokens"] <= 4 * 16 * window
    assert 0 < found["shares"]["past"] < 1
    assert any("/age/2" in name for name in found["shares"])


def test_age_one_is_the_window_before() -> None:
    """Shares of attention by age, of weights over a queue whose newest pairs are the last."""
    layer = next(layer for layer in make(KINDS["melodi"]).stack if layer.entries_per_window)
    entries = layer.entries_per_window
    probe = Probe()
    weights = torch.tensor([0.1] * entries + [0.3] * entries)
    probe.shares[layer.index, "long-term"] = [weights]
    ages = {key.split("/")[-1]: share for key, share in shares_by_age(probe, layer).items()}
    assert ages == {"1": pytest.approx(0.3 * entries), "2": pytest.approx(0.1 * entries)}


@pytest.mark.parametrize("rest", [0, 1, 2])
def test_attention_of_any_length(rest: int) -> None:
    """Also where the last window holds a single token, which needs no mask otherwise."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 3 * WINDOW + rest)
    found = attention(make(KINDS["melodi"]), Documents.in_memory([tokens]), [0])
    assert 0 < found["shares"]["past"] < 1
