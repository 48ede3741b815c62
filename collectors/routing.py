"""Which engine takes a request: of those with a free slot the one that has the fewest outstanding tokens. Pure.

Outstanding are the tokens of prompts that are still to be computed, and all those that requests may still sample. The
prompt that the members of a group share is computed once an engine, so they are placed together, as far as slots allow:
one by one, each on the engine that has the least to do then, they would spread over all engines and have their prompt
computed by each. What is balanced are groups; a member that comes alone, because its engine was lost, is drawn to where
others of its group are by the prompt that it costs elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as routing sees it. prompt, most: tokens to read before it can sample, and to sample at most."""

    group: str
    prompt: int
    most: int


@dataclass(slots=True)
class Load:
    """What an engine has to do. free: slots that nobody has, below 0 where requests wait for one; tokens: outstanding;
    groups: whose prompts it holds."""

    free: int
    tokens: int
    groups: set[str] = field(default_factory=set)

    def room(self, count: int) -> int:
        """How many of so many requests it takes at once: as many as it has slots for, else one, which waits."""
        return max(1, min(self.free, count))

    def after(self, asks: Sequence[Ask]) -> int:
        """Outstanding tokens, were it to take these requests of one group."""
        new = asks[0].group not in self.groups
        return self.tokens + sum(ask.most for ask in asks) + (asks[0].prompt if new else 0)

    def take(self, asks: Sequence[Ask]) -> None:
        """Count requests of one group that it takes."""
        self.tokens = self.after(asks)
        self.groups.add(asks[0].group)
        self.free -= len(asks)


def spread(loads: Sequence[Load], asks: Sequence[Ask]) -> list[int]:
    """For each request of a group the index of its engine; `loads`, one at least, count what they take.

    Where slots are free comes first: to wait beside a free slot saves nobody anything.
    """
    chosen: list[int] = []
    while left := asks[len(chosen) :]:

        def cost(n: int, left: Sequence[Ask] = left) -> tuple[int, int, int]:
            load = loads[n]
            waiting = len(left) - max(0, min(load.free, len(left)))
            return waiting, load.after(left[: load.room(len(left))]), n

        best = min(range(len(loads)), key=cost)
        taken = left[: loads[best].room(len(left))]
        loads[best].take(taken)
        chosen += [best] * len(taken)
    return chosen
