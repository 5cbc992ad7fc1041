"""Several threads side by side: what they give is what one would have given."""

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from zoo import WINDOW, ZOO, make, random_tokens

from melodi import LanguageModel, ModelConfig, StreamReader
from melodi.layers.frame import Layer
from melodi.layers.nats import CHUNK_ROWS, linear_nats
from melodi.reading import Handover, portions
from melodi.threads import side_by_side, worker_count

every_kind = pytest.mark.parametrize("config", ZOO.values(), ids=ZOO.keys())
PATIENCE = 120
"""Seconds that threads of a busy machine may take to begin."""


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The threads that take windows through the stack."""
    found, window = set(), LanguageModel._window

    def watched(self: LanguageModel, *args: Any) -> Any:
        found.add(threading.get_ident())
        return window(self, *args)

    monkeypatch.setattr(LanguageModel, "_window", watched)
    return found


def read_by_one(model: LanguageModel, *args: Any) -> Any:
    torch.set_num_threads(1)
    read = model.hidden(*args)
    torch.set_num_threads(3)
    return read


@every_kind
@pytest.mark.parametrize("half", [False, True], ids=["plain", "autocast"])
@torch.no_grad()
def test_windows_side_by_side(
    config: ModelConfig, half: bool, three_threads: None, readers: set[int]
) -> None:
    """Windows that follow each other through the stack give the hidden vectors and the memory of
    one after the other, from any state; kinds whose last layer writes what the first one reads have
    no windows side by side."""
    model = make(config).float() if half else make(config)
    tokens = random_tokens(2, 12 * WINDOW)
    near = dict(rtol=1e-4, atol=1e-4) if half else dict(rtol=0, atol=1e-10)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        _, state, _ = model.hidden(tokens[:, : 2 * WINDOW], model.empty_state(2))
        state = state.forget(torch.tensor([True, False]))
        expected, after, _ = read_by_one(model, tokens, state)
        readers.clear()
        for _ in range(2):
            x, mine, _ = model.hidden(tokens, state)
            torch.testing.assert_close(x, expected, **near)
            for ours, theirs in zip(mine.layers, after.layers, strict=True):
                torch.testing.assert_close(tuple(ours), tuple(theirs), **near)
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


def test_memory_that_was_read_is_dropped() -> None:
    """Of a long text no more memory is held than of the windows that are on their way."""
    first = Handover([(torch.zeros(1),), (torch.zeros(1),)])
    second = Handover(first)
    kept = torch.ones(1)
    there = weakref.ref(kept)
    first.append((kept,))
    del kept
    assert second.before[0][0] is there()
    second.append((torch.ones(1),))
    assert there() is None


FOLLOWERS = {
    "counter": lambda: FlopCounterMode(display=False),
    "profiler": torch.profiler.profile,
    "device": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("follower", FOLLOWERS)
def test_whoever_follows_one_thread_sees_everything(follower: str, three_threads: None) -> None:
    """A counter of operations, and its like, follows one thread: then there is only that one."""
    assert worker_count() == 3
    with FOLLOWERS[follower]():
        assert worker_count() == 1
    assert torch.func.vmap(lambda x: x + worker_count())(torch.zeros(2)).tolist() == [1, 1]
    model, tokens = make(ZOO["melodi-default"]), random_tokens(1, 6 * WINDOW)
    counts = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.nats(tokens, tokens, model.empty_state(1))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@torch.no_grad()
def test_watched_modules_are_called_in_order(three_threads: None, readers: set[int]) -> None:
    """A hook anywhere keeps the order of windows, in the caller's thread."""
    model, tokens = make(ZOO["melodi-default"]), random_tokens(1, 6 * WINDOW)
    hook = model.embedding.register_forward_hook(lambda *_: None)
    model.hidden(tokens, model.empty_state(1))
    assert readers == {threading.get_ident()}
    hook.remove()
    model.hidden(tokens, model.empty_state(1))
    assert len(readers) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nats_in_chunks_side_by_side(
    dtype: torch.dtype, three_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def threads_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def test_what_a_thread_computes_with(three_threads: None) -> None:
    """Threads have the caller's modes, and share its threads out; results are in order, nothing is
    shared out twice, and afterwards everything is as it was, for threads that begin later too."""

    def modes(item: int) -> tuple[Any, ...]:
        at_once.wait(PATIENCE)
        return (
            item,
            side_by_side(lambda _: torch.get_num_threads(), range(2)),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
            torch.is_autocast_cache_enabled(),
        )

    for inference, dtype in ((True, torch.bfloat16), (False, torch.float16), (False, None)):
        at_once = threading.Barrier(3)
        off = dtype is None
        autocast = nullcontext() if off else torch.autocast("cpu", dtype, cache_enabled=False)
        with torch.inference_mode(inference), autocast:
            found = side_by_side(modes, range(6))
        assert found == [(i, [1, 1], not inference, inference, dtype, off) for i in range(6)]
        assert torch.get_num_threads() == threads_of_a_new_thread() == 3


@pytest.mark.parametrize(
    ("threads", "workers"), [(1, 1), (2, 2), (3, 3), (4, 4), (6, 3), (8, 4), (12, 4), (64, 4)]
)
def test_threads_are_shared_out(threads: int, workers: int, three_threads: None) -> None:
    torch.set_num_threads(threads)
    assert worker_count() == workers


def test_an_interrupted_wait_begins_nothing_more(three_threads: None) -> None:
    """Ctrl-C ends the work as well: what is under way is waited for, and nothing else begins."""
    done: list[int] = []

    def work(item: int) -> None:
        if item == 5:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        done.append(item)

    # A process that was started in the background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            side_by_side(work, range(5000))
    finally:
        signal.signal(signal.SIGINT, before)
    count = len(done)
    assert count < 1000
    time.sleep(0.1)
    assert len(done) == count


def test_threads_that_cannot_be_begun() -> None:
    """Where a limit allows no more of them the caller works, torch keeps its threads, and the
    process ends."""
    script = (
        "import threading, torch; torch.set_num_threads(3)\n"
        "from melodi.threads import side_by_side\n"
        "begin, count = threading.Thread.start, [0]\n"
        "def start(self):\n"
        "    count[0] += 1\n"
        '    if count[0] % 2 == 0: raise RuntimeError("can\'t start new thread")\n'
        "    begin(self)\n"
        "threading.Thread.start = start\n"
        "print(side_by_side(abs, [-1, -2, -3]), torch.get_num_threads())"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.stdout, done.stderr) == ("[1, 2, 3] 3\n", "")


def test_a_model_reads_while_the_interpreter_ends() -> None:
    """Then no thread takes work any more: the caller does it."""
    script = (
        "import atexit, torch; torch.set_num_threads(2)\n"
        "from melodi.threads import side_by_side\n"
        "begun = side_by_side(abs, [-1, -2])\n"
        "@atexit.register\n"
        "def last(): print(begun, side_by_side(abs, [-3, -4]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[1, 2] [3, 4]\n", "")


def test_a_reader_reads_ahead(three_threads: None, readers: set[int]) -> None:
    """Windows that are read together are given one by one, from any place in a window."""
    model = make(ZOO["melodi-default"])
    ids = random_tokens(1, 7 * WINDOW + 2)[0]
    for begun in (1, WINDOW - 1, WINDOW):
        slow, fast = StreamReader(model), StreamReader(model)
        for reader in (slow, fast):
            reader.read(ids[:begun])
        readers.clear()
        expected = list(slow.read_windows(ids))
        assert readers == {threading.get_ident()}
        found = list(fast.read_windows(ids, ahead=5))
        assert len(readers) > 1
        assert [(w.first, len(w.nats_T)) for w in found] == [
            (w.first, len(w.nats_T)) for w in expected
        ]
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.nats_T, theirs.nats_T)
    with pytest.raises(ValueError, match="ahead=0 must be at least 1"):
        slow.read_windows(ids, ahead=0)


@pytest.mark.parametrize(
    ("length", "place", "sizes"),
    [
        (1, 0, [1]),
        (10, 0, [10]),
        (35, 0, [30, 5]),
        (85, 0, [30, 30, 20, 5]),
        (3, 4, [3]),
        (6, 4, [6]),
        (40, 4, [6, 30, 4]),
        (36, 4, [6, 30]),
    ],
)
def test_portions(length: int, place: int, sizes: list[int]) -> None:
    """Windows of ten, three at a time: the rest of an open one first, what is no window last."""
    cuts = list(portions(length, place, 10, 3))
    assert [cut.stop - cut.start for cut in cuts] == sizes
    assert [cut.start for cut in cuts] == [sum(sizes[:i]) for i in range(len(sizes))]
