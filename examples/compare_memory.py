"""What each preset remembers of a document, beside what a transformer with all of it in its cache
would hold.

python examples/compare_memory.py
"""

import torch

from melodi import LanguageModel
from melodi.config import PRESETS

DOCUMENT = 65_536
"""Tokens of the document."""

print(f"{'preset':<26}{'floats':>14}{'of a full cache':>18}")
for name, config in PRESETS.items():
    with torch.device("meta"):  # shapes without memory
        floats = LanguageModel(config).empty_state(1).num_floats()
    cache = DOCUMENT * len(config.layers) * 2 * config.width
    print(f"{name:<26}{floats:>14,}{floats / cache:>18.2%}")
