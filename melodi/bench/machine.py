"""What the machine can do: the roofs that speeds are shares of, and what it is."""

import platform
import time
from pathlib import Path
from typing import Any

import torch

from melodi import __version__
from melodi.bench.measure import Task
from melodi.bench.operations import inner
from melodi.bench.sizes import Size
from melodi.run import commit, cpu_name

REPEAT_SECONDS = 0.02
"""How long each shape is tried in a round."""


def describe() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "melodi": __version__,
        "commit": commit(),
    }


def tasks(size: Size, buffer_mb: int) -> list[Task]:
    """The roofs, measured in the same rounds as everything else."""
    buffer = torch.ones(buffer_mb << 18)

    def bandwidth() -> float:
        return 4 * buffer.numel() / best_seconds(lambda: buffer.sum())

    def roof() -> float:
        dtype = torch.bfloat16 if size.precision == "bf16" else torch.float32
        return max(product_rate(*shape, dtype) for shape in product_shapes(size))

    return [
        Task("machine", "roof", roof, needed=True),
        Task("machine", "bandwidth", bandwidth, needed=True),
    ]


def product_shapes(size: Size) -> list[tuple[int, int, int]]:
    """(n, k, m) of the products that the model spends its time in: a window of all rows through the
    projections, the feed-forward, and the logits of a segment."""
    c = size.reference
    tokens = size.rows * (c.window + c.write_tokens)
    shapes = {
        (tokens, c.width, inner(c)),
        (tokens, c.width, c.ffn_width),
        (tokens, c.ffn_width, c.width),
        (min(size.rows * size.segment, 1024), c.width, c.vocab_size),
    }
    return sorted(shapes)


def product_rate(n: int, k: int, m: int, dtype: torch.dtype) -> float:
    """Operations per second of one product; a multiply-add is two."""
    a, b = torch.ones(n, k, dtype=dtype), torch.ones(m, k, dtype=dtype)
    return 2 * n * k * m / best_seconds(lambda: a @ b.T)


def best_seconds(run: Any) -> float:
    """The fastest of several."""
    best, end = float("inf"), time.perf_counter() + REPEAT_SECONDS
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best


def resident_mb() -> float | None:
    """What this process holds in memory now; None where the system does not say."""
    return status_mb("VmRSS")


def peak_mb() -> float:
    """The most that this process ever held."""
    # ru_maxrss would begin with what the parent held when it started this process.
    peak = status_mb("VmHWM")
    if peak is not None:
        return peak
    import resource

    unit = 1 << 20 if platform.system() == "Darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def status_mb(field: str) -> float | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), None)
