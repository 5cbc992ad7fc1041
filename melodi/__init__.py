"""Melodi: a language model that reads book-length documents with a small compressed memory.

Importing the package does nothing: a name is fetched from its module, and torch with it, when it is
first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from melodi.config import ModelConfig
    from melodi.memory import MemoryState
    from melodi.model import LanguageModel
    from melodi.run import load
    from melodi.stream import StreamReader

__all__ = ["LanguageModel", "MemoryState", "ModelConfig", "StreamReader", "load"]
__version__ = "0.1.0"

_HOMES = {
    "LanguageModel": "melodi.model",
    "MemoryState": "melodi.memory",
    "ModelConfig": "melodi.config",
    "StreamReader": "melodi.stream",
    "load": "melodi.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'melodi' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
