"""Lengths are the formula's, times are exact, groups start together, versions are those of the moment."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.collectors.engines.base import EngineError, Request, Sampling
from asyncrl.collectors.engines.simulated import SimulatedEngine, relative_length
from asyncrl.staleness import Weights
from asyncrl.weights.base import WeightsError

LIMIT_S = 30.0


@dataclass(frozen=True)
class Named:
    """All that the engine looks at in staged weights."""

    weights: Weights
    checksum: str


def make_request(ticket: int, member: int) -> Request:
    return Request(f"{ticket}/{member}", f"{ticket}", f"{ticket}/{member}", (1,), Sampling(), 0, ticket, member)


async def make_engine(
    *, slots: int = 8, token_s: float = 0.001, mean_tokens: float = 20.0, cv: float = 1.0
) -> SimulatedEngine:
    engine = SimulatedEngine("sim", slots=slots, token_s=token_s, mean_tokens=mean_tokens, cv=cv, seed=5)
    await engine.start()
    await engine.stage(Named(Weights(1, 0), "zero"))  # type: ignore[arg-type]
    await engine.activate()
    return engine


async def until_progress(engine: SimulatedEngine, id: str, tokens: int) -> None:
    while engine.progress(id) < tokens:  # noqa: ASYNC110 - progress is polled by contract; LIMIT_S bounds it
        await asyncio.sleep(0)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 64), st.floats(0.0, 3.0))
def test_lengths_are_the_published_formula(seed: int, ticket: int, member: int, cv: float) -> None:
    sigma2 = math.log(1 + cv * cv)
    expected = random.Random(f"{seed}/{ticket}/{member}").lognormvariate(-sigma2 / 2, math.sqrt(sigma2))
    assert relative_length(seed, ticket, member, cv) == expected


@pytest.mark.parametrize("cv", [0.5, 1.0])
def test_lengths_have_mean_one_and_the_coefficient_of_variation_asked_for(cv: float) -> None:
    lengths = [relative_length(0, ticket, member, cv) for ticket in range(10_000) for member in range(8)]
    assert statistics.fmean(lengths) == pytest.approx(1.0, abs=0.02)
    assert statistics.stdev(lengths) == pytest.approx(cv, abs=0.1)


@pytest.mark.asyncio
async def test_a_request_returns_its_length_in_tokens_and_takes_its_time() -> None:
    engine = await make_engine()
    async with asyncio.timeout(LIMIT_S):
        completions = await asyncio.gather(*(engine.generate(make_request(3, m)) for m in range(8)))
    for member, completion in enumerate(completions):
        length = 20.0 * relative_length(5, 3, member, 1.0)
        tokens = max(1, round(length))
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions) == tokens
        assert set(completion.logprobs.tolist()) == {-1.0}
        assert completion.finish_reason == "stop"
        # All started at once, each runs length x token_s seconds: differences of the ends are exact.
        first = completions[0].done - 20.0 * relative_length(5, 3, 0, 1.0) * 0.001
        assert completion.done - first == pytest.approx(length * 0.001, abs=1e-4)
    assert engine.generated_tokens == sum(len(c.token_ids) for c in completions)


@pytest.mark.asyncio
async def test_waiting_for_a_slot_does_not_drift() -> None:
    engine = await make_engine(slots=1, mean_tokens=2.0, cv=0.0)
    async with asyncio.timeout(LIMIT_S):
        completions = await asyncio.gather(*(engine.generate(make_request(n, 0)) for n in range(50)))
    assert completions[-1].done - completions[0].done == pytest.approx(49 * 0.002, abs=1e-4)


@pytest.mark.asyncio
async def test_members_of_a_group_start_together_once_there_are_slots_for_all() -> None:
    engine = await make_engine(slots=6)
    async with asyncio.timeout(LIMIT_S):
        groups = await asyncio.gather(
            *(asyncio.gather(*(engine.generate(make_request(t, m)) for m in range(4))) for t in range(5))
        )
    for ticket, group in enumerate(groups):
        starts = [c.done - 0.02 * relative_length(5, ticket, m, 1.0) for m, c in enumerate(group)]
        assert max(starts) - min(starts) < 1e-4


@pytest.mark.asyncio
async def test_a_group_larger_than_the_engine_still_finishes() -> None:
    engine = await make_engine(slots=3, mean_tokens=3.0)
    async with asyncio.timeout(LIMIT_S):
        assert len(await asyncio.gather(*(engine.generate(make_request(0, m)) for m in range(10)))) == 10
    assert engine.free_slots == 3


@pytest.mark.asyncio
async def test_tokens_carry_the_version_served_when_their_sampling_began() -> None:
    engine = await make_engine(cv=0.0, mean_tokens=1e6)
    async with asyncio.timeout(LIMIT_S):
        task = asyncio.create_task(engine.generate(make_request(0, 0)))
        await until_progress(engine, "0/0", 10)
        begun = engine.progress("0/0")
        await engine.stage(Named(Weights(2, 7), "seven"))  # type: ignore[arg-type]
        assert await engine.activate("recompute") == Weights(2, 7) == engine.serving
        await until_progress(engine, "0/0", begun + 50)
        engine.abort(["0/0"])
        completion = await task
    total = len(completion.token_ids)
    old, new = completion.spans
    assert (old.weights, old.checksum, old.start) == (Weights(1, 0), "zero", 0)
    assert (new.weights, new.checksum, new.end) == (Weights(2, 7), "seven", total)
    assert begun <= old.end == new.start < total
    assert completion.versions.tolist() == [0] * old.end + [7] * (total - old.end)


@pytest.mark.asyncio
async def test_abort_returns_what_was_sampled_so_far_and_makes_room() -> None:
    engine = await make_engine(slots=1, cv=0.0, mean_tokens=1e6)
    async with asyncio.timeout(LIMIT_S):
        running = asyncio.create_task(engine.generate(make_request(0, 0)))
        queued = asyncio.create_task(engine.generate(make_request(1, 0)))
        cancelled = asyncio.create_task(engine.generate(make_request(2, 0)))
        await until_progress(engine, "0/0", 5)
        cancelled.cancel()
        engine.abort(["0/0", "1/0", "unknown"])
        partial, nothing = await running, await queued
        assert (await asyncio.gather(cancelled, return_exceptions=True))[0].__class__ is asyncio.CancelledError
    assert partial.finish_reason == nothing.finish_reason == "abort"
    assert 5 <= len(partial.token_ids) < 1_000_000
    assert len(nothing.token_ids) == 0
    assert engine.free_slots == 1


@pytest.mark.asyncio
async def test_errors_are_those_of_every_engine() -> None:
    engine = SimulatedEngine("sim", slots=1, token_s=1.0, mean_tokens=1000.0, cv=0.0, seed=0)
    with pytest.raises(EngineError, match="serves nothing yet"):
        await engine.generate(make_request(0, 0))
    with pytest.raises(WeightsError, match="stage"):
        await engine.activate()
    await engine.stage(Named(Weights(1, 0), "zero"))  # type: ignore[arg-type]
    await engine.activate()
    task = asyncio.create_task(engine.generate(make_request(0, 0)))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="unique"):
        await engine.generate(make_request(0, 0))
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await task
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(make_request(1, 0))


@pytest.mark.asyncio
async def test_a_thousand_requests_run_at_once() -> None:
    engine = await make_engine(slots=1000, mean_tokens=100.0, cv=0.5)
    async with asyncio.timeout(LIMIT_S):
        requests = [make_request(n, m) for n in range(125) for m in range(8)]
        completions = await asyncio.gather(*(engine.generate(r) for r in requests))
    for r, completion in zip(requests, completions, strict=True):
        length = 100.0 * relative_length(5, r.ticket, r.member, 0.5)
        assert len(completion.token_ids) == max(1, round(length))
    assert engine.free_slots == 1000


def test_it_needs_no_torch() -> None:
    code = "import sys, asyncrl.collectors.engines.simulated; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
