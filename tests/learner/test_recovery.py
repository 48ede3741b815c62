"""A store that went back in time, or lost everything, knows afterwards what the weights contain, and nothing twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from asyncrl.buffers.archive import branch_to
from asyncrl.buffers.audit import ledger_problems
from asyncrl.buffers.base import BufferError, Fenced, State
from asyncrl.buffers.store import StoreAway, open_store
from asyncrl.learners.lasting import LastingBuffer, LeaseGone
from asyncrl.learners.recovery import forgotten_steps, is_behind, path_to, recover
from asyncrl.staleness import Weights

acts = st.lists(st.one_of(st.just("step"), st.tuples(st.just("resume"), st.floats(0, 1))), min_size=1, max_size=12)


async def is_sound(run: Any) -> None:
    """The ledger adds up and says of each ticket what the weights contain."""
    stats, rows = await run.store.snapshot()
    assert (stats.phase, Weights(stats.lineage, stats.version)) == ("running", run.own)
    assert ledger_problems(stats, rows, run.store.limits) == []
    trained = {row.ordinal: row.trained for row in rows if row.state is State.TRAINED}
    path = [
        Weights(lineage, step)
        for lineage, first, last in branch_to(run.own, run.forks)
        for step in range(first, last + 1)
    ]
    assert trained == {n: step for step, ordinals in zip(path, run.contained, strict=True) for n in ordinals}


async def history(forgetful: Any, acts: list[Any], store: Any = None) -> Any:
    """A run after these acts; its store remembers the moment before each."""
    run = forgetful.HandRun(store or forgetful.ForgetfulMemory(), forgetful.Parts())
    await run.store.remembers()
    await run.starts(run.store, 0)
    for act in acts:
        await run.store.remembers()
        if act == "step":
            await run.commits(run.store, await run.leases(run.store))
        else:
            await run.starts(run.store, int(act[1] * run.own.version))
    return run


async def goes_back_and_is_told(forgetful: Any, acts: list[Any], draw: Any, store: Any = None) -> None:
    run = await history(forgetful, acts, store)
    await run.store.goes_back(draw(st.integers(0, len(run.store.moments) - 1)))
    stats = await run.store.stats()
    found = await recover(run.store, run.parts, forks=run.forks, own=run.own)
    assert (found is not None) == is_behind(Weights(stats.lineage, stats.version), run.own)
    await is_sound(run)
    assert await recover(run.store, run.parts, forks=run.forks, own=run.own) is None
    for _ in range(3):
        await run.commits(run.store, await run.leases(run.store))
    await is_sound(run)


@settings(deadline=None, max_examples=40)
@given(acts, st.data())
def test_a_store_that_went_back_to_any_moment_is_brought_to_where_the_weights_are(forgetful, acts, data):
    asyncio.run(goes_back_and_is_told(forgetful, acts, data.draw))


@settings(deadline=None, max_examples=12, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(acts, st.data())
def test_so_is_a_server(forgetful, server_url, acts, data):
    async def check() -> None:
        store = await open_store(server_url)
        try:
            served = forgetful.ForgetfulServer(store)
            await served.create()
            await goes_back_and_is_told(forgetful, acts, data.draw, served)
        finally:
            await store.close()

    asyncio.run(check())


@pytest.mark.asyncio
async def test_a_store_whose_version_alone_is_moved_on_does_not_know_what_the_weights_contain(forgetful):
    """Negative control of the test above."""
    run = await history(forgetful, ["step", "step"])
    await run.store.goes_back(1)
    await run.store.adopt(path_to(run.own, run.forks))
    for step in forgotten_steps(Weights(1, 0), {1: (0, 0)}, run.own, run.forks):
        await run.store.recommit(*step, [])
    with pytest.raises(AssertionError):
        await is_sound(run)


@pytest.mark.asyncio
async def test_a_part_that_is_missing_is_named_and_the_store_left_alone(forgetful):
    run = await history(forgetful, ["step", "step", "step"])
    await run.store.goes_back(1)
    del run.parts.trained[Weights(1, 1)]
    before = await run.store.stats()
    with pytest.raises(BufferError, match=r"forgotten step 1 of lineage 1.*start a new run"):
        await recover(run.store, run.parts, forks=run.forks, own=run.own)
    assert await run.store.stats() == before


@pytest.mark.asyncio
async def test_a_store_with_another_past_is_refused(forgetful):
    run = await history(forgetful, ["step", "step", ("resume", 1.0), "step"])
    await run.store.goes_back(-2)  # lineage 1, version 2
    await run.store.new_lineage(parent=Weights(1, 1), limits=run.store.limits)
    with pytest.raises(BufferError, match="lineage 2"):
        await recover(run.store, run.parts, forks=run.forks, own=run.own)


def test_a_newer_learner_is_not_a_loss():
    assert not is_behind(Weights(3, 1), Weights(2, 9))
    assert path_to(Weights(3, 9), {1: (0, 0), 2: (1, 4), 3: (1, 5)}) == {1: (0, 0), 3: (1, 5)}


# --- the buffer that lasts ------------------------------------------------------------------------------------------


def lasting(run: Any) -> LastingBuffer:
    buffer = LastingBuffer(
        run.store,
        run.parts,
        limit_s=5.0,
        stop=asyncio.Event(),
        recreate=run.store.recreate,
        on_recovered=run.recovered.append,
    )
    buffer.trains(lambda: (run.forks, run.own))
    return buffer


async def forgets_meanwhile(forgetful: Any, acts: list[Any], draw: Any, store: Any = None) -> None:
    """The store forgets before a lease, before the groups are fetched, or before the commit."""
    run = await history(forgetful, acts, store)
    buffer = lasting(run)

    async def forgets() -> None:
        await run.store.remembers()
        back = draw(st.one_of(st.none(), st.integers(0, len(run.store.moments) - 1), st.just("all")))
        if back == "all":
            await run.store.loses_everything()
        elif back is not None:
            await run.store.goes_back(back)

    await buffer.announce(run.own, {"transport": "none"})
    for _ in range(3):
        await forgets()
        lease = await run.leases(buffer)
        await forgets()
        try:
            await buffer.payloads(lease)
        except LeaseGone:
            lease = await run.leases(buffer)
            await buffer.payloads(lease)
        await forgets()
        await run.commits(buffer, lease)
    await is_sound(run)
    assert all(is_behind(found.store, found.own) for found in run.recovered)
    announced = await buffer.announcement()
    assert announced is None or announced[0].lineage == run.own.lineage


@settings(deadline=None, max_examples=40)
@given(acts, st.data())
def test_at_whatever_moment_a_store_forgets_every_step_is_trained_once(forgetful, acts, data):
    asyncio.run(forgets_meanwhile(forgetful, acts, data.draw))


@settings(deadline=None, max_examples=12, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(acts, st.data())
def test_at_whatever_moment_a_server_forgets_every_step_is_trained_once(forgetful, server_url, acts, data):
    async def check() -> None:
        store = await open_store(server_url)
        try:
            served = forgetful.ForgetfulServer(store)
            await served.create()
            await forgets_meanwhile(forgetful, acts, data.draw, served)
        finally:
            await store.close()

    asyncio.run(check())


@pytest.mark.asyncio
async def test_a_learner_that_was_replaced_recommits_nothing(forgetful):
    run = await history(forgetful, ["step", "step"])
    buffer = lasting(run)
    lease = await run.leases(buffer)
    await run.store.new_lineage(parent=Weights(1, 1), limits=run.store.limits)
    before = await run.store.stats()
    with pytest.raises(Fenced):
        await run.commits(buffer, lease)
    with pytest.raises(Fenced):
        await buffer.checkpointed(1, 2)
    assert await run.store.stats() == before


@pytest.mark.asyncio
async def test_the_same_leases_damaged_groups_are_an_error_of_their_own(forgetful, monkeypatch):
    run = await history(forgetful, ["step"])
    buffer = lasting(run)
    lease = await run.leases(buffer)
    run.store.buffer.model.payload.clear()
    with pytest.raises(BufferError) as raised:
        await buffer.payloads(lease)
    assert not isinstance(raised.value, LeaseGone)


@pytest.mark.asyncio
@pytest.mark.parametrize("dies_at", range(12))
async def test_an_outage_is_borne_also_in_the_middle_of_a_recovery(forgetful, monkeypatch, dies_at):
    monkeypatch.setattr("asyncrl.buffers.patience.FIRST_PAUSE_S", 0.001)
    run = await history(forgetful, ["step", ("resume", 1.0), "step", "step"])
    buffer = lasting(run)
    await buffer.announce(run.own, {"transport": "none"})
    await run.store.goes_back(1)
    run.store.away, run.store.answers_lost = 1, {dies_at}
    await run.commits(buffer, await run.leases(buffer))
    await is_sound(run)


@pytest.mark.asyncio
async def test_who_was_told_to_stop_waits_for_a_store_for_a_moment_only(forgetful, monkeypatch):
    monkeypatch.setattr("asyncrl.buffers.patience.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("asyncrl.buffers.patience.HURRIED_S", 0.02)
    run = await history(forgetful, ["step"])
    buffer = lasting(run)
    buffer._limit_s = 60.0
    buffer._stop.set()
    run.store.away = 2
    assert (await buffer.stats()).version == 1
    run.store.away = 1_000_000
    with pytest.raises(StoreAway):
        await buffer.lease(*run.own, wait_s=0.0)
    assert run.store.away > 1_000_000 - 10, "asked a few times"


@pytest.mark.asyncio
async def test_an_outage_beyond_the_limit_is_the_stores_own_error(forgetful, monkeypatch):
    monkeypatch.setattr("asyncrl.buffers.patience.FIRST_PAUSE_S", 0.001)
    run = await history(forgetful, ["step"])
    buffer = lasting(run)
    buffer._limit_s = 0.05
    run.store.away = 1_000_000
    with pytest.raises(StoreAway, match="nobody answers"):
        await buffer.lease(*run.own, wait_s=0.0)
