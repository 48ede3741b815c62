"""Puts that meet go together; each has its own answer, whatever becomes of the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl.buffers import puts as puts_module
from asyncrl.buffers.base import BufferError, State
from asyncrl.buffers.puts import Puts
from asyncrl.buffers.store import Store
from asyncrl.staleness import Weights
from tests.buffer.acts import PAYLOAD, header, joins, limits, puts, starts, takes

GROUPS = 6


async def _run(store: Store, name: str) -> tuple[Any, Any, list[Any]]:
    lims = limits(0, GROUPS)
    buffer = await store.create_run(name, recipe={}, recipe_hash="h", limits=lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    return buffer, a, await takes(buffer, a, 0)


@pytest.fixture
def transactions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many groups went in each transaction."""
    sizes: list[int] = []
    own = Puts._transaction

    async def counted(self: Puts, batch: list[Any]) -> list[Any]:
        sizes.append(len(batch))
        return await own(self, batch)

    monkeypatch.setattr(Puts, "_transaction", counted)
    return sizes


@pytest.mark.asyncio
async def test_groups_that_gather_behind_a_transaction_go_in_the_next_one(
    store: Store, transactions: list[int]
) -> None:
    buffer, a, tickets = await _run(store, "gather")
    answers = await asyncio.gather(*(puts(buffer, a, ticket) for ticket in tickets))
    assert answers == ["held"] * GROUPS
    assert sum(transactions) == GROUPS
    assert len(transactions) < GROUPS
    lease = await buffer.lease(1, 0, wait_s=0.0)
    assert await buffer.payloads(lease) == [PAYLOAD] * GROUPS


@pytest.mark.asyncio
async def test_one_transaction_is_no_larger_than_its_limit_unless_one_group_is(
    store: Store, transactions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puts_module, "TOGETHER_BYTES", 2 * len(PAYLOAD))
    buffer, a, tickets = await _run(store, "limit")
    await asyncio.gather(*(puts(buffer, a, ticket) for ticket in tickets))
    assert max(transactions) == 2


@pytest.mark.asyncio
async def test_a_refused_put_among_others_is_refused_alone(store: Store) -> None:
    buffer, a, tickets = await _run(store, "refused")
    stranger = await joins(buffer, "b", Weights(1, 0))
    calls = [puts(buffer, a, ticket) for ticket in tickets[:3]]
    calls.insert(1, puts(buffer, stranger, tickets[3]))
    assert await asyncio.gather(*calls) == ["held", "refused", "held", "held"]
    assert (await buffer.stats()).states[State.HELD] == 3


@pytest.mark.asyncio
async def test_scripts_that_the_server_lost_are_loaded_again_and_nothing_is_put_twice(store: Store) -> None:
    buffer, a, tickets = await _run(store, "no-script")
    await store.client.script_flush()
    assert await asyncio.gather(*(puts(buffer, a, ticket) for ticket in tickets)) == ["held"] * GROUPS


@pytest.mark.asyncio
async def test_who_is_cancelled_while_it_waits_takes_nothing_with_it(store: Store) -> None:
    buffer, a, tickets = await _run(store, "cancelled")
    tasks = [asyncio.create_task(puts(buffer, a, tickets[0]))]
    for _ in range(3):
        await asyncio.sleep(0)
    tasks += [asyncio.create_task(puts(buffer, a, ticket)) for ticket in tickets[1:]]
    await asyncio.sleep(0)
    tasks[0].cancel()  # on its way
    tasks[-1].cancel()  # not sent yet
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert answers[1:-1] == ["held"] * (GROUPS - 2)
    last = await buffer.put(a, header(tickets[-1]), PAYLOAD)
    first = await buffer.put(a, header(tickets[0]), PAYLOAD)
    assert (first, last) == ("duplicate", "held")


@pytest.mark.asyncio
async def test_an_error_that_nobody_expected_reaches_everyone_who_waits(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: Puts, batch: list[Any]) -> list[Any]:
        raise RuntimeError("unexpected")

    buffer, a, tickets = await _run(store, "unexpected")
    monkeypatch.setattr(Puts, "_transaction", fails)
    async with asyncio.timeout(10):
        answers = await asyncio.gather(*(puts(buffer, a, ticket) for ticket in tickets), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["unexpected"] * GROUPS
    monkeypatch.undo()
    assert await puts(buffer, a, tickets[0]) == "held"


@pytest.mark.asyncio
async def test_a_server_that_keeps_no_scripts_is_an_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, a, tickets = await _run(store, "keeps-none")

    async def nothing() -> None:
        return None

    await store.client.script_flush()
    monkeypatch.setattr(store, "load", nothing)
    with pytest.raises(BufferError, match="does not keep the scripts"):
        await puts(buffer, a, tickets[0])
    monkeypatch.undo()
    await store.load()
