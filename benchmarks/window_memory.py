"""Peak memory of a training step by the number of windows in a segment, with and without
`checkpoint_windows`. With it, memory grows by what windows carry, not by their activations.

    python benchmarks/window_memory.py [PRESET]
"""

import json
import subprocess
import sys

WINDOWS = (2, 4, 8, 16, 32)
ROWS = 16

STEP = """
import resource, sys, torch
from melodi import LanguageModel
from melodi.config import PRESETS
torch.manual_seed(0)
torch.set_num_threads(1)
preset, windows, rows, on = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
model = LanguageModel(PRESETS[preset])
model.checkpoint_windows = on
tokens = torch.randint(0, model.config.vocab_size, (rows, windows * model.config.window))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loss, _ = model.loss(tokens, tokens, model.empty_state(rows))
loss.backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def peak(preset: str, windows: int, on: bool) -> float:
    """Megabytes that a step adds, measured in a process of its own."""
    command = [sys.executable, "-c", STEP, preset, str(windows), str(ROWS), str(on)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "laptop-melodi"
    results = []
    print(f"{name}, {ROWS} rows, float32: peak MB of one training step")
    print("windows      kept   computed again")
    for count in WINDOWS:
        kept, again = peak(name, count, False), peak(name, count, True)
        results.append({"windows": count, "kept_mb": kept, "computed_again_mb": again})
        print(f"{count:7}   {kept:7.0f}   {again:14.0f}", flush=True)
    print(json.dumps(results))
