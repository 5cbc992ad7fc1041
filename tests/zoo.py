"""Tiny models of every kind, in every dialect: each law is one test body over all of them."""

from dataclasses import replace

import torch
from torch import Tensor

from melodi import LanguageModel, ModelConfig
from melodi.config import DIALECTS

WINDOW, VOCAB = 6, 23

_SIZES = ModelConfig(
    vocab_size=VOCAB,
    width=12,
    num_heads=2,
    head_width=5,
    ffn_width=16,
    window=WINDOW,
    short_term_tokens=3,
    long_term_tokens=2,
    long_term_windows=3,
    recurrent_states=4,
    memory_slots=15,
    memory_tokens=3,
    associative_width=2,  # with random weights a wider ARMT grows beyond what float64 can tell
    layers=("plain",),
)

KINDS = {
    "melodi": replace(_SIZES, layers=("short", "long", "short")),
    "melodi-two-long": replace(_SIZES, layers=("long", "short", "long")),
    "melodi-few-short": replace(_SIZES, layers=("short", "plain", "long-only", "plain")),
    "melodi-long-only": replace(_SIZES, layers=("plain", "long-only")),
    "melodi-no-branching": replace(_SIZES, layers=("short", "long", "plain"), branching=False),
    "melodi-copy": replace(
        _SIZES, layers=("long", "short"), copy_short_to_long=True, long_term_tokens=3
    ),
    "transformer-xl": replace(_SIZES, layers=("xl", "xl", "plain")),
    "block-recurrent": replace(_SIZES, layers=("xl", "recurrent", "xl")),
    "memorizing": replace(_SIZES, layers=("xl", "memorizing", "xl")),
    "memorizing-top-k": replace(_SIZES, layers=("xl", "memorizing"), top_k=4),
    "memorizing-alone": replace(_SIZES, layers=("memorizing", "memorizing")),
    "no-memory": replace(_SIZES, layers=("plain", "plain")),
    "infini": replace(_SIZES, layers=("infini", "plain", "infini")),
    "infini-delta": replace(_SIZES, layers=("infini", "infini"), infini_update="delta"),
    "infini-in-xl": replace(_SIZES, layers=("xl", "infini", "memorizing")),
    "armt": replace(_SIZES, layers=("armt", "armt", "armt")),
    "armt-few": replace(_SIZES, layers=("armt", "plain", "armt", "plain")),
}

ZOO = {
    f"{kind}-{dialect}": replace(config, dialect=dialect)
    for kind, config in KINDS.items()
    for dialect in DIALECTS
}


def make(config: ModelConfig, seed: int = 0) -> LanguageModel:
    """A float64 model whose every parameter matters: none is left at zero or one."""
    generator = torch.Generator().manual_seed(seed)
    model = LanguageModel(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(parameter.new_zeros(()) + 0.3 * noise + (parameter.dim() == 1) * 0.7)
    return model


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
