"""Reads a text of any length window by window in constant memory, saves what is remembered, and
goes on from the file as if it had never stopped.

python examples/read_a_long_text.py [RUN] [TEXT_FILE]    # without a run: random weights, this file
"""

import sys
import tempfile
from pathlib import Path

import torch

from melodi import LanguageModel, StreamReader, load
from melodi.config import PRESETS

arguments = sys.argv[1:]
text = Path(arguments[1] if len(arguments) > 1 else __file__).read_text(encoding="utf-8")
if arguments:
    model = load(arguments[0])
    ids = model.tokenizer.encode(text)
else:
    torch.manual_seed(0)
    model = LanguageModel(PRESETS["laptop-melodi"])
    ids = list(text.encode())

reader = StreamReader(model)
window = model.config.window
half = len(ids) // 2 // window * window
for read in reader.read_windows(ids[:half]):
    mean = read.nats_T.nanmean()
    print(f"tokens {read.first:6} to {read.first + window - 1:6}: {mean:.3f} nats per token")

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "book.memory"
    reader.save(path)
    print(f"{half} tokens are remembered in {path.stat().st_size:,} bytes")
    resumed = StreamReader.load(model, path)
    went_on, from_file = (each.read(ids[half:]) for each in (reader, resumed))
print(f"largest difference after the break: {(went_on - from_file).abs().max():.1e} nats")
