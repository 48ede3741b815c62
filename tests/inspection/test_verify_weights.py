"""`asyncrl status --verify-weights` on a run that goes on: collectors of the product, a real store."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Callable

import pytest

from asyncrl.buffers.base import BufferError, Member
from asyncrl.buffers.remote import RedisBuffer
from asyncrl.collectors.engines.simulated import SimulatedEngine
from asyncrl.runtime.verification import verify
from asyncrl.staleness import Weights
from tests.faults.runs import begin, collecting, recipe_of

pytestmark = pytest.mark.asyncio

LIMIT_S = 20.0

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


async def all_serve(buffer: RedisBuffer, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            serving = [member for member in (await buffer.stats()).members if member.serving is not None]
            if len(serving) == count:
                return
            await asyncio.sleep(0.02)


async def status(cli: Cli, url: str, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(cli, "status", "--buffer", url, "--run", name, *options)


async def test_engines_that_serve_what_was_published_are_equal(server_url: str, cli: Cli) -> None:
    async with collecting(server_url, recipe_of("verified")) as buffer:
        weights = await begin(buffer)
        await all_serve(buffer, 2)
        said = await status(cli, server_url, "verified", "--verify-weights")
        plain = await status(cli, server_url, "verified")
        await buffer.finish()
        ended = await status(cli, server_url, "verified", "--verify-weights")
    assert weights == Weights(1, 0)
    assert said.returncode == 0, said.stderr
    assert [re.sub(" +", " ", line) for line in said.stdout.splitlines()] == [
        "collector engine serves published found",
        "c0 c0/0 1/0 0000 0000 equal",
        "c1 c1/0 1/0 0000 0000 equal",
    ]
    assert plain.returncode == 0
    assert (ended.returncode, "has ended" in ended.stderr) == (2, True)


async def test_one_that_serves_other_weights_is_named_with_both_checksums(
    server_url: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = SimulatedEngine.verify

    async def verify_of(self: SimulatedEngine) -> tuple[Weights, str]:
        weights, checksum = await honest(self)
        return weights, "ffff" if self.name.startswith("c1/") else checksum

    async with collecting(server_url, recipe_of("differs")) as buffer:
        await begin(buffer)
        await all_serve(buffer, 2)
        monkeypatch.setattr(SimulatedEngine, "verify", verify_of)
        said = await status(cli, server_url, "differs", "--verify-weights")
        await buffer.finish()
    assert said.returncode == 1
    assert said.stdout.splitlines()[-1] == (
        "c1 serves other weights than were published as 1/0: expected 0000, found ffff"
    )


async def test_who_does_not_answer_is_named_and_the_others_are_compared(server_url: str) -> None:
    async with collecting(server_url, recipe_of("mute"), collectors=1) as buffer:
        await begin(buffer)
        await buffer.join(Member("mute", "mute-1"), {})
        await all_serve(buffer, 1)
        found = await verify(buffer, limit_s=3.0)
        await buffer.finish()
    assert [(one.collector, one.verdict, one.wrong) for one in found] == [
        ("c0", "equal", False),
        ("mute", "no answer", True),
    ]


async def test_an_engine_that_cannot_say_is_named_with_the_reason(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(self: SimulatedEngine) -> tuple[Weights, str]:
        await asyncio.Event().wait()
        raise AssertionError

    async with collecting(server_url, recipe_of("slow", weights={"deadline_s": 0.5}), collectors=1) as buffer:
        await begin(buffer)
        await all_serve(buffer, 1)
        monkeypatch.setattr(SimulatedEngine, "verify", never)
        (found,) = await verify(buffer, limit_s=LIMIT_S)
        await buffer.finish()
    assert (found.verdict, found.wrong) == ("failed", True)
    assert found.detail == "engine c0/0 cannot say what it serves: no answer within weights.deadline_s 0.5"


async def test_without_a_collector_there_is_nothing_to_verify(server_url: str) -> None:
    async with collecting(server_url, recipe_of("empty"), collectors=0) as buffer:
        await begin(buffer)
        with pytest.raises(BufferError, match="no collector that is alive"):
            await verify(buffer, limit_s=LIMIT_S)
