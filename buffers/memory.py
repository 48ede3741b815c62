"""`memory://`: the buffer inside one process, over the reference model. For tests and single-process use; it does not
survive the process and no other process can reach it.

Same operations, same waits as the server's: a call that waits is woken by the operation that ends its wait, and looks
again at the model's next deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.buffers.base import (
    Beat,
    BufferError,
    Commit,
    FailKind,
    GroupHeader,
    Lease,
    Limits,
    Member,
    MemberStats,
    PutResult,
    State,
    Stats,
    Ticket,
    TicketRow,
    Waiting,
)
from asyncrl.buffers.reference.common import Wait
from asyncrl.buffers.reference.model import Model
from asyncrl.schema import digest
from asyncrl.staleness import Weights

DEADLINE_SLACK_S = 0.02  # a deadline is looked at just after it passed: at the very moment nothing has changed yet


class MemoryBuffer:
    """Implements `base.Buffer`. `clock` gives unix seconds; tests pass their own."""

    def __init__(
        self,
        run: str,
        limits: Limits,
        *,
        recipe: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.run = run
        self.recipe = dict(recipe or {})
        self.clock = clock
        self.model = Model(limits)
        self._changed: dict[str, asyncio.Event] = {}

    @property
    def limits(self) -> Limits:
        return self.model.limits

    def _event(self, key: str) -> asyncio.Event:
        return self._changed.setdefault(key, asyncio.Event())

    def _wake(self) -> None:
        for key in self.model.wakes:
            self._event(key).set()
        self.model.wakes.clear()

    async def _wait(self, key: str, until: float) -> None:
        """Until woken by `key` or the clock reaches `until`."""
        event = self._event(key)
        try:
            async with asyncio.timeout(max(0.0, until - self.clock())):
                await event.wait()
        except TimeoutError:
            return
        event.clear()

    # --- collectors -------------------------------------------------------------------------------------------------

    async def join(self, member: Member, info: Mapping[str, Any]) -> None:
        self.model.join(member, info, self.clock())
        self._wake()

    async def leave(self, member: Member) -> None:
        self.model.leave(member, self.clock())
        self._wake()

    async def tickets(self, member: Member, *, seq: int, want: int, wait_s: float) -> list[Ticket]:
        limit = self.clock() + wait_s
        while True:
            answer = self.model.tickets(member, seq, want, self.clock())
            self._wake()
            if not isinstance(answer, Wait):
                return answer
            if self.clock() >= limit:
                return []
            await self._wait(f"tickets:{member.incarnation}", min(limit, answer.deadline + DEADLINE_SLACK_S))

    async def beat(
        self,
        member: Member,
        *,
        serving: Weights | None,
        checksum: str,
        progress: Mapping[tuple[int, int], int],
        info: Mapping[str, Any],
    ) -> Beat:
        revoked = self.model.beat(member, serving, checksum, progress, info, self.clock())
        self._wake()
        model = self.model
        mine = model.evaluation is not None and model.evaluation_claim in ("", member.incarnation)
        return Beat(
            step_version=model.version,
            lineage=model.lineage,
            announced=model.announced[0] if model.announced else None,
            revoked=revoked,
            evaluation=model.evaluation if mine else None,
            phase=model.phase,
        )

    async def nudge(self, member: Member, wait_s: float) -> None:
        await self._wait(f"nudge:{member.incarnation}", self.clock() + wait_s)

    async def put(self, member: Member, header: GroupHeader, payload: bytes) -> PutResult:
        while (answer := self.model.put(member, header, payload, self.clock())) is None:
            await self.nudge(member, 1.0)
        self._wake()
        return answer

    async def fail(
        self, member: Member, ordinal: int, attempt: int, *, kind: FailKind, reason: str, tokens: int, seconds: float
    ) -> PutResult:
        while (
            answer := self.model.fail(member, ordinal, attempt, kind, reason, tokens, seconds, self.clock())
        ) is None:
            await self.nudge(member, 1.0)
        self._wake()
        return answer

    # --- learner ----------------------------------------------------------------------------------------------------

    async def lease(self, lineage: int, step: int, *, wait_s: float) -> Lease | Waiting:
        limit = self.clock() + wait_s
        while True:
            answer = self.model.lease(lineage, step, self.clock())
            self._wake()
            if not isinstance(answer, Wait):
                return answer
            if self.clock() >= limit:
                return self._waiting(answer)
            await self._wait("learner", min(limit, answer.deadline + DEADLINE_SLACK_S))

    def _waiting(self, wait: Wait) -> Waiting:
        owners = tuple(dict.fromkeys(self.model.all[n].owner_name for n in wait.for_ordinals))
        return waiting_words(wait.for_ordinals, owners, len(self.model.members))

    async def payloads(self, lease: Lease) -> list[bytes]:
        found = []
        for header in lease.headers:
            payload = self.model.payload.get(header.ordinal)
            found.append(checked_payload(header, payload))
        return found

    async def release(self, lineage: int, step: int) -> bool:
        released = self.model.release(lineage, step, self.clock())
        self._wake()
        return released

    async def commit(self, lineage: int, step: int, *, skipped: bool = False) -> Commit:
        commit = self.model.commit(lineage, step, skipped, self.clock())
        self._wake()
        return commit

    async def checkpointed(self, lineage: int, version: int) -> None:
        self.model.checkpointed(lineage, version)

    async def new_lineage(self, *, parent: Weights | None, limits: Limits) -> int:
        lineage = self.model.new_lineage(parent, limits)
        while not self.model.sweep_chunk(lineage, self.clock()):
            pass
        self._wake()
        return lineage

    async def announce(self, weights: Weights, document: Mapping[str, Any]) -> None:
        self.model.announce(weights, document)
        self._wake()

    async def announcement(self) -> tuple[Weights, Mapping[str, Any]] | None:
        return self.model.announced

    # --- evaluation, state, inspection ------------------------------------------------------------------------------

    async def request_evaluation(self, request: Mapping[str, Any]) -> None:
        self.model.request_evaluation(request)
        self._wake()

    async def claim_evaluation(self, member: Member, request_id: str) -> bool:
        return self.model.claim_evaluation(member, request_id)

    async def report_evaluation(self, request_id: str, result: Mapping[str, Any]) -> None:
        self.model.report_evaluation(request_id, result)
        self._wake()

    async def evaluation(self, request_id: str, *, wait_s: float) -> Mapping[str, Any] | None:
        limit = self.clock() + wait_s
        while (found := self.model.results.get(request_id)) is None and self.clock() < limit:
            await self._wait(f"result:{request_id}", limit)
        return found

    async def finish(self, *, error: str | None = None) -> None:
        self.model.finish(error)
        self._wake()

    async def stats(self) -> Stats:
        model, now = self.model, self.clock()
        members = [
            MemberStats(
                name=m.member.name,
                incarnation=m.member.incarnation,
                serving=m.serving,
                checksum=m.checksum,
                alive=now - m.beat_at <= model.limits.member_timeout_s,
                beat_age_s=now - m.beat_at,
                issued=len(m.owned),
                progress=m.info,
            )
            for m in sorted(model.members.values(), key=lambda m: (m.member.name, m.member.incarnation))
        ]
        return Stats(
            run=self.run,
            phase=model.phase,
            lineage=model.lineage,
            version=model.version,
            tickets=model.next_ordinal,
            states=model.counts(),
            reasons={k: v for k, v in model.reasons.items() if v},
            lost_tokens=dict(model.lost_tokens),
            lost_seconds=dict(model.lost_seconds),
            refused_puts=model.refused_puts,
            bytes_reserved=model.reserved,
            bytes_held=model.held_bytes,
            bytes_kept=model.kept_bytes,
            members=members,
            waiting=self._waiting(model.waiting) if model.learner_waits and model.waiting else None,
            checkpoint=model.checkpoint,
            forks={lineage: Weights(*origin) for lineage, origin in model.tree.forks.items()},
            dues=dict(model.dues),
            error=model.error,
        )

    async def snapshot(self) -> tuple[Stats, list[TicketRow]]:
        rows = [
            TicketRow(
                ordinal=t.ordinal,
                state=t.state,
                attempt=t.attempt,
                reason=t.reason,
                trained=t.trained,
                owner=t.owner_name,
                lo=t.lo if t.state in (State.ISSUED, State.HELD, State.LEASED) else None,
                has_payload=t.ordinal in self.model.payload,
                size=t.size,
            )
            for _, t in sorted(self.model.all.items())
        ]
        return await self.stats(), rows

    async def close(self) -> None:
        return None


def waiting_words(ordinals: tuple[int, ...], owners: tuple[str, ...], members: int) -> Waiting:
    """Who a learner waits for, said so that a person can act."""
    if ordinals:
        shown = ", ".join(map(str, ordinals[:4])) + (f" and {len(ordinals) - 4} more" if len(ordinals) > 4 else "")
        reason = f"tickets {shown} on {', '.join(owners) or 'no collector'}"
    elif members == 0:
        reason = "a collector to join (none is connected)"
    else:
        reason = "collectors to serve weights of this lineage and take tickets"
    return Waiting(ordinals, owners, reason)


def checked_payload(header: GroupHeader, payload: bytes | None) -> bytes:
    """A payload whose digest is the one that was put, or an error that names the ticket."""
    if payload is None:
        raise BufferError(f"the group of ticket {header.ordinal} (attempt {header.attempt}) is missing from the store")
    found = digest(payload)
    if found != header.digest:
        raise BufferError(
            f"the group of ticket {header.ordinal} (attempt {header.attempt}) is damaged: digest {found}, put as "
            f"{header.digest}"
        )
    return payload
