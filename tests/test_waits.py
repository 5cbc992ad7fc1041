"""What a GPU would make the host wait for, seen on the meta device: reading a tensor back fails
there of itself, and a dispatch mode sees every copy between host and device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo import KINDS, WINDOW, cases

from melodi import LanguageModel, MemoryState, ModelConfig
from melodi.memory import Maker

META = torch.device("meta")


class Copies(TorchDispatchMode):
    """Counts operations with tensors of the host and of the device, and names those that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.waiting: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        # A number on the host, a tensor without dimensions, is handed over like one of Python's.
        if len({x.device for x in tensors if x.dim() or x.is_meta}) > 1:
            self.count += 1
            if not (kwargs or {}).get("non_blocking", False):
                self.waiting.append(str(func))
        return result


def on_meta(config: ModelConfig) -> LanguageModel:
    with META:
        return LanguageModel(config)


def tokens(length: int, rows: int = 3) -> Tensor:
    return torch.zeros(rows, length, dtype=torch.long, device=META)


def train(model: LanguageModel, state: MemoryState, windows: int) -> MemoryState:
    """A segment of whole windows, as in training: one row starts a new document."""
    state = state.forget([False, True, False])
    loss, state = model.loss(tokens(windows * WINDOW), tokens(windows * WINDOW), state)
    loss.backward()
    return state.detach()


def read(model: LanguageModel, state: MemoryState) -> None:
    """Any cut, rows of their own lengths, tokens one by one, rows in another order."""
    with torch.inference_mode():
        _, state = model(tokens(WINDOW + 1), state)
        _, state = model(tokens(1), state)
        _, state = model(tokens(WINDOW), state, lengths=[WINDOW, 0, 2])
        model(tokens(1), state.select([2, 0, 1]))


@cases(KINDS)
def test_nothing_waits(config: ModelConfig) -> None:
    """Neither a training step nor reading copies to the device in a way that waits for it."""
    model = on_meta(config)
    with Copies() as copies:
        read(model, train(model, model.empty_state(3), 2))
    assert copies.count
    assert not copies.waiting


@cases(KINDS)
def test_the_host_is_the_host(config: ModelConfig) -> None:
    """Whatever torch's default device is, what is reckoned on the host stays there."""
    model = on_meta(config)
    with META:
        read(model, model.empty_state(3))


@cases({name: KINDS[name] for name in ("melodi", "block-recurrent", "memorizing", "rmt")})
def test_copies_do_not_grow_with_the_windows(config: ModelConfig) -> None:
    """What the layers are told of all windows of a segment is copied at once: where all rows have
    read much, that is all."""
    model = on_meta(config)
    empty = model.empty_state(3)
    state = MemoryState(config, Maker(model), empty.windows_B + 100, empty.open_B, empty.layers)
    for windows in (1, 3):
        with Copies() as copies:
            model.loss(tokens(windows * WINDOW), tokens(windows * WINDOW), state)
        assert copies.count == 1


def test_the_test_sees_waiting() -> None:
    host, device = torch.ones(3), torch.ones(3, device=META)
    waiting: list[Callable[[], Tensor]] = [
        lambda: host.to(META),
        lambda: device.copy_(host),
        lambda: device[torch.tensor([0, 1])],
    ]
    for wait in waiting:
        with Copies() as copies:
            wait()
        assert copies.waiting
    with Copies() as copies:
        host.to(META, non_blocking=True)
        device * torch.tensor(2.0)
    assert not copies.waiting
    with pytest.raises(RuntimeError, match="meta"):
        device.sum().item()
