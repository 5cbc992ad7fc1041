"""Melodi: a language model that reads book-length documents with a small compressed memory."""

from melodi.config import ModelConfig
from melodi.memory import MemoryState
from melodi.model import LanguageModel

__all__ = ["LanguageModel", "MemoryState", "ModelConfig"]
__version__ = "0.1.0"
