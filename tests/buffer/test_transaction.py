"""A transaction in one write: all of it or nothing, and the connection is as good afterwards as before."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ResponseError

from asyncrl.buffers.store import Store
from asyncrl.buffers.transaction import transaction

KEY = "asyncrl:{transaction}:key"


@pytest.mark.asyncio
async def test_each_command_has_its_answer_and_an_error_stands_in_its_place(store: Store) -> None:
    await store.client.delete(KEY)
    answers = await transaction(
        store.client, [("SET", KEY, b"x" * 100_000, "NX"), ("LPUSH", KEY, "y"), ("STRLEN", KEY), ("SET", KEY, 1, "NX")]
    )
    assert answers[0] == b"OK"
    assert isinstance(answers[1], ResponseError)
    assert answers[2:] == [100_000, None]


@pytest.mark.asyncio
async def test_a_command_that_is_refused_when_it_is_queued_undoes_all_and_says_why(store: Store) -> None:
    await store.client.delete(KEY)
    for _ in range(2):  # the second finds no answers of the first
        with pytest.raises(ResponseError, match="wrong number of arguments"):
            await transaction(store.client, [("SET", KEY, 1), ("STRLEN",), ("SET", KEY, 2)])
    assert await store.client.get(KEY) is None


@pytest.mark.asyncio
async def test_a_connection_that_the_server_closed_is_replaced(store: Store) -> None:
    await transaction(store.client, [("SET", KEY, 1)])
    await store.client.client_kill_filter(_type="normal", skipme=False)
    assert await transaction(store.client, [("SET", KEY, 2), ("GET", KEY)]) == [b"OK", b"2"]


@pytest.mark.asyncio
async def test_who_is_cancelled_in_a_transaction_leaves_no_answer_for_the_next(store: Store) -> None:
    for steps in range(12):
        call = asyncio.create_task(transaction(store.client, [("SET", KEY, b"x" * 1_000_000), ("STRLEN", KEY)]))
        for _ in range(steps):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert await transaction(store.client, [("SET", KEY, 1), ("GET", KEY)]) == [b"OK", b"1"]
