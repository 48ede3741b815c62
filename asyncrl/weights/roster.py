"""Who takes part in a collective transfer, and who keeps the others waiting: decisions, and what is said to reach them.

A transfer is an *epoch*, a number that only grows. It is offered, members knock, the roster is closed, the weights are
broadcast to exactly its members, each reports. Times are seconds of the learner's monotonic clock.

>>> knocks = {name: Knock(member=name, device="cpu", group=0) for name in ("b", "a")}
>>> form(4, knocks, None, device="cpu", limit_s=60.0)
Roster(epoch=4, members=('a', 'b'), group=4, backend='gloo', limit_s=60.0)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from asyncrl.staleness import Weights
from asyncrl.weights.base import Recipient

MEETING, TRANSFER = 0.25, 0.5
"""Shares of `weights.deadline_s`: what those who are there wait for the others, and what the broadcast may take. The
rest is for what lies between: who is called off for another member's sake hears of it before its own deadline."""

Backend = Literal["gloo", "nccl"]
Step = Literal["wait", "close", "renew", "cancel"]


class Knock(msgspec.Struct, frozen=True):
    """A member has read the offer and is there."""

    member: str  # its incarnation
    device: str  # "cpu", or the UUID of the GPU it computes on
    group: int  # the process group it still has; 0: none


class Roster(msgspec.Struct, frozen=True):
    """The members of one epoch; their ranks are their places from 1 on, the learner's is 0. No members: called off."""

    epoch: int
    members: tuple[str, ...]
    group: int  # the epoch in which their process group was formed: this one, or an earlier one with the same members
    backend: Backend
    limit_s: float  # of the broadcast

    def rank(self, member: str) -> int | None:
        """None: it is not in it."""
        return self.members.index(member) + 1 if member in self.members else None


class Report(msgspec.Struct, frozen=True):
    """How an epoch ended for a member."""

    member: str
    received: int  # bytes
    error: str  # "": it has the weights, verified


@dataclass(frozen=True, slots=True)
class Meeting:
    """An epoch that is offered and not closed yet."""

    weights: Weights
    opened: float
    deadline_s: float

    def decide(
        self,
        now: float,
        *,
        first: float | None,
        missing: Collection[str],
        newest: Weights,
        wanted: bool,
    ) -> Step:
        """What is to be done. first: when the first member knocked. missing: who is waited for. wanted: whether anybody
        lacks these weights.

        With nobody there, the weights stay offered for a while even when there are newer ones: a collector that needs
        longer to come than the learner to publish would else find every offer withdrawn.
        """
        patience = MEETING * self.deadline_s
        if first is not None:
            return "wait" if missing and now - first < patience else "close"
        if not wanted:
            return "cancel"
        return "renew" if newest != self.weights and not (missing and now - self.opened < patience) else "wait"


def lacking(recipients: Iterable[Recipient], weights: Weights, delivered: Mapping[str, Weights]) -> set[str]:
    """Who has neither these weights nor newer ones, by its own word or by its report to the sender."""
    return {
        recipient.incarnation
        for recipient in recipients
        if not any(
            found is not None and found >= weights
            for found in (recipient.serving, delivered.get(recipient.incarnation))
        )
    }


def waited_for(recipients: Iterable[Recipient], lacking: Collection[str], excused: Collection[str]) -> set[str]:
    """Out of those who lack the weights: not who did not come, or did not keep up, the last time (`excused`, until it
    comes by itself), and not who has weights that wait for an evaluation or for running requests."""
    busy = {recipient.incarnation for recipient in recipients if recipient.weights and recipient.phase is None}
    return set(lacking) - busy - set(excused)


def form(epoch: int, knocks: Mapping[str, Knock], last: Roster | None, *, device: str, limit_s: float) -> Roster:
    """The roster of those who knocked. `last`: the one whose process group the learner, on `device`, still has. It is
    kept while all have it: forming one costs a connection for each pair.

    NCCL where all are on GPUs of their own (it refuses two ranks on one), else Gloo.
    """
    members = tuple(sorted(knocks))
    devices = [device, *(knock.device for knock in knocks.values())]
    backend: Backend = "nccl" if "cpu" not in devices and len(set(devices)) == len(devices) else "gloo"
    kept = (
        last is not None
        and (last.members, last.backend) == (members, backend)
        and all(knock.group == last.group for knock in knocks.values())
    )
    return Roster(epoch, members, last.group if kept and last is not None else epoch, backend, limit_s)


def blame(members: Sequence[str], reports: Mapping[str, Report], *, expired: bool) -> list[str]:
    """Who has kept the others waiting in a round that failed. Who is frozen or cut off does not even report. If all
    have, and the time is up (`expired`), it is those who had received least: the others wait for them in the end."""
    silent = [member for member in members if member not in reports]
    failed = [member for member in members if member in reports and reports[member].error]
    if silent or not failed or not expired:
        return silent
    least = min(reports[member].received for member in failed)
    return [member for member in failed if reports[member].received == least]
