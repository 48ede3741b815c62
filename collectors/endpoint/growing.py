"""The text of an answer while it grows: what is certain to stay, as soon as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class GrowingText:
    """`sent` is what was said so far. Held back are half a character, and what a stop string could begin with: of the
    string that ends an answer a client sees nothing."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.sent = ""
        self._tokenizer = tokenizer
        self._stops = stops
        self._stream = DecodeStream(skip_special_tokens=False)
        self._held = ""

    def add(self, tokens: Iterable[int]) -> str:
        """What is new after these tokens, the end token not among them."""
        self._held += "".join(self._stream.step(self._tokenizer, token) or "" for token in tokens)
        return self._say(certain(self._held, self._stops))

    def end(self, content: str) -> str:
        """What is left to say of the whole text. A text that began otherwise than it was said stays as it was said:
        it cannot be taken back."""
        self._held = content[len(self.sent) :] if content.startswith(self.sent) else ""
        return self._say(len(self._held))

    def _say(self, length: int) -> str:
        new, self._held = self._held[:length], self._held[length:]
        self.sent += new
        return new


def certain(text: str, stops: Sequence[str]) -> int:
    """How many characters of `text` come before everything that is, or could become, one of `stops`.

    >>> certain("a\\nOb", ["\\nObservation:"]), certain("a STOP b", ["STOP"]), certain("ab", [])
    (1, 2, 2)
    """
    return min((_before(text, stop) for stop in stops), default=len(text))


def _before(text: str, stop: str) -> int:
    if (at := text.find(stop)) >= 0:
        return at
    begun = next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
    return len(text) - begun
