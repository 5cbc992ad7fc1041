"""Work that several threads do side by side, on a CPU.

torch shares every product among its threads, and where products are small these mostly wait for
each other. Python threads that each compute something of their own use the same cores better: torch
holds no lock of Python's while it computes.
"""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(
    work: Callable[[Item], Result], items: Sequence[Item], most: int | None = None
) -> list[Result]:
    """The work on each item, by at most so many threads, among which torch's threads are shared.

    Items are begun in their order, so that one may wait for what an earlier one hands on. If one
    fails, none is begun after it, and its error is raised.
    """
    threads = torch.get_num_threads()
    workers = min(threads, len(items), len(items) if most is None else most)
    if workers < 2 or is_watched():
        return [work(item) for item in items]
    begun: SimpleQueue[int] = SimpleQueue()
    for index in range(len(items)):
        begun.put(index)
    results: dict[int, Result] = {}
    gradient, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    rounded, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def worker() -> None:
        torch.set_num_threads(threads // workers)
        # Not as a context: the first to leave it would drop the rounded weights that all share.
        torch.set_autocast_enabled("cpu", rounded)
        torch.set_autocast_dtype("cpu", dtype)
        with torch.inference_mode(inference), torch.set_grad_enabled(gradient):
            try:
                while True:
                    index = begun.get_nowait()
                    results[index] = work(items[index])
            except Empty:
                pass
            except BaseException:
                _empty(begun)
                raise

    running = [_pool(os.getpid(), workers).submit(worker) for _ in range(workers)]
    try:
        for one in running:
            one.result()
    finally:
        _empty(begun)  # where the waiting itself was interrupted
        wait(running)
        torch.set_num_threads(threads)  # what threads that are begun later start with
    return [results[index] for index in range(len(items))]


def is_watched() -> bool:
    """Whether somebody follows what this thread computes, and would not see what others do: a
    profiler, a counter of operations, a compiler, a default device."""
    return (
        torch.compiler.is_compiling()
        or torch._C._autograd._profiler_enabled()
        or _get_current_dispatch_mode() is not None
        or _get_current_function_mode() is not None
    )


@functools.cache
def _pool(process: int, workers: int) -> ThreadPoolExecutor:
    """Threads are kept, because a new one has to map what its products need; a forked process has
    none of its parent's."""
    return ThreadPoolExecutor(workers, "melodi")


def _empty(queue: "SimpleQueue[int]") -> None:
    try:
        while True:
            queue.get_nowait()
    except Empty:
        pass
