"""Groups that several steps train: each use at its own step, inside the window, counted in admission."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.buffers.base import Lease, State
from asyncrl.staleness import Weights
from tests.buffer.acts import PAYLOAD, joins, limits, puts, serves, starts, takes, trains


@pytest.mark.asyncio
async def test_a_group_is_trained_by_two_steps_and_its_second_use_is_told(make_buffer: Any) -> None:
    lims = limits(1, 1, max_uses=2)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    (only,) = await takes(buffer, a, 0)
    assert only.ordinal == 0, "it owes two uses, and (1 + k) x B is two"
    await puts(buffer, a, only)
    first = await buffer.lease(1, 0, wait_s=0.0)
    assert (first.ordinals, first.uses) == ((0,), (0,))
    await buffer.commit(1, 0)
    assert (await buffer.row(0)).state is State.HELD
    second = await buffer.lease(1, 1, wait_s=0.0)
    assert isinstance(second, Lease)
    assert (second.ordinals, second.uses) == ((0,), (1,))
    assert await buffer.payloads(second) == [PAYLOAD]
    await buffer.commit(1, 1)
    row = await buffer.row(0)
    assert (row.state, row.uses) == (State.TRAINED, (Weights(1, 0), Weights(1, 1)))


@pytest.mark.asyncio
async def test_no_step_trains_a_group_twice(make_buffer: Any) -> None:
    lims = limits(1, 2, max_uses=2)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    first, second = await takes(buffer, a, 0)
    await puts(buffer, a, first)
    waiting = await buffer.lease(1, 0, wait_s=0.0)
    assert not isinstance(waiting, Lease), "one group owes two uses, and the step needs two groups"
    await puts(buffer, a, second)
    assert await trains(buffer, 1, 0) == (0, 1)
    assert await trains(buffer, 1, 1) == (0, 1)


@pytest.mark.asyncio
async def test_near_the_end_a_ticket_owes_no_more_uses_than_steps_are_left(make_buffer: Any) -> None:
    lims = limits(2, 1, max_uses=3, max_steps=2)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    assert len(await takes(buffer, a, 0)) == 1
    assert sum((await buffer.stats()).dues.values()) == 2


@pytest.mark.asyncio
async def test_uses_that_the_window_no_longer_has_room_for_are_forfeited_and_counted(make_buffer: Any) -> None:
    lims = limits(3, 1, max_uses=2, over_age="drop", lookahead=2.0)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    slow, quick = await takes(buffer, a, 0)
    await puts(buffer, a, quick)
    assert [await trains(buffer, 1, 0), await trains(buffer, 1, 1)] == [(1,), (1,)]
    await serves(buffer, a, Weights(1, 2))
    (third,) = await takes(buffer, a, 1, want=1)
    await puts(buffer, a, third, Weights(1, 2))
    assert (await buffer.stats()).reasons == {"trained/trained": 1}
    await trains(buffer, 1, 2)
    stats = await buffer.stats()
    assert stats.reasons["forfeited/no_step_left"] == 1, "two uses were owed, and step 3 is the only one left"
    assert await puts(buffer, a, slow, Weights(1, 0)) == "held"
    assert await trains(buffer, 1, 3) == (0,)
    assert (await buffer.stats()).lost == {}, "what was trained once is not lost"


@pytest.mark.asyncio
async def test_a_rewind_undoes_the_uses_after_the_checkpoint_and_keeps_the_others(make_buffer: Any) -> None:
    lims = limits(1, 1, max_uses=2)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    (only,) = await takes(buffer, a, 0)
    await puts(buffer, a, only)
    await trains(buffer, 1, 0)
    await buffer.checkpointed(1, 1)
    await trains(buffer, 1, 1)
    assert (await buffer.row(0)).state is State.TRAINED
    await starts(buffer, lims, Weights(1, 1))
    row = await buffer.row(0)
    assert (row.state, row.uses) == (State.HELD, (Weights(1, 0),))
    assert await trains(buffer, 2, 1) == (0,)
    assert (await buffer.row(0)).uses == (Weights(1, 0), Weights(2, 1))


def test_uses_that_would_deadlock_with_the_publish_interval_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_uses 3 would deadlock.*at most max_trajectory_age \+ 2 = 3"):
        limits(1, 1, max_uses=3)
