"""Trains a tiny Melodi on a text in memory, byte by byte, and lets it go on from there.

python examples/train_on_a_text.py
"""

from dataclasses import replace

import torch

from melodi import LanguageModel, StreamReader
from melodi.config import PRESETS

TEXT = "the cat sat on the mat, the dog sat on the log, and the hen sat in the pen. " * 100
STEPS, WINDOWS_A_STEP = 40, 4

torch.manual_seed(0)
config = replace(
    PRESETS["laptop-melodi"],
    vocab_size=256,
    width=64,
    ffn_width=128,
    window=32,
    short_term_tokens=8,
    layers=("short", "long", "short"),
)
model = LanguageModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ids = torch.tensor(list(TEXT.encode()))[None]

length = WINDOWS_A_STEP * config.window
state = model.empty_state(1)
for step in range(STEPS):
    start = step * length % (ids.size(1) - length)
    segment = ids[:, start : start + length + 1]
    # Targets are the next tokens. Gradients stop where the segment begins; the memory goes on.
    loss, state = model.loss(segment[:, :-1], segment[:, 1:], state.detach())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 or step == STEPS - 1:
        print(f"step {step}: {loss.item():.2f} nats per byte")

reader = StreamReader(model)
reader.read(list(b"the cat sat"))
print("the cat sat" + bytes(reader.generate(60, temperature=0)).decode(errors="replace"))
