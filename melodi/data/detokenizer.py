"""The text of ids that come one at a time, at the same cost for each, however long the text."""

from collections.abc import Sequence

from melodi.data.tokenizer import Tokenizer

CONTEXT = 16
"""Ids that are decoded again with each new one: what it spells can depend on those before it."""
UNFINISHED = 3
"""A character has at most four bytes, so at most three can wait for the next token."""


class Detokenizer:
    """What `push` gives, one after the other, and `rest` at the end, is the text after `ids`."""

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.recent = list(ids[-CONTEXT:])
        self.shown = len(tokenizer.decode(self.recent))

    def push(self, token: int) -> str:
        """The characters that the token completes."""
        self.recent.append(token)
        text = self.tokenizer.decode(self.recent)
        unfinished = min(len(text) - len(text.rstrip("�")), UNFINISHED)
        return self._show(text, len(text) - unfinished)

    def rest(self) -> str:
        """What has waited for more: pieces of characters that never came."""
        text = self.tokenizer.decode(self.recent)
        return self._show(text, len(text))

    def _show(self, text: str, end: int) -> str:
        piece = text[self.shown : end]
        self.shown = max(self.shown, end)
        if len(self.recent) >= 2 * CONTEXT:
            waiting = len(text) - self.shown
            self.recent = self.recent[-CONTEXT:]
            self.shown = len(self.tokenizer.decode(self.recent)) - waiting
        return piece
