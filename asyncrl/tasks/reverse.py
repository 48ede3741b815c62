"""`reverse`: write a string of digits backwards. Procedural, so there is no data to fetch and no end of rows.

For each length the strings are put into one fixed order by a permutation; the first tenth of it is held out and the
rest is for training. So no held-out string ever occurs in training, whatever the seed and the recipe's lengths: rows do
not depend on the run's seed (which only orders them), and a score on held-out rows is comparable between runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.rewards.base import Finding
from asyncrl.rewards.exact import compared
from asyncrl.tasks.base import Answer, Message, Row, Split, TaskError
from asyncrl.tasks.chat import conversation
from asyncrl.tasks.order import permute
from asyncrl.tasks.procedural import ProceduralRows

MAX_DIGITS = 100
MAX_ROWS = 1 << 40  # far more than a run can use, and small enough for `len()`


class ReverseRows(ProceduralRows):
    """The rows of a split, made on demand: lengths take turns, and each length's strings go round in their order.

    One epoch shows every string of the greatest length once, and shorter ones as often as the lengths' turns ask.
    """

    def __init__(self, split: Split, digits: tuple[int, int]) -> None:
        self._split = split
        self._shortest, self._longest = digits
        self._lengths = self._longest - self._shortest + 1
        super().__init__(min(self._lengths * self._strings(self._longest)[1], MAX_ROWS))

    def row(self, position: int) -> Row:
        turn, place = divmod(position, self._lengths)
        length = self._shortest + place
        first, count = self._strings(length)
        number = permute(first + turn % count, 10**length, key=f"reverse/{length}")
        text = f"{number:0{length}d}"
        return Row(id=f"{self._split}-{position}", prompt=f"reverse {text}", answer=text[::-1])

    def _strings(self, length: int) -> tuple[int, int]:
        """Where this split's part of the order of all strings of a length begins, and how many strings it has."""
        heldout = 10 ** (length - 1)
        return (0, heldout) if self._split == "heldout" else (heldout, 10**length - heldout)


class Reverse:
    """The task. An answer scores 1 if it is exactly the reversed string and the model itself ended it, else 0."""

    name = "reverse"

    def __init__(self, digits: tuple[int, int]) -> None:
        if not 1 <= digits[0] <= digits[1] <= MAX_DIGITS:
            raise TaskError(
                f"task.digits is {list(digits)}: give the shortest and the longest length, "
                f"1 <= shortest <= longest <= {MAX_DIGITS}, as in [3, 6]"
            )
        self._digits = digits

    def rows(self, split: Split) -> ReverseRows:
        return ReverseRows(split, self._digits)

    def messages(self, row: Row) -> list[Message]:
        return conversation(row.prompt)

    def score(self, row: Row, answer: Answer) -> Finding:
        return compared("exact", answer.text, row.answer, answer.finish_reason)

    def part_weights(self) -> Mapping[str, float]:
        return {"exact": 1.0}
