"""On CI the random cases are the same every time; elsewhere they go on searching.

Memory that was never written holds NaN in every test, so that reading it shows.
"""

import os

import torch
from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

# torch fills what torch.empty and its like return while deterministic algorithms are asked for;
# operations without one (on GPUs) only warn.
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True
