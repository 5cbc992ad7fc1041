"""Everything that can be chosen, as data; nothing here needs torch."""

from melodi.config.dialects import DIALECTS, Dialect
from melodi.config.model import ModelConfig
from melodi.config.presets import PRESETS, preset, sandwich

__all__ = ["DIALECTS", "PRESETS", "Dialect", "ModelConfig", "preset", "sandwich"]
