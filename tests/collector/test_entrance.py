"""Requests that wait for other weights, or are interrupted for them: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.collectors.engines.base import Completion, Request, Sampling, Span
from asyncrl.collectors.engines.parts import continued, ended, joined
from asyncrl.collectors.engines.simulated import SimulatedEngine
from asyncrl.collectors.engines.spans import token_versions
from asyncrl.collectors.entrance import Entrance
from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights

LIMIT_S = 20.0


def request(name: str = "r", max_tokens: int = 50) -> Request:
    return Request(name, name, name, (1, 2, 3), Sampling(max_tokens=max_tokens), seed=7)


def part(tokens: list[int], version: int, reason: str = "abort", first_token: float = 0.0) -> Completion:
    span = (Span(Weights(1, version), 0, len(tokens), f"{version:x}"),) if tokens else ()
    return Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=-np.array(tokens, np.float32),
        versions=token_versions(span),
        spans=span,
        finish_reason=reason,  # type: ignore[arg-type]
        first_token=first_token,
        done=first_token + 1,
    )


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=8), st.integers(0, 3)), min_size=1, max_size=6).map(
        lambda parts: [(tokens, sum(step for _, step in parts[: at + 1])) for at, (tokens, _) in enumerate(parts)]
    )
)
def test_the_parts_of_an_answer_are_one_answer_with_one_span_a_stretch(parts: list[tuple[list[int], int]]) -> None:
    rest, completions = request(max_tokens=200), []
    for tokens, version in parts:
        completions.append(part(tokens, version))
        after = continued(rest, completions[-1])
        assert after.token_ids == (*rest.token_ids, *tokens)
        assert after.sampling.max_tokens + after.position == 200
        rest = after
    whole = joined(completions)
    tokens = [token for tokens, _ in parts for token in tokens]
    versions = [version for tokens, version in parts for _ in tokens]
    assert rest.position == len(tokens)
    assert whole.token_ids.tolist() == tokens
    assert whole.logprobs.tolist() == [-token for token in tokens]
    assert whole.versions.tolist() == versions
    assert [v for span in whole.spans for v in [span.weights.version] * (span.end - span.start)] == versions
    assert [span.weights.version for span in whole.spans] == sorted(set(versions))
    assert whole.token_ids.dtype == whole.versions.dtype == np.int32


def test_an_answer_in_parts_began_with_its_first_token_and_ended_as_its_last_part() -> None:
    whole = joined([part([], 1), part([5], 1, first_token=10.0), part([6], 2, "stop", first_token=20.0)])
    assert (whole.first_token, whole.done, whole.finish_reason) == (10.0, 21.0, "stop")


def test_an_answer_that_was_whole_when_its_engine_was_lost_is_not_sampled_on() -> None:
    def asked(max_tokens: int) -> Request:
        return Request("r", "r", "r", (1,), Sampling(max_tokens=max_tokens, stop_token_ids=(9,)), seed=0)

    def reason(completion: Completion, max_tokens: int = 5) -> str | None:
        whole = ended(asked(max_tokens), completion)
        return None if whole is None else whole.finish_reason

    assert reason(part([1, 9], 1)) == "stop"
    assert reason(part([1, 2, 3, 4, 5], 1)) == "length"
    assert reason(part([1, 2], 1)) is None
    assert reason(part([], 1)) is None


async def engine(token_s: float = 0.002, mean_tokens: float = 100.0, slots: int = 4) -> SimulatedEngine:
    made = SimulatedEngine("e", slots=slots, token_s=token_s, mean_tokens=mean_tokens, cv=0.0, seed=0)
    await made.start()
    await activate(made, 1)
    return made


async def activate(engine: SimulatedEngine, version: int) -> None:
    await engine.stage(StagedWeights(Weights(1, version), {}, {}, f"{version:x}"))
    await engine.activate()


async def until(condition: object) -> None:
    while not condition():  # type: ignore[operator]  # noqa: ASYNC110 - LIMIT_S bounds it
        await asyncio.sleep(0.001)


@pytest.mark.asyncio
async def test_interrupted_requests_come_back_and_sample_what_was_left() -> None:
    async with asyncio.timeout(LIMIT_S):
        one, entrance = await engine(), Entrance()
        running = [asyncio.ensure_future(entrance.generate(one, request(f"r{n}"))) for n in range(6)]
        seen = 0
        for version in (2, 3):
            await until(lambda seen=seen: entrance.progress(one, "r0") >= seen + 5)
            entrance.close()
            entrance.interrupt(one)
            assert await entrance.emptied(LIMIT_S)
            assert one.free_slots == one.slots
            seen = entrance.progress(one, "r0")
            assert seen >= 5, "what was sampled before counts on"
            await activate(one, version)
            entrance.open()
        answers = await asyncio.gather(*running)
    assert [len(answer.token_ids) for answer in answers] == [100] * 6
    assert [answer.finish_reason for answer in answers] == ["stop"] * 6
    assert [span.weights.version for span in answers[0].spans] == [1, 2, 3]
    assert [span.checksum for span in answers[0].spans] == ["1", "2", "3"]
    assert one.generated_tokens == 600
    assert entrance.progress(one, "r0") == 0


@pytest.mark.asyncio
async def test_one_that_ends_by_itself_meanwhile_is_not_asked_for_again() -> None:
    async with asyncio.timeout(LIMIT_S):
        one, entrance = await engine(mean_tokens=1.0, token_s=0.05), Entrance()
        running = asyncio.ensure_future(entrance.generate(one, request()))
        await until(lambda: entrance.inside == 1)
        entrance.close()
        await until(lambda: entrance.inside == 0)  # it has ended: nothing is left to interrupt
        entrance.interrupt(one)
        answer = await running
        entrance.open()
    assert (answer.finish_reason, len(answer.token_ids)) == ("stop", 1)


@pytest.mark.asyncio
async def test_an_abort_that_was_none_of_ours_is_final() -> None:
    async with asyncio.timeout(LIMIT_S):
        one, entrance = await engine(), Entrance()
        running = asyncio.ensure_future(entrance.generate(one, request()))
        await until(lambda: entrance.progress(one, "r") >= 3)
        one.abort(["r"])
        answer = await running
    assert answer.finish_reason == "abort"
    assert 3 <= len(answer.token_ids) < 100


@pytest.mark.asyncio
async def test_a_closed_entrance_lets_nobody_in_and_tells_when_those_inside_are_gone() -> None:
    async with asyncio.timeout(LIMIT_S):
        one, entrance = await engine(mean_tokens=20.0), Entrance()
        inside = asyncio.ensure_future(entrance.generate(one, request("inside")))
        await until(lambda: entrance.inside == 1)
        entrance.close()
        outside = asyncio.ensure_future(entrance.generate(one, request("outside")))
        assert not await entrance.emptied(0.001)
        assert await entrance.emptied(LIMIT_S)
        await activate(one, 2)
        await inside
        assert not outside.done()
        entrance.open()
        assert [span.weights.version for span in (await outside).spans] == [2]


@pytest.mark.asyncio
async def test_one_who_gives_up_outside_or_inside_leaves_nothing_behind() -> None:
    async with asyncio.timeout(LIMIT_S):
        one, entrance = await engine(), Entrance()
        inside = asyncio.ensure_future(entrance.generate(one, request("inside")))
        await until(lambda: entrance.inside == 1)
        entrance.close()
        outside = asyncio.ensure_future(entrance.generate(one, request("outside")))
        await asyncio.sleep(0)
        entrance.interrupt(one)
        for task in (inside, outside):
            task.cancel()
        await asyncio.wait({inside, outside})
        assert await entrance.emptied(LIMIT_S)
        entrance.open()
        assert one.free_slots == one.slots
        assert len((await entrance.generate(one, request("inside"))).token_ids) == 100
