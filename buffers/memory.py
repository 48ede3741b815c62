"""`memory://`: the buffer inside one process, over the reference model. For tests and single-process use; it does not
survive the process and no other process can reach it.

Same operations, same waits as the server's: a call that waits is woken by the operation that ends its wait, and looks
again at the model's next deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.buffers.base import (
    Beat,
    Commit,
    Damaged,
    FailKind,
    GroupHeader,
    Lease,
    Member,
    MemberStats,
    PutResult,
    State,
    Stats,
    Ticket,
    TicketRow,
    Waiting,
)
from asyncrl.buffers.limits import Limits
from asyncrl.buffers.reference.common import TicketState, Wait, Work
from asyncrl.buffers.reference.model import Model
from asyncrl.buffers.words import blocked_words, waiting_words
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
        self._model = Model(limits)
        self._changed: dict[str, asyncio.Event] = {}

    @property
    def limits(self) -> Limits:
        return self.model.limits

    @property
    def model(self) -> Model:
        """The model, at the present time."""
        self._model.at(self.clock())
        return self._model

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

    def _again(self, wait: Wait) -> float:
        """When asking again could help without being woken."""
        return self.clock() + wait.within_s + DEADLINE_SLACK_S

    # --- collectors -------------------------------------------------------------------------------------------------

    async def join(self, member: Member, info: Mapping[str, Any]) -> None:
        self.model.join(member, info)
        self._wake()

    async def leave(self, member: Member) -> None:
        self.model.leave(member)
        self._wake()

    async def tickets(self, member: Member, *, seq: int, want: int, wait_s: float) -> list[Ticket]:
        limit = self.clock() + wait_s
        while True:
            answer = self.model.tickets(member, seq, want)
            self._wake()
            if not isinstance(answer, Wait):
                return answer
            if self.clock() >= limit:
                return []
            await self._wait(
                f"tickets:{member.incarnation}", min(limit, self.clock() + answer.within_s + DEADLINE_SLACK_S)
            )

    async def beat(
        self,
        member: Member,
        *,
        serving: Weights | None,
        checksum: str,
        progress: Mapping[tuple[int, int], int],
        info: Mapping[str, Any],
    ) -> Beat:
        revoked = self.model.beat(member, serving, checksum, progress, info)
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
            announcements=model.announcements,
            verify=model.verify,
        )

    async def nudge(self, member: Member, wait_s: float) -> None:
        await self._wait(f"nudge:{member.incarnation}", self.clock() + wait_s)

    async def put(self, member: Member, header: GroupHeader, payload: bytes) -> PutResult:
        while (answer := self.model.put(member, header, payload)) is None:
            await self.nudge(member, 1.0)
        self._wake()
        return answer

    async def fail(
        self,
        member: Member,
        ordinal: int,
        attempt: int,
        *,
        kind: FailKind,
        reason: str,
        tokens: int,
        seconds: float,
        reward: float | None = None,
        length: float = 0.0,
    ) -> PutResult:
        work = Work(tokens, seconds, reward, length)
        while (answer := self.model.fail(member, ordinal, attempt, kind, reason, work)) is None:
            await self.nudge(member, 1.0)
        self._wake()
        return answer

    # --- learner ----------------------------------------------------------------------------------------------------

    async def lease(self, lineage: int, step: int, *, wait_s: float) -> Lease | Waiting:
        limit = self.clock() + wait_s
        while True:
            answer = self.model.lease(lineage, step)
            self._wake()
            if not isinstance(answer, Wait):
                return answer
            if self.clock() >= limit:
                return self._waiting(answer)
            await self._wait("learner", min(limit, self._again(answer)))

    def _waiting(self, wait: Wait) -> Waiting:
        owners = tuple(dict.fromkeys(self.model.all[n].owner_name for n in wait.for_ordinals))
        since = self.model.learner_waits
        return waiting_words(wait.for_ordinals, owners, len(self.model.members), since or 0.0)

    async def payloads(self, lease: Lease) -> list[bytes]:
        return checked_payloads(lease, [self.model.payload.get(n) for n in lease.ordinals])

    async def release(self, lineage: int, step: int) -> bool:
        released = self.model.release(lineage, step)
        self._wake()
        return released

    async def commit(self, lineage: int, step: int, *, skipped: bool = False) -> Commit:
        commit = self.model.commit(lineage, step, skipped)
        self._wake()
        return commit

    async def quarantine(self, lineage: int, step: int, ordinals: Sequence[int], reason: str) -> None:
        self.model.quarantine(lineage, step, ordinals, reason)
        self._wake()

    async def checkpointed(self, lineage: int, version: int, *, oldest: int | None = None) -> None:
        self.model.checkpointed(lineage, version, oldest)

    async def settled(self, lineage: int, *, limit: int) -> list[TicketRow]:
        return [self._row(t) for t in self.model.settled(lineage, limit)]

    async def archived(self, lineage: int, ordinals: Sequence[int]) -> None:
        self.model.archived(lineage, ordinals)

    async def new_lineage(self, *, parent: Weights | None, limits: Limits) -> int:
        lineage = self.model.new_lineage(parent, limits)
        self._sweep(lineage)
        return lineage

    async def adopt(self, forks: Mapping[int, Weights]) -> None:
        model = self.model
        model.adopt(forks)
        self._sweep(model.lineage)

    def _sweep(self, lineage: int) -> None:
        while not self.model.sweep_chunk(lineage):
            pass
        self._wake()

    async def recommit(self, lineage: int, step: int, tickets: Sequence[tuple[int, int]]) -> Commit:
        commit = self.model.recommit(lineage, step, tickets)
        self._wake()
        return commit

    async def announce(self, weights: Weights, document: Mapping[str, Any]) -> None:
        self.model.announce(weights, document)
        self._wake()

    async def announcement(self) -> tuple[Weights, Mapping[str, Any]] | None:
        return self.model.announced

    async def request_verification(self, request_id: str) -> None:
        self.model.request_verification(request_id)
        self._wake()

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
        model = self.model
        members = [
            MemberStats(
                name=m.member.name,
                incarnation=m.member.incarnation,
                serving=m.serving,
                checksum=m.checksum,
                alive=model.now - m.beat_at <= model.limits.member_timeout_s,
                beat_age_s=model.now - m.beat_at,
                issued=len(m.owned),
                progress=m.info,
            )
            for m in sorted(model.members.values(), key=lambda m: (m.member.name, m.member.incarnation))
        ]
        waiting = self._waiting(model.waiting) if model.waiting else None
        refused = [(model.members[m].member.name, *why) for m, why in model.refusals().items()]
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
            waiting=waiting,
            checkpoint=model.checkpoint,
            forks={lineage: Weights(*origin) for lineage, origin in model.tree.forks.items()},
            dues=dict(model.dues),
            error=model.error,
            returns=dict(model.returns),
            lost_reward={key: total / n for key, (total, n) in model.rewards.items()},
            lost_length={key: total / n for key, (total, n) in model.lengths.items()},
            filtered_in_row=model.filtered_in_row,
            quarantined=model.quarantined,
            archived=dict(model.gone),
            blocked=blocked_words(waiting, refused),
            time=model.clock,
        )

    async def snapshot(self) -> tuple[Stats, list[TicketRow]]:
        return await self.stats(), [self._row(t) for _, t in sorted(self.model.all.items())]

    async def row(self, ordinal: int) -> TicketRow | None:
        ticket = self.model.all.get(ordinal)
        return self._row(ticket) if ticket else None

    async def rows(self, *, states: Sequence[State], start: int = 0, limit: int = 100) -> list[TicketRow]:
        found = [t for n, t in sorted(self.model.all.items()) if n >= start and t.state in states]
        return [self._row(t) for t in found[:limit]]

    def _row(self, t: TicketState) -> TicketRow:
        return TicketRow(
            ordinal=t.ordinal,
            state=t.state,
            attempt=t.attempt,
            reason=t.reason,
            trained=t.last_use,
            owner=t.owner_name,
            lo=self.model.edge(t) if t.state in (State.ISSUED, State.HELD, State.LEASED) else None,
            has_payload=t.ordinal in self.model.payload,
            size=t.size,
            uses=tuple(t.uses),
            losses=t.losses,
            requeues=t.requeues,
            left=t.left,
            times=dict(t.times),
        )

    async def payload(self, ordinal: int) -> bytes | None:
        return self.model.payload.get(ordinal)

    async def quarantined(self) -> dict[str, bytes]:
        return dict(self.model.aside)

    async def close(self) -> None:
        return None


def checked_payloads(lease: Lease, payloads: Sequence[bytes | None]) -> list[bytes]:
    """Payloads whose digests are those that were put. Raises Damaged, which names all others."""
    sound, damaged = [], {}
    for header, payload in zip(lease.headers, payloads, strict=True):
        name = f"the group of ticket {header.ordinal} (attempt {header.attempt})"
        if payload is None:
            damaged[header.ordinal] = f"{name} is missing from the store"
        elif (found := digest(payload)) != header.digest:
            damaged[header.ordinal] = f"{name} is damaged: digest {found}, put as {header.digest}"
        else:
            sound.append(payload)
    if damaged:
        raise Damaged(damaged)
    return sound
