"""Texts that begin alike cost what each costs alone, and their beginning is read once."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from zoo import KINDS, WINDOW, ZOO, cases, make, random_tokens

from melodi import LanguageModel, ModelConfig, StreamReader
from melodi.prefixes import Text, score

MODEL = make(ZOO["melodi-default"])
DEFAULT = {name: ZOO[f"{name}-default"] for name in KINDS}


@torch.no_grad()
def alone(model: LanguageModel, text: Text) -> tuple[float, bool]:
    """What a text costs by a whole forward pass over it."""
    ids = torch.tensor([text.ids])
    logits = model(ids, model.empty_state(1))[0][0, text.first - 1 : -1]
    targets = ids[0, text.first :]
    nats = -logits.log_softmax(-1).gather(1, targets[:, None]).sum()
    return float(nats), bool((logits.argmax(-1) == targets).all())


def check(model: LanguageModel, texts: list[Text], rows: int) -> None:
    score(model, texts, rows)
    for text in texts:
        nats, greedy = alone(model, text)
        assert text.nats == pytest.approx(nats, abs=1e-9)
        assert text.greedy == greedy


def forked(seed: int = 0) -> list[Text]:
    """Documents of some windows, with questions, with answers, among them the likeliest."""
    texts = []
    for i in range(2):
        document = random_tokens(2 * WINDOW + i, seed=seed + i).tolist()
        for j in range(2):
            question = document + random_tokens(WINDOW + 1 + j, seed=seed + 9 + j).tolist()
            answers = [random_tokens(n, seed=seed + n).tolist() for n in (1, 1, WINDOW)]
            texts += [Text(question + answer, len(question)) for answer in answers]
    return texts


@cases(DEFAULT)
def test_every_kind_shares_what_it_has_read(config: ModelConfig) -> None:
    """Nats and the most likely ids are those of a pass over each text by itself."""
    model, texts = make(config), forked()
    reader = StreamReader(model)
    reader.read(texts[0].ids[: texts[0].first])
    said = list(reader.generate(WINDOW, temperature=0))
    texts.append(Text(texts[0].ids[: texts[0].first] + said, texts[0].first))
    check(model, texts, rows=2)
    assert texts[-1].greedy


@settings(max_examples=15, deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=6),
    firsts=st.lists(st.integers(1, 20), min_size=6, max_size=6),
    rows=st.integers(1, 4),
)
def test_any_tree(ids: list[list[int]], firsts: list[int], rows: int) -> None:
    """Texts that are equal, that begin others, that fork anywhere, with nothing to score too."""
    texts = [Text(row, min(first, len(row))) for row, first in zip(ids, firsts, strict=False)]
    check(MODEL, texts, rows)


def test_what_is_shared_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many ids go through the model as the tree has, whatever the number of texts."""
    read = []
    hidden = LanguageModel.hidden

    def counted(model: LanguageModel, ids: torch.Tensor, state: object, lengths: object) -> object:
        read.append(sum(lengths) if lengths else ids.numel())  # type: ignore[call-overload]
        return hidden(model, ids, state, lengths)  # type: ignore[arg-type]

    monkeypatch.setattr(LanguageModel, "hidden", counted)
    texts = forked()
    done: list[int] = []
    score(MODEL, texts, 8, done.append)
    assert sum(done) == len(texts)
    nodes = {tuple(text.ids[:n]) for text in texts for n in range(1, len(text.ids) + 1)}
    assert sum(read) == len(nodes) < sum(len(text.ids) for text in texts) / 3


def test_nothing_before_the_first() -> None:
    """An id that nothing came before is expected by nothing."""
    with pytest.raises(ValueError, match="something must come before"):
        score(MODEL, [Text([1, 2], 0)])
