"""The production buffer: one run in a Redis-protocol store. The scripts decide; here are calls, waits and types.

A wait is a blocking pop of the waiter's own mailbox, bounded by the script's next deadline; then the operation is asked
again. A lost reply, a spurious wake or a restarted server only leads to one more question.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from redis import exceptions
from redis.exceptions import RedisError

from asyncrl.buffers.base import (
    Beat,
    Commit,
    FailKind,
    GroupHeader,
    Lease,
    Member,
    PutResult,
    State,
    Stats,
    Ticket,
    TicketRow,
    Waiting,
)
from asyncrl.buffers.limits import Limits
from asyncrl.buffers.memory import DEADLINE_SLACK_S, checked_payloads
from asyncrl.buffers.puts import Puts
from asyncrl.buffers.replies import header_of, row_of, stats_of, weights_of
from asyncrl.buffers.store import Store, limits_doc, payload_key, run_prefix
from asyncrl.buffers.words import waiting_words
from asyncrl.staleness import Weights

READ_BYTES = 1 << 20  # of a reply, at most: small groups share one, and one of several MB is slower than a few
ROUND_BYTES = 1 << 25  # asked for at once: at a busy server each round waits for everybody else's turn
ARCHIVED_ROWS = 500  # that leave at once: the server does nothing else for about ten milliseconds
SILENCE_S = 5.0  # beyond its own limit, after which a pop that did not return is given up and simply made again
BROKEN_S = 0.05  # before looking again after a wait whose connection broke: the question itself has patience
REWIND_WAIT_S = 1.0  # a rewind in progress answers "retry"; its end wakes the member earlier


class RedisBuffer:
    """Implements `base.Buffer`. `clock` replaces the server's clock in tests."""

    def __init__(
        self,
        store: Store,
        run: str,
        limits: Limits,
        *,
        recipe: Mapping[str, Any],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.store = store
        self.run = run
        self.limits = limits
        self.recipe = dict(recipe)
        self.clock = clock
        self.prefix = run_prefix(run)
        self._puts = Puts(store, self.prefix)

    def _now(self) -> str:
        return "" if self.clock is None else repr(self.clock())

    async def _call(self, operation: str, **arguments: Any) -> Any:
        return await self.store.run_script(self.prefix, operation, arguments, self._now())

    async def _wait(self, box: str, seconds: float) -> None:
        """Until something is put into the mailbox, at most `seconds`. The server bounds the pop; the timeout around it
        bounds a server that no longer answers. With a connection that breaks, what it popped is lost: look again."""
        if seconds <= 0:
            return
        key = f"{self.prefix}:mail:{box}"
        try:
            async with asyncio.timeout(seconds + SILENCE_S):
                await self.store.mailbox.blpop([key], timeout=max(0.01, seconds))
        except TimeoutError:
            return
        except exceptions.ConnectionError:
            await asyncio.sleep(min(seconds, BROKEN_S))
        except RedisError as error:
            raise self.store.failure(f"waiting on {box}", error) from error

    # --- collectors -------------------------------------------------------------------------------------------------

    async def join(self, member: Member, info: Mapping[str, Any]) -> None:
        await self._call("join", name=member.name, incarnation=member.incarnation, info=dict(info))

    async def leave(self, member: Member) -> None:
        await self._call("leave", name=member.name, incarnation=member.incarnation)

    async def tickets(self, member: Member, *, seq: int, want: int, wait_s: float) -> list[Ticket]:
        limit = time.monotonic() + wait_s
        while True:
            reply = await self._call("tickets", name=member.name, incarnation=member.incarnation, seq=seq, want=want)
            if reply["tickets"]:
                return [Ticket(n, attempt, Weights(*served), at) for n, attempt, served, at in reply["tickets"]]
            left = limit - time.monotonic()
            if left <= 0:
                return []
            await self._wait(f"tickets:{member.incarnation}", min(left, _until(reply)))

    async def beat(
        self,
        member: Member,
        *,
        serving: Weights | None,
        checksum: str,
        progress: Mapping[tuple[int, int], int],
        info: Mapping[str, Any],
    ) -> Beat:
        reply = await self._call(
            "beat",
            name=member.name,
            incarnation=member.incarnation,
            serving=serving,
            checksum=checksum,
            progress=[(n, attempt, count) for (n, attempt), count in progress.items()],
            info=dict(info),
        )
        return Beat(
            step_version=reply["version"],
            lineage=reply["lineage"],
            announced=weights_of(reply["announced"]),
            revoked=tuple(sorted((n, attempt) for n, attempt in reply["revoked"] or ())),
            evaluation=msgspec.json.decode(reply["evaluation"]) if reply["evaluation"] else None,
            phase=reply["phase"],
            announcements=reply["announcements"],
            verify=reply["verify"],
        )

    async def nudge(self, member: Member, wait_s: float) -> None:
        await self._wait(f"nudge:{member.incarnation}", wait_s)

    async def put(self, member: Member, header: GroupHeader, payload: bytes) -> PutResult:
        arguments = {
            "name": member.name,
            "incarnation": member.incarnation,
            "attempt": header.attempt,
            "header": header,
        }
        while True:
            reply = await self._put_once(header, payload, arguments)
            if reply["answer"] != "retry":
                answer: PutResult = reply["answer"]
                return answer
            await self.nudge(member, REWIND_WAIT_S)

    async def _put_once(self, header: GroupHeader, payload: bytes, arguments: Mapping[str, Any]) -> Any:
        field = f"{header.ordinal}:{header.attempt}"
        return await self._puts.put(field, payload, msgspec.json.encode(arguments), self._now())

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
        while True:
            reply = await self._call(
                "fail",
                name=member.name,
                incarnation=member.incarnation,
                ordinal=ordinal,
                attempt=attempt,
                kind=kind,
                reason=reason,
                work={"tokens": tokens, "seconds": seconds, "reward": reward, "length": length},
            )
            if reply["answer"] != "retry":
                answer: PutResult = reply["answer"]
                return answer
            await self.nudge(member, REWIND_WAIT_S)

    # --- learner ----------------------------------------------------------------------------------------------------

    async def lease(self, lineage: int, step: int, *, wait_s: float) -> Lease | Waiting:
        limit = time.monotonic() + wait_s
        while True:
            reply = await self._call("lease", lineage=lineage, step=step)
            if "wait" not in reply:
                return Lease(
                    lineage=reply["lineage"],
                    step=reply["step"],
                    attempt=reply["attempt"],
                    ordinals=tuple(reply["ordinals"] or ()),
                    headers=tuple(header_of(h) for h in reply["headers"] or ()),
                    uses=tuple(reply["uses"] or ()),
                )
            left = limit - time.monotonic()
            if left <= 0:
                return waiting_words(
                    tuple(reply["wait"] or ()), tuple(reply["owners"] or ()), reply["members"], float(reply["since"])
                )
            await self._wait("learner", min(left, _until(reply)))

    async def payloads(self, lease: Lease) -> list[bytes]:
        fields = [f"{h.ordinal}:{h.attempt}" for h in lease.headers]
        return checked_payloads(lease, await self._payloads(fields, f"groups of step {lease.step}"))

    async def release(self, lineage: int, step: int) -> bool:
        reply = await self._call("release", lineage=lineage, step=step)
        return bool(reply["released"])

    async def commit(self, lineage: int, step: int, *, skipped: bool = False) -> Commit:
        reply = await self._call("commit", lineage=lineage, step=step, skipped=skipped)
        return Commit(version=reply["version"], repeated=reply["again"], ended=reply["ended"])

    async def quarantine(self, lineage: int, step: int, ordinals: Sequence[int], reason: str) -> None:
        await self._call("quarantine", lineage=lineage, step=step, ordinals=list(ordinals), reason=reason)

    async def checkpointed(self, lineage: int, version: int, *, oldest: int | None = None) -> None:
        await self._call("checkpointed", lineage=lineage, version=version, oldest=oldest)

    async def settled(self, lineage: int, *, limit: int) -> list[TicketRow]:
        reply = await self._call("settled", lineage=lineage, limit=limit)
        return [row_of(row) for row in reply["rows"] or []]

    async def archived(self, lineage: int, ordinals: Sequence[int]) -> None:
        for at in range(0, len(ordinals), ARCHIVED_ROWS):  # each piece may be repeated, so they need not be one act
            await self._call("archived", lineage=lineage, ordinals=list(ordinals[at : at + ARCHIVED_ROWS]))

    async def new_lineage(self, *, parent: Weights | None, limits: Limits) -> int:
        reply = await self._call("new_lineage", parent=parent, limits=limits_doc(limits))
        lineage = int(reply["lineage"])
        await self._sweep(lineage)
        self.limits = limits
        return lineage

    async def _sweep(self, lineage: int) -> None:
        while not (await self._call("sweep", lineage=lineage))["done"]:
            pass

    async def adopt(self, forks: Mapping[int, Weights]) -> None:
        reply = await self._call("adopt", forks={str(lineage): tuple(origin) for lineage, origin in forks.items()})
        await self._sweep(int(reply["lineage"]))

    async def recommit(self, lineage: int, step: int, tickets: Sequence[tuple[int, int]]) -> Commit:
        reply = await self._call("recommit", lineage=lineage, step=step, tickets=sorted(tickets))
        return Commit(version=reply["version"], repeated=reply["again"], ended=reply["ended"])

    async def announce(self, weights: Weights, document: Mapping[str, Any]) -> None:
        encoded = msgspec.json.encode(dict(document)).decode()
        await self._call("announce", lineage=weights.lineage, version=weights.version, document=encoded)

    async def announcement(self) -> tuple[Weights, Mapping[str, Any]] | None:
        reply = await self._call("announcement")
        weights = weights_of(reply["announced"])
        return (weights, msgspec.json.decode(reply["document"])) if weights else None

    async def request_verification(self, request_id: str) -> None:
        await self._call("request_verification", id=request_id)

    # --- evaluation, state, inspection ------------------------------------------------------------------------------

    async def request_evaluation(self, request: Mapping[str, Any]) -> None:
        await self._call("request_evaluation", request=msgspec.json.encode(dict(request)).decode())

    async def claim_evaluation(self, member: Member, request_id: str) -> bool:
        reply = await self._call("claim_evaluation", name=member.name, incarnation=member.incarnation, id=request_id)
        return bool(reply["mine"])

    async def report_evaluation(self, request_id: str, result: Mapping[str, Any]) -> None:
        await self._call("report_evaluation", id=request_id, result=msgspec.json.encode(dict(result)).decode())

    async def evaluation(self, request_id: str, *, wait_s: float) -> Mapping[str, Any] | None:
        limit = time.monotonic() + wait_s
        while True:
            reply = await self._call("evaluation", id=request_id)
            if reply["result"] is not None:
                result: dict[str, Any] = msgspec.json.decode(reply["result"])
                return result
            left = limit - time.monotonic()
            if left <= 0:
                return None
            await self._wait(f"result:{request_id}", left)

    async def finish(self, *, error: str | None = None) -> None:
        await self._call("finish", error=error)

    async def stats(self) -> Stats:
        return stats_of(self.run, await self._call("stats"))

    async def snapshot(self) -> tuple[Stats, list[TicketRow]]:
        reply = await self._call("snapshot")
        return stats_of(self.run, reply["stats"]), [row_of(row) for row in reply["rows"] or []]

    async def row(self, ordinal: int) -> TicketRow | None:
        reply = await self._call("row", ordinal=ordinal)
        return row_of(reply["row"]) if reply["row"] else None

    async def rows(self, *, states: Sequence[State], start: int = 0, limit: int = 100) -> list[TicketRow]:
        found: list[TicketRow] = []
        after: int | None = start
        while after is not None and len(found) < limit:
            reply = await self._call("rows", states=list(states), start=after, limit=limit - len(found))
            found += [row_of(row) for row in reply["rows"] or []]
            after = reply["next"]
        return found

    async def payload(self, ordinal: int) -> bytes | None:
        row = await self.row(ordinal)
        if row is None or not row.has_payload:
            return None
        return (await self._payloads([f"{ordinal}:{row.attempt}"], f"group of ticket {ordinal}"))[0]

    async def quarantined(self) -> dict[str, bytes]:
        async with self.store.answering("quarantined groups"):
            names = await self.store.client.lrange(f"{self.prefix}:aside", 0, -1)
        fields = [name.decode() if isinstance(name, bytes) else name for name in reversed(names)]
        found = await self._payloads(fields, "quarantined groups") if fields else []
        return {field: value for field, value in zip(fields, found, strict=True) if value is not None}

    async def _payloads(self, fields: Sequence[str], what: str) -> list[bytes | None]:
        keys = [payload_key(self.prefix, field) for field in fields]
        a_read, a_round = (max(1, size // self.limits.group_bytes) for size in (READ_BYTES, ROUND_BYTES))
        found: list[bytes | None] = []
        for first in range(0, len(keys), a_round):
            reads = self.store.client.pipeline(transaction=False)
            for at in range(first, min(len(keys), first + a_round), a_read):
                reads.mget(keys[at : min(at + a_read, first + a_round)])
            async with self.store.answering(what):
                for values in await reads.execute():
                    found += values
        return found

    async def close(self) -> None:
        """The connection is the store's; closing the store closes it."""


def _until(reply: Mapping[str, Any]) -> float:
    """Seconds until asking again could help without being woken."""
    return float(reply["within"]) + DEADLINE_SLACK_S
