"""Several threads side by side: what they give is what one would have given."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from zoo import WINDOW, ZOO, make, random_tokens

from melodi import LanguageModel, ModelConfig, StreamReader
from melodi.layers.frame import Layer
from melodi.layers.nats import CHUNK_ROWS, linear_nats
from melodi.threads import side_by_side

every_kind = pytest.mark.parametrize("config", ZOO.values(), ids=ZOO.keys())


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def one_thread_reads(model: LanguageModel, *args: Any) -> Any:
    torch.set_num_threads(1)
    read = model.hidden(*args)
    torch.set_num_threads(3)
    return read


@every_kind
@torch.no_grad()
def test_windows_side_by_side(
    config: ModelConfig, three_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows that follow each other through the stack give the hidden vectors and the memory of
    one after the other, from any state; kinds whose last layer writes what the first one reads have
    no windows side by side."""
    model, readers = make(config), set()
    window = LanguageModel._window

    def watched(self: LanguageModel, *args: Any) -> Any:
        readers.add(threading.get_ident())
        return window(self, *args)

    tokens = random_tokens(2, 12 * WINDOW)
    _, state, _ = model.hidden(tokens[:, : 2 * WINDOW], model.empty_state(2))
    state = state.forget(torch.tensor([True, False]))
    expected, after, _ = one_thread_reads(model, tokens, state)
    monkeypatch.setattr(LanguageModel, "_window", watched)
    for _ in range(3):
        x, mine, _ = model.hidden(tokens, state)
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-10)
        for ours, theirs in zip(mine.layers, after.layers, strict=True):
            torch.testing.assert_close(tuple(ours), tuple(theirs), rtol=0, atol=1e-10)
    alone = type(model.stack[0]).end is not Layer.end
    assert (readers == {threading.get_ident()}) == alone


@torch.no_grad()
def test_an_error_ends_all_windows(three_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that fails fails the reading: nobody waits for its memory, and the next one works."""
    model, tokens = make(ZOO["melodi-default"]), random_tokens(1, 9 * WINDOW)
    state, calls = model.empty_state(1), iter(range(1000))
    expected, _, _ = model.hidden(tokens, state)
    write = type(model.stack[1]).write

    def failing(self: Any, *args: Any) -> Any:
        if next(calls) == 4:
            raise RuntimeError("the fifth window does not fit")
        return write(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(type(model.stack[1]), "write", failing)
        with pytest.raises(RuntimeError, match="the fifth window"):
            model.hidden(tokens, state)
    torch.testing.assert_close(model.hidden(tokens, state)[0], expected)


@torch.no_grad()
def test_whoever_counts_sees_everything(three_threads: None) -> None:
    """A counter of operations follows one thread: then there is only that one."""
    model, tokens = make(ZOO["melodi-default"]), random_tokens(1, 6 * WINDOW)
    counts = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        with FlopCounterMode(display=False) as counter:
            model.nats(tokens, tokens, model.empty_state(1))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nats_in_chunks_side_by_side(dtype: torch.dtype, three_threads: None) -> None:
    """Chunks in threads of their own, in the precision of the caller."""
    torch.manual_seed(0)
    x_nD, weight_VD = torch.randn(5 * CHUNK_ROWS[1] + 3, 8), torch.randn(2048, 8)
    targets_n = torch.randint(-1, 2048, (len(x_nD),))
    found = []
    with torch.inference_mode(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(linear_nats(x_nD, weight_VD, targets_n, 1.0))
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)


@pytest.mark.parametrize("most", [None, 2, 1])
def test_what_a_thread_computes_with(most: int | None, three_threads: None) -> None:
    """Threads have the caller's modes, and share its threads out; results are in order, and
    afterwards everything is as it was."""

    def modes(item: int) -> tuple[Any, ...]:
        at_once.wait(10)
        return (
            item,
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        )

    workers = 3 if most is None else most
    for inference, rounded in ((True, True), (False, True), (False, False)):
        at_once = threading.Barrier(workers)
        with torch.inference_mode(inference), torch.autocast("cpu", enabled=rounded):
            found = side_by_side(modes, range(6), most)
        dtype = torch.bfloat16 if rounded else None
        each = 3 // workers if workers > 1 else 3
        assert found == [(i, each, not inference, inference, dtype) for i in range(6)]
        assert torch.get_num_threads() == 3


def test_an_interrupted_wait_begins_nothing_more(three_threads: None) -> None:
    """An error that is none of torch's, such as Ctrl-C, ends the work as well."""
    done: list[int] = []

    def work(item: int) -> None:
        if item == 2:
            raise KeyboardInterrupt
        done.append(item)
        threading.Event().wait(0.01)

    with pytest.raises(KeyboardInterrupt):
        side_by_side(work, range(500))
    assert len(done) < 100


def test_a_reader_reads_ahead(three_threads: None) -> None:
    """Windows that are read together are given one by one, from any place in a window."""
    model = make(ZOO["melodi-default"])
    ids = random_tokens(1, 5 * WINDOW + 2)[0]
    for begun in (1, WINDOW - 1, WINDOW):
        slow, fast = StreamReader(model), StreamReader(model)
        for reader in (slow, fast):
            reader.read(ids[:begun])
        expected = list(slow.read_windows(ids))
        found = list(fast.read_windows(ids, ahead=3))
        assert [(w.first, len(w.nats_T)) for w in found] == [
            (w.first, len(w.nats_T)) for w in expected
        ]
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.nats_T, theirs.nats_T)
    with pytest.raises(ValueError, match="ahead=0 must be at least 1"):
        slow.read_windows(ids, ahead=0)
