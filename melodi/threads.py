"""Work that several threads do side by side, on a CPU.

torch shares every product among its threads, and where products are small these mostly wait for
each other. Python threads that each compute something of their own use the same cores better: torch
holds no lock of Python's while it computes.
"""

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

Item = TypeVar("Item")
Result = TypeVar("Result")

WORKERS = 4
"""About so many threads at most: with more, what is on its way at the same time grows, and work
that is handed from one to the next takes long to spread. Each has its share of torch's threads."""
_ours = threading.local()


def worker_count() -> int:
    """How many threads would share work out now. One where somebody follows what this thread
    computes and would not see what others do: a profiler, a counter of operations, a compiler, a
    transformation of functions, a default device; and in a thread that already has its share."""
    alone = (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._autograd._profiler_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or _get_current_dispatch_mode() is not None
        or _get_current_function_mode() is not None
        or getattr(_ours, "working", False)
    )
    threads = 1 if alone else torch.get_num_threads()
    return threads // _share(threads)


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """The work on each item, in `worker_count` threads.

    Items are begun in their order, so that one may wait for what an earlier one hands on. If one
    fails, none is begun after it, and its error is raised.
    """
    if min(worker_count(), len(items)) < 2:
        return [work(item) for item in items]
    waiting: SimpleQueue[int] = SimpleQueue()
    for index in range(len(items)):
        waiting.put(index)
    results: dict[int, Result] = {}
    gradient, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    caches = torch.is_autocast_cache_enabled()

    def worker() -> None:
        torch.set_autocast_enabled("cpu", autocast)
        torch.set_autocast_dtype("cpu", dtype)
        torch.set_autocast_cache_enabled(caches)
        # By hand: a context, on leaving, would drop the rounded weights that all threads share.
        torch.autocast_increment_nesting()
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradient):
                while True:
                    index = waiting.get_nowait()
                    results[index] = work(items[index])
        except Empty:
            pass
        except BaseException:
            _empty(waiting)
            raise
        finally:
            torch.autocast_decrement_nesting()

    running: list[Future[None]] = []
    try:
        try:
            pool = _pool(os.getpid(), torch.get_num_threads())
            running.extend(pool.submit(worker) for _ in range(min(worker_count(), len(items))))
        except RuntimeError:  # no thread can be begun, or the interpreter is ending
            if not running:
                return [work(item) for item in items]
        for one in running:
            one.result()
    finally:
        _empty(waiting)  # where the beginning or the waiting was interrupted
        wait(running)
    return [results[index] for index in range(len(items))]


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads are kept: a new one has to map what its products need, and to set its number of
    threads changes that of all threads that begin at the same time. A forked process has none of
    its parent's."""
    workers = threads // _share(threads)
    pool = ThreadPoolExecutor(workers, "melodi")
    begun = threading.Barrier(workers + 1)

    def begin() -> None:
        _ours.working = True
        torch.get_num_threads()  # the first time a thread asks, it takes the common number
        torch.set_num_threads(_share(threads))
        begun.wait()

    try:
        for _ in range(workers):
            pool.submit(begin)
        begun.wait()
    except BaseException:  # interrupted, or no thread to be had: the others must not wait for ever
        begun.abort()
        pool.shutdown(wait=False)
        raise
    finally:
        torch.set_num_threads(threads)
    return pool


def _share(threads: int) -> int:
    """Of torch's threads, for each of ours."""
    return max(round(threads / WORKERS), 1)


def _empty(queue: "SimpleQueue[int]") -> None:
    try:
        while True:
            queue.get_nowait()
    except Empty:
        pass
