"""Too many answers that no verifier could score: the run ends before it trains on what is left of them. Pure.

Which answers stay without a score is seldom chance: those that are long, or unusual, or right in another way. What the
verifiers can still score is then another distribution than what the model writes, and the model learns to write it. So
a collector looks at the latest answers that its verifiers were asked about. What engine, environment or agent failed
at is not their fault and does not count.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from asyncrl.telemetry.table import visible

FEWEST = 64
"""Answers before anything is said: where 30 % are unscored, more than half of 64 are by chance once in 4000 looks."""

GROUPS = 8
"""And at least so many groups' worth: one row that cannot be scored leaves a whole group without scores."""

WINDOW = 4
"""x that number: the answers that count. A verifier that begins to fail is seen after two fewest numbers of answers."""

FIX = (
    "Mend the verifiers and go on with `asyncrl run --resume`. If so many are meant to have no score, begin with "
    "another collector.max_unscored (null: any)"
)
EXAMPLES = 3
SHOWN = 100
"""Characters of an answer, and of what the verifier said, in an example."""


class TooManyUnscored(Exception):
    """The verifiers cannot be trusted with this run; some lines with shares, classes and examples."""


@dataclass(frozen=True, slots=True)
class Missed:
    """An answer without a score. failure: its class. detail: what the verifier said."""

    row_id: str
    failure: str
    detail: str
    answer: str

    def line(self) -> str:
        """For a person; nothing in it can steer a terminal or break the line."""
        said = f": {_short(self.detail)}" if self.detail else ""
        return f"  row {_short(self.row_id)}, {self.failure}{said}; the answer: {_short(self.answer) or '(empty)'}"


class UnscoredWatch:
    """Sees one answer after the other. limit: `collector.max_unscored`, None: any share will do."""

    def __init__(self, limit: float | None, *, group_size: int) -> None:
        self._limit = limit
        self._fewest = max(FEWEST, GROUPS * group_size)
        self._latest: deque[Missed | None] = deque(maxlen=WINDOW * self._fewest)

    def see(self, missed: Missed | None) -> None:
        """An answer that the verifiers were asked about; None: it has a score. Raises TooManyUnscored."""
        if self._limit is None:
            return
        self._latest.append(missed)
        if missed is None or len(self._latest) < self._fewest:
            return
        unscored = [one for one in self._latest if one is not None]
        if len(unscored) > self._limit * len(self._latest):
            raise TooManyUnscored(_said(unscored, len(self._latest), self._limit))


def _said(unscored: list[Missed], answers: int, limit: float) -> str:
    classes = Counter(one.failure for one in unscored).most_common()
    first = (
        f"{len(unscored)} of the last {answers} answers could not be scored, more than collector.max_unscored "
        f"{limit:g}: {', '.join(f'{failure} {count}' for failure, count in classes)}"
    )
    newest = {one.failure: one for one in unscored}
    shown = [newest[failure] for failure, _ in classes][:EXAMPLES]
    shown += [one for one in reversed(unscored) if one not in shown][: EXAMPLES - len(shown)]
    return "\n".join([first, *(one.line() for one in shown), FIX])


def _short(text: str) -> str:
    return visible(text if len(text) <= SHOWN else text[: SHOWN - 3] + "...")
