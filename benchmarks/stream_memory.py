"""A long text through one reader: resident memory and speed must not depend on what was read.

    python benchmarks/stream_memory.py [TOKENS] [PRESET]    # one million of laptop-melodi

Random weights, random ids. Resident memory is taken when every queue has been filled once, and at
the end; speed over the first and the last tenth of the tokens, per second of processor time, so
that other work on the machine does not count.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from melodi import LanguageModel, StreamReader
from melodi.config import PRESETS


def resident() -> float:
    """Megabytes of this process that are in memory now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def random_ids(vocab_size: int, count: int) -> Iterator[int]:
    """Made as they are asked for: they cost no memory either."""
    generator = torch.Generator().manual_seed(0)
    for start in range(0, count, 4096):
        size = min(4096, count - start)
        yield from torch.randint(0, vocab_size, (size,), generator=generator).tolist()


def measure(preset: str, count: int) -> dict[str, float]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = PRESETS[preset]
    reader = StreamReader(LanguageModel(config))
    full = (max(config.long_term_windows or 0, 1) + 1) * config.window
    marks: dict[str, float] = {}
    edges = [0, count // 10, count - count // 10, count]
    times = {0: (0, time.process_time())}
    for window in reader.read_windows(random_ids(config.vocab_size, count)):
        read = window.first + len(window.nats_T)
        for edge in edges:  # the first window's end behind each: a list of all would itself grow
            if read >= edge and edge not in times:
                times[edge] = (read, time.process_time())
        if read >= full and "mb_when_full" not in marks:
            marks["mb_when_full"] = resident()
    marks["mb_at_the_end"] = resident()
    return {
        "tokens": count,
        **marks,
        "first_tenth_tokens_per_s": speed(times[edges[0]], times[edges[1]]),
        "last_tenth_tokens_per_s": speed(times[edges[2]], times[edges[3]]),
    }


def speed(begin: tuple[int, float], end: tuple[int, float]) -> float:
    return (end[0] - begin[0]) / (end[1] - begin[1])


if __name__ == "__main__":
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    name = sys.argv[2] if len(sys.argv) > 2 else "laptop-melodi"
    result = measure(name, tokens)
    print(f"{name}, {tokens:,} tokens, one thread")
    for key, value in result.items():
        print(f"{key:>26}  {value:,.1f}")
    print(json.dumps(result))
