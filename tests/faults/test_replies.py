"""An answer that is lost, late or torn changes nothing: every operation is asked again and known by its identity."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

import pytest

from asyncrl.buffers.base import BufferError, Lease, Member
from asyncrl.buffers.limits import Limits
from asyncrl.buffers.remote import RedisBuffer
from asyncrl.buffers.store import Store, open_store
from asyncrl.staleness import Weights
from tests.buffer.acts import PAYLOAD, header, limits
from tests.faults.proxy import Fault, every_other, proxied

NewRun = Callable[[Store, Limits], Awaitable[RedisBuffer]]

LIMIT_S = 60.0
WAKE_S = 5.0  # where a wake-up takes milliseconds
OPERATIONS = (
    "join",
    "new_lineage",
    "sweep",
    "announce",
    "announcement",
    "beat",
    "tickets",
    "put",
    "fail",
    "lease",
    "MGET",  # of payloads
    "release",
    "commit",
    "checkpointed",
    "request_evaluation",
    "claim_evaluation",
    "report_evaluation",
    "evaluation",
    "leave",
    "finish",
    "snapshot",
)
"""As they stand in the requests."""


async def short_run(buffer: RedisBuffer) -> list[Any]:
    """Every operation at least once: two collectors, two steps, one of them released and leased again. Returns what the
    callers were told, a `duplicate` being what a `held` is."""
    told: list[Any] = []
    lineage = await buffer.new_lineage(parent=None, limits=buffer.limits)
    for step in range(2):
        serving = Weights(lineage, step)
        await buffer.announce(serving, {"transport": "none"})
        told.append((await buffer.announcement() or [None, None])[1])
        a, b = Member("a", f"a-{step}"), Member("b", f"b-{step}")
        for member in (a, b):
            await buffer.join(member, {"n": step})
            beat = await buffer.beat(member, serving=serving, checksum="c", progress={}, info={"n": step})
            told.append((beat.step_version, beat.phase, beat.revoked))
        work = [(a, t) for t in await buffer.tickets(a, seq=0, want=1, wait_s=0.0)]
        failed, *_ = await buffer.tickets(b, seq=0, want=1, wait_s=0.0)
        await buffer.fail(b, failed.ordinal, failed.attempt, kind="data", reason="bad", tokens=3, seconds=1.0)
        work += [(b, t) for t in await buffer.tickets(b, seq=1, want=9, wait_s=0.0)]
        told.append([(member.name, t.ordinal, t.attempt) for member, t in work])
        for member, ticket in work:
            answer = await buffer.put(member, header(ticket), PAYLOAD)
            told.append("held" if answer == "duplicate" else answer)
        lease = await buffer.lease(lineage, step, wait_s=0.0)
        if step == 0:
            await buffer.release(lineage, step)
            lease = await buffer.lease(lineage, step, wait_s=0.0)
        if not isinstance(lease, Lease):
            return [*told, lease]
        told += [lease.ordinals, lease.attempt, await buffer.payloads(lease)]
        told.append((await buffer.commit(lineage, step)).version)
        await buffer.checkpointed(lineage, step + 1)
    await buffer.request_evaluation({"id": "e", "weights": [lineage, 2]})
    told.append(await buffer.claim_evaluation(a, "e"))
    await buffer.report_evaluation("e", {"success": 0.5})
    told.append(await buffer.evaluation("e", wait_s=0.0))
    await buffer.leave(a)
    await buffer.finish()
    return told


async def outcome(buffer: RedisBuffer) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """What the callers were told, the sums and the ledger at the end."""
    try:
        told = await short_run(buffer)
    except BufferError as error:
        told = [str(error)]
    stats, rows = await buffer.snapshot()
    return told, asdict(stats) | {"run": ""}, rows


LIMITS = limits(1, 2, max_steps=20)


async def undisturbed(url: str, new_run: NewRun, *, lineages: int = 0) -> Any:
    """The outcome without faults, after so many starts of learners that came to nothing."""
    store = await open_store(url)
    try:
        buffer = await new_run(store, LIMITS)
        for _ in range(lineages):
            await buffer.new_lineage(parent=None, limits=LIMITS)
        return await outcome(buffer)
    finally:
        await store.close()


async def disturbed(
    url: str, new_run: NewRun, operation: str, fault: Fault, guard: tuple[str, str] | None = None
) -> tuple[Any, int]:
    """The outcome where each request of `operation` suffers the fault, and how often that was. `guard`: a text of the
    server's script and what stands there instead."""
    async with proxied(url, every_other(operation, fault)) as proxy:
        store = await open_store(proxy.url)
        try:
            if guard is not None:
                assert guard[0] in store.script
                store.script = store.script.replace(*guard)
                await store.load()
            found = await outcome(await new_run(store, LIMITS))
        finally:
            await store.close()
        return found, proxy.suffered[fault]


