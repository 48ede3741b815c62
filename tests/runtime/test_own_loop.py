"""A coroutine in somebody else's process: result, exception, and what KeyboardInterrupt does to it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from asyncrl.runtime import own_loop

NEVER_S = 60.0
"""Longer than any of these may take; a test that waits so long has failed."""


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt here, also where the tests run in the background of a shell that ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


async def answer(_stop: asyncio.Event) -> int:
    await asyncio.sleep(0)
    return 42


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "asyncrl.run"]


def test_the_result_is_returned_and_the_thread_has_ended() -> None:
    assert own_loop.run(answer, grace_s=NEVER_S) == 42
    deadline = time.monotonic() + NEVER_S
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads()


def test_what_it_raises_is_raised() -> None:
    async def main(_stop: asyncio.Event) -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        own_loop.run(main, grace_s=NEVER_S)


@pytest.mark.asyncio
async def test_a_running_event_loop_does_not_matter() -> None:
    assert own_loop.run(answer, grace_s=NEVER_S) == 42
    assert asyncio.get_running_loop().is_running()
    await asyncio.sleep(0)


def test_it_works_in_any_thread() -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(own_loop.run(answer, grace_s=NEVER_S)))
    thread.start()
    thread.join(NEVER_S)
    assert found == [42]


def test_an_interrupt_asks_it_to_stop_and_waits_for_it() -> None:
    said: list[str] = []

    async def main(stop: asyncio.Event) -> None:
        interrupt()
        await asyncio.wait_for(stop.wait(), NEVER_S)
        await asyncio.sleep(0.05)
        said.append("checkpoint")

    with pytest.raises(KeyboardInterrupt):
        own_loop.run(main, grace_s=NEVER_S)
    assert said == ["checkpoint"]


@pytest.mark.parametrize(("grace_s", "interrupts"), [(0.0, 1), (0.1, 1), (NEVER_S, 2)])
def test_after_the_grace_or_a_second_interrupt_it_is_cancelled_and_cleans_up(grace_s: float, interrupts: int) -> None:
    said: list[str] = []

    async def main(stop: asyncio.Event) -> None:
        try:
            interrupt()
            async with asyncio.timeout(NEVER_S):  # not wait_for: Python 3.11's may lose a cancellation
                await stop.wait()
            if interrupts == 2:
                interrupt()
            await asyncio.sleep(NEVER_S)  # does not stop
            said.append("slept to the end")
        finally:
            await asyncio.sleep(0.05)
            said.append("killed its processes")

    with pytest.raises(KeyboardInterrupt):
        own_loop.run(main, grace_s=grace_s)
    assert said == ["killed its processes"]
