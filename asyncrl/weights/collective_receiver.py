"""Transport `collective`, a collector's side: takes part in an epoch that the learner offers (`collective.py`).

Two threads work for a call: one knocks, joins the group and receives; one listens whether the learner calls the epoch
off, which it also does for this member's sake when another member breaks it. The caller waits for the first of them, or
for its deadline, whatever they are stuck in.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from asyncrl.weights.attempts import Attempt, first_line
from asyncrl.weights.base import StagedWeights, WeightsError, WeightsGone, WeightsLate
from asyncrl.weights.collective import CollectiveOffer, parse
from asyncrl.weights.group import Group
from asyncrl.weights.manifest import Manifest, TensorSpec, compare, tensors_in
from asyncrl.weights.meeting import Visit
from asyncrl.weights.memory import Spare
from asyncrl.weights.roster import Knock, Report

AFTER_S = 1.0
"""What attempts wait for longer than the caller, whose message says more than theirs; then they are gone."""


class CollectiveReceiver:
    """See `base.Receiver`. Between calls it keeps its connections to the learner and the group it was in."""

    def __init__(self, me: str, *, device: str = "cpu") -> None:
        """`me`: the collector's incarnation; `device`: as in its `Place`."""
        self._me = me
        self._device = device
        self._session: Session | None = None
        self._spare = Spare()

    def stage(self, offer: Mapping[str, Any], *, deadline_s: float, verify: bool = True) -> StagedWeights:
        """Take part. The weights lie in memory of the caller's own.

        Raises WeightsGone: the epoch is over, was called off, or began without this member, which comes to the next.
        WeightsLate: the learner did not come within `deadline_s`. WeightsError: it cannot be reached, or what came is
        not what the manifest says.
        """
        expected = parse(offer)
        until = time.monotonic() + deadline_s
        session, self._session = self._session, None  # it comes back from a call that ends well
        if session is None or session.learner != (expected.address, expected.port):
            session = Session(self._me, self._device, expected)
        part = Part(expected, self._spare, until, verify=verify and expected.manifest.checksum != "")
        staged = part.outcome(session)
        self._session = session
        return staged

    def close(self) -> None:
        """Leave the group. What has been staged stays good."""
        self._session = None
        self._spare.drop()


class Session:
    """What lasts from one epoch to the next. Used by one attempt at a time for each of its two connections."""

    def __init__(self, me: str, device: str, expected: CollectiveOffer) -> None:
        self.me = me
        self.device = device
        self.learner = (expected.address, expected.port)
        self.group: Group | None = None
        self._visits: list[Visit] = []

    def visits(self, limit_s: float) -> list[Visit]:
        """Two: one that says things and one that listens."""
        while len(self._visits) < 2:
            self._visits.append(Visit(*self.learner, limit_s))
        return self._visits

    def abort(self) -> None:
        """End what an attempt still does, as far as it can be ended."""
        if self.group is not None:
            self.group.abort()


