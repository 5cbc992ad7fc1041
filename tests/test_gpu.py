"""On a CUDA device: the stream may be cut anywhere, a training step is that of the CPU, and waits
once."""

import warnings
from pathlib import Path

import pytest
import torch
from tiny_runs import CONFIG, make_store, model_config
from zoo import KINDS, WINDOW, cases, make, random_tokens

from melodi import ModelConfig
from melodi.config.training import Execution, recipe
from melodi.training.distributed import Processes
from melodi.training.learner import Learner
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


def test_a_training_step_waits_once(tmp_path: Path) -> None:
    """Of what training itself does in a step, only the reading of the loss waits for the GPU."""
    group = Processes(0, 1, torch.device("cuda:0"))
    documents = make_store(tmp_path).split("train")
    learner = Learner(model_config(), documents, CONFIG, Execution(), group)
    learner.take_step()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            learner.take_step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    waits = [Path(warning.filename) for warning in caught if "synchroniz" in str(warning.message)]
    assert [path.name for path in waits if path.parent.name == "training"] == ["distributed.py"]
