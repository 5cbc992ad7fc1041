"""A SentencePiece model as transformers sees it: the engine itself, not a conversion.

A run must be given the ids that it was trained with, and a conversion to a fast tokenizer gives
others for some texts, those that spell control symbols out say. The price is that no offsets are
known, as with all tokenizers that are not fast.
"""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizer

from melodi.data.tokenizer import SentencePieceTokenizer
from melodi.hf.modeling import MelodiConfig


class MelodiSentencePiece(PreTrainedTokenizer):
    """The same ids and the same text as ours. No special token is added to a text, and one that is
    spelt out is read as characters; padding, which is never read, is on the left."""

    vocab_files_names = {"vocab_file": SentencePieceTokenizer.FILE}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file: str, **kwargs: Any) -> None:
        self.core = SentencePieceTokenizer(Path(vocab_file).read_bytes())
        self.engine = self.core.engine
        filler = max(self.engine.pad_id(), self.engine.eos_id(), self.engine.bos_id())
        fixed = {
            "pad_token": self.engine.id_to_piece(filler if filler >= 0 else self.engine.unk_id()),
            "padding_side": "left",
            "split_special_tokens": True,
            "special_tokens_pattern": "none",
            "clean_up_tokenization_spaces": False,
        }
        super().__init__(**{**kwargs, **fixed})

    @property
    def vocab_size(self) -> int:
        return self.core.vocab_size

    def get_vocab(self) -> dict[str, int]:
        return {self.engine.id_to_piece(i): i for i in range(self.vocab_size)}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        # By way of ids: the engine spells unknown pieces out, which may be names of known ones.
        return [self.engine.id_to_piece(i) for i in self.core.encode(text)]

    def _convert_token_to_id(self, token: str) -> int:
        return int(self.engine.piece_to_id(token))

    def _convert_id_to_token(self, index: int) -> str:
        return str(self.engine.id_to_piece(index))

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self.core.decode(map(self._convert_token_to_id, tokens))

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        self.core.save(Path(save_directory))
        return (str(Path(save_directory) / self.core.FILE),)


AutoTokenizer.register(MelodiConfig, tokenizer_class=MelodiSentencePiece)