class Part:
    """A member's part in one epoch."""

    def __init__(self, expected: CollectiveOffer, spare: Spare, until: float, *, verify: bool) -> None:
        self._expected = expected
        self._spare = spare
        self._until = until
        self._verify = verify
        self._received = 0  # bytes
        self._doing = "connecting"  # for the message of a deadline
        self._ended: SimpleQueue[Attempt[StagedWeights | None]] = SimpleQueue()

    def outcome(self, session: Session) -> StagedWeights:
        """Take part, and return what came. Raises as `CollectiveReceiver.stage` does."""
        began = time.monotonic()
        Attempt(lambda: self._take(session), name=f"weights-take-{self._expected.epoch}", ended=self._ended)
        try:
            for _ in range(2):
                staged = self._ended.get(timeout=max(0.0, self._until - time.monotonic())).result()
                if staged is not None:
                    return staged
            raise WeightsGone(f"{self._expected}: broke off here, after the others had them")
        except Empty:
            session.abort()
            raise WeightsLate(
                f"{self._expected}: late after {time.monotonic() - began:.1f} s of {self._doing}. The learner, or its "
                "network, is stopped or busier than weights.deadline_s allows"
            ) from None
        except WeightsError:
            session.abort()
            raise
        except RuntimeError as error:
            # torch's own, from a connection to the learner: what breaks in the group, the learner is asked about.
            session.abort()
            raise WeightsError(
                f"{self._expected}: the learner has ended, or the network to it: {first_line(error)}"
            ) from error

    # --- attempts ---------------------------------------------------------------------------------------------------

    def _take(self, session: Session) -> StagedWeights | None:
        """Knock, join, receive, verify, report. None: it broke, and the other attempt hears why."""
        expected = self._expected
        visit, ear = session.visits(self._left())
        self._doing = "asking for the epoch"
        # It may have been in this one already, and need the weights again.
        if visit.newest() != expected.epoch or visit.is_closed(expected.epoch):
            visit.stray(session.me)
            raise WeightsGone(f"{expected}: it began without this collector; there will be a next")
        visit.knock(expected.epoch, Knock(session.me, session.device, session.group.id if session.group else 0))
        self._doing = "waiting for it to begin"
        roster = visit.roster(expected.epoch, self._left())
        rank = roster.rank(session.me)
        if rank is None:
            visit.stray(session.me)
            raise WeightsGone(f"{expected}: it was called off, or began just now; there will be a next")
        Attempt(lambda: self._listen(session.me, ear), name=f"weights-hear-{expected.epoch}", ended=self._ended)
        try:
            if session.group is None or session.group.id != roster.group:
                self._doing, session.group = "connecting to the other members", None
                session.group = Group(roster, visit.store, rank, address=visit.own_address, device=session.device)
            staged = self._receive(session.group, roster.limit_s)
        except (WeightsError, RuntimeError) as error:
            visit.report(expected.epoch, Report(session.me, self._received, first_line(error)))
            if isinstance(error, WeightsError):
                raise
            return None
        visit.report(expected.epoch, Report(session.me, self._received, ""))
        return staged

    def _listen(self, me: str, ear: Visit) -> None:
        """Until the epoch is over. Raises WeightsGone if it was called off, having said that this member is there."""
        why = ear.over(self._expected.epoch, self._left())
        if why:
            ear.report(self._expected.epoch, Report(me, self._received, "called off"))
            raise WeightsGone(f"{self._expected}: called off by the learner: {why}")

    def _receive(self, group: Group, limit_s: float) -> StagedWeights:
        """All bytes into one piece of memory, hashed while they come."""
        expected, manifest = self._expected, self._expected.manifest
        memory = self._spare.take(manifest.size)
        data = memory.bytes()[: manifest.size]
        hashes = Hashes(manifest, data) if self._verify else None

        def arrived(end: int) -> None:
            self._received = end
            self._doing = f"receiving, with {end} of {manifest.size} bytes here"
            if hashes is not None:
                hashes.reach(end)

        arrived(0)
        group.receive(expected.epoch, expected.weights, torch.from_numpy(data), arrived, limit_s=limit_s)
        if hashes is not None:
            compare(manifest, hashes.found, where=str(expected))
        return StagedWeights(
            expected.weights, tensors_in(data, manifest), manifest.tied, manifest.served, adapter=manifest.adapter
        )

    def _left(self) -> float:
        """Seconds that an attempt may wait."""
        return max(0.0, self._until - time.monotonic()) + AFTER_S


class Hashes:
    """The tensors' checksums, as far as their bytes are there."""

    def __init__(self, manifest: Manifest, data: NDArray[np.uint8]) -> None:
        self.found: list[TensorSpec] = []
        self._manifest, self._data = manifest, data
        self._digest = xxhash.xxh3_64()
        self._reached = 0

    def reach(self, end: int) -> None:
        """The first `end` bytes are there."""
        for spec in self._manifest.tensors[len(self.found) :]:
            last = spec.offset + spec.nbytes
            if self._reached < min(end, last):
                self._digest.update(self._data[max(self._reached, spec.offset) : min(end, last)].data)
            if spec.nbytes and end < last:
                break
            self.found.append(msgspec.structs.replace(spec, checksum=self._digest.hexdigest()))
            self._digest.reset()
        self._reached = end
