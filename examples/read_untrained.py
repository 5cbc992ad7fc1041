"""Reads a text of any length in constant memory with an untrained laptop model, byte by byte.

Training makes the numbers meaningful; the memory that is carried is the same before and after.
"""

import time

import torch

from melodi import LanguageModel
from melodi.config import PRESETS

text = torch.__doc__ + torch.nn.functional.conv1d.__doc__ + torch.einsum.__doc__
tokens = torch.tensor([list(text.encode())])
model = LanguageModel(PRESETS["laptop-melodi"]).eval()
state = model.empty_state(1)
print(
    f"{tokens.size(1):,} bytes of documentation, {model.num_parameters:,} parameters, untrained\n"
)
print(" tokens   windows read   open window   floats carried   nats/byte   bytes/s")
with torch.inference_mode():
    # Odd chunks on purpose: the logits are the same however the stream is cut.
    for chunk in tokens.split(1000, dim=1):
        start = time.perf_counter()
        logits, state = model(chunk, state)
        seconds = time.perf_counter() - start
        nats = torch.nn.functional.cross_entropy(logits[0, :-1], chunk[0, 1:])
        windows, opened = state.windows_B.item(), state.open_B.item()
        print(
            f"{windows * model.config.window + opened:7,}   {windows:12}   {opened:11}   "
            f"{state.num_floats():14,}   {nats:9.2f}   {chunk.size(1) / seconds:7.0f}"
        )
