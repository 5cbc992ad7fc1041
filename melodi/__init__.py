"""Melodi: a language model that reads book-length documents with a small compressed memory."""

from typing import Any

from melodi.config import ModelConfig
from melodi.memory import MemoryState
from melodi.model import LanguageModel
from melodi.stream import StreamReader

__all__ = ["LanguageModel", "MemoryState", "ModelConfig", "StreamReader", "load"]
__version__ = "0.1.0"


def load(run: Any, weights: str | None = None) -> LanguageModel:
    """The model of a run folder, ready to read, with its tokenizer as `model.tokenizer`."""
    from melodi.run import load

    return load(run, weights)
