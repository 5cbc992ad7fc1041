"""On a CUDA device: the stream may be cut anywhere, and a training step is that of the CPU."""

import pytest
import torch
from zoo import KINDS, WINDOW, cases, make, random_tokens

from melodi import ModelConfig
from melodi.config.training import recipe
from melodi.training.optimizers import make_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = "cuda"


@cases(KINDS)
def test_any_cut_gives_the_same_logits(config: ModelConfig) -> None:
    """Whole or in odd chunks, on the GPU as on the CPU, to 1e-10 in float64."""
    model = make(config)
    tokens = random_tokens(2, 4 * WINDOW + 1)
    expected, _ = model(tokens, model.empty_state(2))
    model = model.to(DEVICE)
    whole, _ = model(tokens.to(DEVICE), model.empty_state(2))
    state, parts = model.empty_state(2), []
    for chunk in tokens.to(DEVICE).split(4, dim=1):
        logits, state = model(chunk, state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10)
    torch.testing.assert_close(whole.cpu(), expected, rtol=0, atol=1e-10)


@cases(KINDS)
def test_a_training_step(config: ModelConfig) -> None:
    """One step, with carried memory and a row that starts anew, leaves the weights of the CPU."""
    weights = []
    for device in ("cpu", DEVICE):
        model = make(config).to(device).train()
        optimizer = make_optimizer(model, recipe("laptop-melodi").optimizer)
        tokens = random_tokens(2, 2 * WINDOW + 1).to(device)
        _, state = model(tokens[:, :WINDOW], model.empty_state(2))
        state = state.detach().forget([True, False])
        loss, _ = model.loss(tokens[:, :-1], tokens[:, 1:], state)
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        optimizer.step()
        weights.append([loss.cpu(), *(p.detach().cpu() for p in model.parameters())])
    for ours, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
