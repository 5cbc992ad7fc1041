"""What a model costs: the Memory column of the paper's tables, and parameters."""

import torch

from melodi.config import ModelConfig
from melodi.model import LanguageModel


def cost(config: ModelConfig) -> dict[str, int]:
    """Memory per document, in floats and bytes, and the number of parameters."""
    # Parameters are counted in the model itself, which on the meta device takes no memory.
    with torch.device("meta"):
        parameters = LanguageModel(config).num_parameters
    short, long = config.memory_floats()
    return {
        "short": short,
        "long": long,
        "floats": short + long,
        "bytes_fp32": 4 * (short + long),
        "bytes_bf16": 2 * (short + long),
        "parameters": parameters,
    }