@pytest.mark.faults
@pytest.mark.asyncio
@pytest.mark.parametrize("fault", Fault)
async def test_every_operation_ends_in_the_same_state_whatever_happens_to_its_answer(
    server_url: str, new_run: NewRun, fault: Fault
) -> None:
    async with asyncio.timeout(LIMIT_S):
        reference = await undisturbed(server_url, new_run)
        after_a_start = await undisturbed(server_url, new_run, lineages=1)
        found = await asyncio.gather(*(disturbed(server_url, new_run, name, fault) for name in OPERATIONS))
    for operation, (ended, suffered) in zip(OPERATIONS, found, strict=True):
        assert suffered > 0, operation
        # A start that is made again burns the number of a lineage in which nothing happens; it is a start.
        repeated = operation == "new_lineage" and fault not in (Fault.UNSENT, Fault.DELAYED)
        assert ended == (after_a_start if repeated else reference), operation


@pytest.mark.faults
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("operation", "guard", "then"),
    [
        ("tickets", ("if a.seq > m.seq then", "if true then"), "Waiting"),  # for tickets that nobody was told of
        ("put", ("local again = repeated(t, a)", "local again = nil"), "refused"),
        ("commit", ("if call('HGET', COMMITS, a.step) == tostring(a.lineage)", "if false"), "has no lease to commit"),
    ],
)
async def test_without_the_identity_of_a_request_its_repetition_is_another_one(
    server_url: str, new_run: NewRun, operation: str, guard: tuple[str, str], then: str
) -> None:
    async with asyncio.timeout(LIMIT_S):
        reference = await undisturbed(server_url, new_run)
        found, _ = await disturbed(server_url, new_run, operation, Fault.LOST, guard)
    assert found != reference
    assert then in str(found[0])


async def woken(url: str, new_run: NewRun, *, again: bool) -> int:
    """The ticket that a collector gets whose wake-up is lost with its connection. `again`: it then goes on waiting,
    which nothing would end for half a minute: the next deadline is that of a silent collector."""
    one = limits(0, 1)
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(proxied(url, every_other("BLPOP", Fault.LOST)))
        direct, store = await open_store(url), await open_store(proxy.url)
        for opened in (direct, store):
            stack.push_async_callback(opened.close)
        if again:
            store.mailbox = store.client
        buffer = await new_run(direct, one)
        waiting = RedisBuffer(store, buffer.run, one, recipe={})
        serving = Weights(await buffer.new_lineage(parent=None, limits=one), 0)
        await buffer.announce(serving, {"transport": "none"})
        a, b = Member("a", "a"), Member("b", "b")
        for member in (a, b):
            await buffer.join(member, {})
            await buffer.beat(member, serving=serving, checksum="", progress={}, info={})
        (ticket,) = await buffer.tickets(a, seq=0, want=1, wait_s=0.0)
        asked = asyncio.ensure_future(waiting.tickets(b, seq=0, want=1, wait_s=LIMIT_S))
        stack.callback(asked.cancel)
        for _ in range(100):
            if await direct.client.zcard(f"{buffer.prefix}:waiters"):
                break
            await asyncio.sleep(0.05)
        await buffer.fail(a, ticket.ordinal, ticket.attempt, kind="data", reason="bad", tokens=0, seconds=0.0)
        async with asyncio.timeout(WAKE_S):
            (granted,) = await asyncio.shield(asked)
        assert proxy.suffered[Fault.LOST] == 1
        return granted.ordinal


@pytest.mark.faults
@pytest.mark.asyncio
async def test_a_wake_up_that_is_lost_is_asked_after_at_once(server_url: str, new_run: NewRun) -> None:
    assert await woken(server_url, new_run, again=False) == 1


@pytest.mark.faults
@pytest.mark.asyncio
async def test_a_wait_that_is_made_again_instead_sleeps_on(server_url: str, new_run: NewRun) -> None:
    with pytest.raises(TimeoutError):
        await woken(server_url, new_run, again=True)
