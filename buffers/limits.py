"""What the buffer enforces, and what of it would deadlock: refused when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OverAge = Literal["wait", "drop", "mask", "requeue"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the buffer enforces. Frozen for a lineage; a resumed learner may bring another `groups_per_step`.

    max_bytes >= (max_age + 1) x groups_per_step x group_bytes, else tickets could never fill a step: refused.
    """

    max_age: int
    groups_per_step: int
    max_steps: int
    over_age: OverAge = "wait"
    lookahead: float = 1.5
    publish_every: int = 1
    max_tickets: int | None = None  # rows x epochs, where epochs are bounded
    group_bytes: int = 1 << 20  # the largest a group may be: reserved with its ticket
    max_bytes: int = 4 << 30
    member_timeout_s: float = 30.0  # no beat for so long: its tickets are returned
    ticket_progress_s: float = 300.0  # no token, tool call or score for so long: the ticket is returned
    no_progress_s: float = 1800.0  # of the run; caps the straggler deadline
    max_losses: int = 3  # collectors a ticket may lose before it fails as `poison`
    max_uses: int = 1  # steps that train a group, as far as the window allows
    fresh_per_step: int = 0  # groups of a batch that no step has trained before, at least; the others' uses give way
    group_size: int = 1  # members of a group: turns tokens so far into a length per member

    def __post_init__(self) -> None:
        if self.max_age < 0:
            raise ValueError(f"max_age is {self.max_age}; it must be 0 (synchronous) or more")
        if self.groups_per_step < 1:
            raise ValueError(f"groups_per_step is {self.groups_per_step}; it must be 1 or more")
        if not 1.0 <= self.lookahead <= 2.0:
            raise ValueError(
                f"lookahead is {self.lookahead}; it must be 1 to 2: beyond 2 held groups expire under `wait`"
            )
        if self.max_uses < 1:
            raise ValueError(f"max_uses is {self.max_uses}; it must be 1 or more")
        if not 0 <= self.fresh_per_step <= self.groups_per_step:
            raise ValueError(
                f"fresh_per_step is {self.fresh_per_step}; it must be 0 to groups_per_step = {self.groups_per_step}"
            )
        if self.publish_every + self.max_uses > self.max_age + 2:
            raise ValueError(
                f"publish_every {self.publish_every} with max_trajectory_age {self.max_age} and max_uses "
                f"{self.max_uses} would deadlock: collectors would wait for weights that come too late; publish_every "
                f"+ max_uses may be at most max_trajectory_age + 2 = {self.max_age + 2}"
            )
        need = (self.max_age + 1) * self.groups_per_step * self.group_bytes
        if self.max_bytes < need:
            raise ValueError(
                f"max_bytes {self.max_bytes} is below (max_trajectory_age + 1) x groups_per_step x group_bytes "
                f"= {need}; a step could never be filled: raise buffer.max_bytes or lower max_tokens or group_size"
            )
