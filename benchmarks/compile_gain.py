"""What torch.compile gains: training and reading with compiled layers, in turn with plain ones.

    python benchmarks/compile_gain.py [SIZE] [SECONDS]    # laptop, small or mid of melodi bench

The seconds of the first training step are those of the compiler; ratios are medians over rounds.
"""

import json
import sys
import time

import torch

from melodi.bench.measure import Task, interleave, rate, ratio
from melodi.bench.sizes import REFERENCE, SIZES
from melodi.bench.subjects import filled_state, random_tokens
from melodi.model import LanguageModel
from melodi.training.distributed import compile_layers


def tasks_of(name: str, size_name: str, compiled: bool) -> tuple[list[Task], float]:
    """Training and reading of one segment, and the seconds of the first step."""
    size = SIZES[size_name]
    torch.manual_seed(0)
    model = LanguageModel(size.reference)
    if compiled:
        compile_layers(model)
    tokens = random_tokens(size.reference, size.rows, size.segment)
    state = filled_state(model, size.rows)

    def train() -> None:
        loss, _ = model.loss(tokens, tokens.roll(-1, 1), state)
        loss.backward()
        model.zero_grad(set_to_none=True)

    @torch.inference_mode()
    def read() -> None:
        model.nats(tokens, tokens.roll(-1, 1), state)

    start = time.perf_counter()
    train()
    seconds = time.perf_counter() - start
    read()
    units = size.rows * size.segment
    return [Task(name, "train", rate(train, units)), Task(name, "read", rate(read, units))], seconds


def measure(size: str, seconds: float) -> dict[str, float]:
    plain, first = tasks_of(REFERENCE, size, compiled=False)
    compiled, compiling = tasks_of("compiled", size, compiled=True)
    found = interleave([*plain, *compiled], seconds, print, "gain")
    samples = {(task.name, task.metric): values for task, values in found}
    gains = {
        metric: ratio(samples["compiled", metric], samples[REFERENCE, metric])
        for metric in ("train", "read")
    }
    return {
        "first_step_seconds": first,
        "first_step_compiled_seconds": compiling,
        **{f"{metric}_gain": gain.median for metric, gain in gains.items()},
        **{f"{metric}_gain_low": gain.low for metric, gain in gains.items()},
        **{f"{metric}_gain_high": gain.high for metric, gain in gains.items()},
        "rounds": len(next(iter(samples.values()))),
    }


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "laptop"
    result = measure(chosen, float(sys.argv[2]) if len(sys.argv) > 2 else 60.0)
    for key, value in result.items():
        print(f"{key:>28}  {value:,.2f}")
    print(json.dumps({"size": chosen, **result}))
