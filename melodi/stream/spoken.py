"""The text of generated ids, up to a text that ends it."""

from collections.abc import Sequence

from melodi.data.detokenizer import Detokenizer
from melodi.data.tokenizer import Tokenizer


class Spoken:
    """What `push` gives, one after the other, and `rest` at the end, is the text after `ids` and
    before the first of `ends`. What may yet become one of `ends` waits."""

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int], ends: Sequence[str]) -> None:
        self.detokenizer = Detokenizer(tokenizer, ids)
        self.ends = ends
        self.waiting = ""
        self.ended = False

    def push(self, token: int) -> str:
        """The characters that can be shown now that the token is there."""
        self.waiting += self.detokenizer.push(token)
        found = [place for end in self.ends if (place := self.waiting.find(end)) >= 0]
        if found:
            self.ended = True
            return self._show(min(found))
        return self._show(len(self.waiting) - max(map(self._begun, self.ends), default=0))

    def rest(self) -> str:
        """What has waited in vain; nothing where one of `ends` was found."""
        if self.ended:
            return ""
        self.waiting += self.detokenizer.rest()
        return self._show(len(self.waiting))

    def _begun(self, end: str) -> int:
        """How many of the last characters are the beginning of `end`."""
        longest = min(len(end) - 1, len(self.waiting))
        return next((n for n in range(longest, 0, -1) if self.waiting.endswith(end[:n])), 0)

    def _show(self, count: int) -> str:
        shown, self.waiting = self.waiting[:count], self.waiting[count:]
        return shown
