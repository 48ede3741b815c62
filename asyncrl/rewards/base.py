"""What a verifier is: one part of a recipe's `task.rewards`, at work.

A verifier says two things of an answer: numbers, and, where the answer is not right, the *class* of what is wrong with
it, by which answers are counted (`wrong_tool` 40 %, `malformed` 3 %). What it cannot say anything of is not wrong but
*unscored*: it raises, and the member is left out of loss and baseline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Finding:
    """What a verifier found in one answer; also what a task's `score` or a reward function may return.

    parts: by name. wrong: class of what is wrong, "" if nothing is: lower-case words, as in `wrong_answer`.
    detail: for a person who looks at this answer, such as what was compared with what. read: what was taken for the
    answer, such as the content of a box, by which `asyncrl eval` counts votes; "": the whole text.
    """

    parts: Mapping[str, float | None]
    wrong: str = ""
    detail: str = ""
    read: str = ""


class BadRow(Exception):
    """No answer to this row could ever be scored, such as one whose expected answer cannot be read. One line."""


class Verifier(Protocol):
    """A part that is computed in a verifier process. Built once there, from the recipe's part; so building it must be
    cheap, and heavy libraries are imported by its own module only."""

    def check(self, row: Mapping[str, Any]) -> None:
        """Raise BadRow if no answer to the row could be scored. Called for some rows before a run, and by `verify`."""

    def verify(self, row: Mapping[str, Any], answer: Mapping[str, Any]) -> Finding:
        """`row`: the fields of `tasks.base.Row`; `answer`: those of `tasks.base.Answer`.

        Whatever it raises makes the answer unscored: BadRow as `bad_row`, MemoryError as `verifier_memory`, anything
        else as `verifier_raised`. It may be killed at any time."""


@runtime_checkable
class Remarking(Verifier, Protocol):
    """A Verifier with something to say of rows together."""

    def remark(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """What is odd about them, though each passes `check`; "" if nothing is. Called for some rows before a run."""


class Remote(Protocol):
    """A part whose numbers are asked for elsewhere, such as of a judge: beside the verifier processes, in the event
    loop of the collector."""

    async def start(self) -> None:
        """Make sure that it can be asked. Raises rewards.pool.VerifierError, of one to three lines with the fix."""

    async def verify(self, row: Mapping[str, Any], answer: Mapping[str, Any]) -> Finding:
        """As `Verifier.verify`. Raises `Unscored` for what no verifier raises by itself, such as a judge that is
        down. Called for many answers at once; the wait for it is bounded by its own limits."""

    async def close(self) -> None:
        """End all that was started; calls in flight raise."""


class Unscored(Exception):
    """There is no number, for a reason that has a class of its own: `failure`, as in `judge_unavailable`."""

    def __init__(self, failure: str, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure
        self.detail = detail
