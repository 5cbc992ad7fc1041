"""The fast model equals the slow reference in outputs and gradients, in every dialect."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import read
from torch import Tensor
from zoo import KINDS, VOCAB, WINDOW, ZOO, make, random_tokens

from melodi import LanguageModel, ModelConfig
from melodi.config import DIALECTS, Dialect


def read_in_segments(model: LanguageModel, document: list[int], cuts: list[int]) -> Tensor:
    """The fast model, with its memory detached at the cuts."""
    state, parts = model.empty_state(1), []
    for start, stop in itertools.pairwise([0, *cuts, len(document)]):
        logits, state = model(torch.tensor([document[start:stop]]), state.detach())
        parts.append(logits[0])
    return torch.cat(parts)


def compare(config: ModelConfig, document: list[int], cuts: list[int]) -> None:
    model = make(config)
    weights = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in model.named_parameters()
    }
    ours = read_in_segments(model, document, cuts)
    theirs = read(config, weights, document, cuts)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)

    # An arbitrary but fixed functional of the logits reaches every parameter that matters.
    direction = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).double()
    (ours * direction).sum().backward()
    (theirs * direction).sum().backward()
    for name, parameter in model.named_parameters():
        a, b = (
            torch.zeros_like(parameter) if g is None else g
            for g in (parameter.grad, weights[name].grad)
        )
        assert (a - b).abs().max() <= 1e-10 + 1e-8 * b.abs().max(), name


@pytest.mark.parametrize("config", ZOO.values(), ids=ZOO.keys())
def test_equals_the_reference(config: ModelConfig) -> None:
    """Outputs to 1e-10 and gradients, over several segments and an unfinished last window."""
    document = random_tokens(6 * WINDOW + 2).tolist()
    compare(config, document, cuts=[2 * WINDOW, 3 * WINDOW])


def dialects() -> st.SearchStrategy[str]:
    """Any combination of answers, not only the three named ones."""
    fields = Dialect.__dataclass_fields__
    options = {
        name: sorted({str(getattr(d, name)).lower() for d in DIALECTS.values()}) for name in fields
    }
    options["activation"] = ["relu", "relu2", "gelu"]
    options["attention"] = ["scaled", "normalised", "normalised-root"]
    return st.fixed_dictionaries({k: st.sampled_from(v) for k, v in options.items()}).map(
        lambda answers: ",".join(["default", *(f"{k}={v}" for k, v in answers.items())])
    )


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    dialect=dialects(),
    window=st.integers(3, 7),
    slots=st.integers(1, 16),
    windows=st.integers(1, 4),
    length=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_equals_the_reference_at_random_sizes(
    kind: str, dialect: str, window: int, slots: int, windows: int, length: int, seed: int
) -> None:
    """The same for any dialect made of single answers, and any sizes."""
    config = replace(
        KINDS[kind],
        dialect=dialect,
        window=window,
        memory_slots=slots,
        long_term_windows=windows,
        top_k=KINDS[kind].top_k and min(KINDS[kind].top_k, slots),
    )
    document = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    cuts = [cut for cut in (2 * window,) if cut < length]
    compare(config, document.tolist(), cuts)
