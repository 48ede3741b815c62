"""What an environment is: what answers the model, turn by turn.

A task class with a method `environment()` returns a new one for each episode. It lives in a process of its own
(`processes.py`) that no other episode ever had, and that is killed with all it started when the episode ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.tasks.base import Answer, Message, Row

RAISED = "environment_raised"  # an exception of the environment's
TIMEOUT = "environment_timeout"  # longer than task.step_timeout_s; its process was killed
DIED = "environment_died"  # the process ended: `os._exit`, out of memory, a crash in a library
INVALID = "environment_invalid"  # what it returned cannot be used
LOST = "environment_lost"  # no process could be had, or all of them ended at once: nobody's fault, played again


class EnvironmentFailed(Exception):
    """The episode cannot go on, through a fault of its environment or row. `failure`: one of the names above."""

    def __init__(self, failure: str, detail: str) -> None:
        super().__init__(f"{failure}: {detail}")
        self.failure = failure


class EnvironmentLost(Exception):
    """What environments run in is gone; the episode may be played again from its beginning."""


@dataclass(frozen=True, slots=True)
class Step:
    """What comes back to an answer. messages: the conversation goes on with them; reward: of this turn, if it has one
    of its own; done: the episode is over. info: JSON values, kept in the record (a later step's win)."""

    messages: Sequence[Message] = ()
    done: bool = False
    reward: float | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """A user's object. One may also have `score(self)`: the reward parts of the whole episode, instead of the task's
    `score(row, answer)`."""

    def reset(self, row: Row, seed: int) -> Sequence[Message] | None:
        """Called once, before all else. Returns the conversation that the model answers; None: the row's own
        (`task.messages(row)`). The seed is the same for all attempts at one row's ticket."""

    def step(self, answer: Answer) -> Step:
        """Called for each answer. `answer.messages` is the conversation since the opening, this answer included."""

    def close(self) -> None:
        """Called at the end of an episode that went as it should; after a failure its process is just killed."""
