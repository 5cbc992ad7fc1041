"""The Hugging Face coat: importing it tells transformers' auto classes what "melodi" is."""

try:
    import transformers  # noqa: F401
except ImportError:
    raise ImportError(
        "melodi.hf needs transformers, which is not installed: pip install '.[hf]'"
    ) from None

from melodi.hf.modeling import MelodiConfig, MelodiForCausalLM, MemoryCache
from melodi.hf.pieces import MelodiSentencePiece

__all__ = ["MelodiConfig", "MelodiForCausalLM", "MelodiSentencePiece", "MemoryCache"]
