"""Stop strings: an answer ends with the token that completes one, wherever they begin and end between its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


def load_tokenizer(path: Path, *, trust_remote_code: bool) -> Tokenizer:
    """The tokenizer of a model's folder, as the library that can decode token by token. Raises ValueError if there is
    none. Takes seconds."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # of a broken file, or code of the model's own: they raise what they like
        raise ValueError(f"stop strings need the model's tokenizer, and {path} has none that loads: {error}") from error
    # Of a folder that has only a model transformers makes an empty tokenizer, in whose text nothing would ever stop.
    if not any((path / file).is_file() for file in tokenizer.vocab_files_names.values()):
        raise ValueError(f"stop strings need the model's tokenizer, and {path} has none")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ValueError(
            f"stop strings need a tokenizer that decodes token by token; that of {path}, {type(tokenizer).__name__}, "
            "does not: use stop_token_ids"
        )
    return backend


class StopStrings:
    """Looks for stop strings in one answer while it grows. The text is that of all its tokens, special ones included.

    A token that ends within a character says nothing until the character is whole: what completes a stop string and
    begins another character counts when that one ends. Work per token is that of a few tokens, however long the answer.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], begun: Iterable[int] = ()) -> None:
        """begun: tokens of the answer that were sampled before, and did not end it."""
        self._tokenizer = tokenizer
        self._strings = strings
        self._stream = DecodeStream(skip_special_tokens=False)
        self._tail = ""  # of the text: what a stop string could begin with
        self._keep = max(map(len, strings)) - 1
        for token in begun:
            self.add(token, passed=True)

    def add(self, token: int, *, passed: bool) -> str:
        """The stop string that `token` completes, "" if none: of several the one that ends first. passed: what is
        complete by now does not count."""
        new = self._stream.step(self._tokenizer, token)
        if not new:
            return ""
        text = self._tail + new
        found = "" if passed else first_ended(self._strings, text, len(self._tail))
        self._tail = text[-self._keep :] if self._keep else ""
        return found


def first_ended(strings: Sequence[str], text: str, known: int) -> str:
    """Which of `strings` ends first in `text` beyond its first `known` characters; "" if none does. Where two end
    together, the one named first.

    >>> first_ended(["c", "abc", "ab"], "xabc", 2), first_ended(["ab"], "abx", 2)
    ('ab', '')
    """
    ends = []
    for order, string in enumerate(strings):
        at = text.find(string, max(0, known - len(string) + 1))
        if at >= 0:
            ends.append((at + len(string), order))
    return strings[min(ends)[1]] if ends else ""
