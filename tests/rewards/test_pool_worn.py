"""The verifier pool over many faults: what is killed is gone, what is limited stays limited, and nothing is forked."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

import psutil
import pytest

from asyncrl.rewards.scoring import Score, Scoring

MakePool = Callable[..., AbstractAsyncContextManager[Scoring]]
EVAL = "def score(self, row, answer): return eval(answer['text'])"
MIB = 1 << 20


async def score(pool: Scoring, text: str) -> Score:
    row, answer = {"id": "1", "info": {}}, {"text": text, "token_ids": (), "finish_reason": "stop"}
    return await asyncio.wait_for(pool.score(row, answer), 100)


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.asyncio
@pytest.mark.parametrize("endless", ["[0 for _ in iter(int, 1)]", "time.sleep(10 ** 6)"])
async def test_answers_without_end_starve_no_pool(make_pool: MakePool, endless: str) -> None:
    async with make_pool(EVAL, workers=2, timeout_s=0.5) as pool:
        stuck = await asyncio.gather(*(score(pool, endless) for _ in range(6)))
        assert [each.failure for each in stuck] == ["verifier_timeout"] * 6
        assert (await score(pool, "1.0")).reward == 1.0


@pytest.mark.asyncio
async def test_killed_workers_leave_no_zombie_and_no_process_more_than_there_were(make_pool: MakePool) -> None:
    async with make_pool(EVAL, workers=2, timeout_s=0.3) as pool:
        before = len(children())
        for _ in range(3):
            await asyncio.gather(*(score(pool, "time.sleep(600)") for _ in range(4)))
        assert (await score(pool, "1.0")).reward == 1.0
        alive = children()
        assert [child for child in alive if child.status() == psutil.STATUS_ZOMBIE] == []
        assert len(alive) <= before


@pytest.mark.asyncio
async def test_scores_that_are_kept_keep_no_process(make_pool: MakePool) -> None:
    async with make_pool(EVAL, workers=2) as pool:
        before = len(children())
        kept = [await score(pool, f"{{'a': {n}, 'b': 0.5}}") for n in range(50)]
        assert len(children()) == before
    assert [each.parts["a"] for each in kept] == list(range(50))


@pytest.mark.slow
@pytest.mark.asyncio
async def test_threads_that_log_all_the_time_stall_nothing(make_pool: MakePool) -> None:
    """A forked worker could inherit a lock of logging's that a thread holds, and wait for it for ever."""
    with busy_threads(4):
        for _ in range(3):  # each with new processes, started beside the threads
            async with make_pool("def score(self, row, answer): return 1.0", workers=2) as pool:
                scores = await asyncio.gather(*(score(pool, "") for _ in range(200)))
                assert [each.reward for each in scores] == [1.0] * 200


@contextmanager
def busy_threads(count: int) -> Iterator[None]:
    logger = logging.getLogger("test_pool_worn")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())
    ended = threading.Event()

    def log() -> None:
        while not ended.is_set():
            logger.warning("busy")

    threads = [threading.Thread(target=log, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(10)


@pytest.mark.asyncio
async def test_more_memory_than_the_limit_is_unscored_and_the_next_answer_is_scored(make_pool: MakePool) -> None:
    taken = f"len(bytearray({512 * MIB}))"
    async with make_pool(EVAL, memory_bytes=256 * MIB) as pool:
        over = await score(pool, taken)
        assert (over.failure, "collector.score_memory_limit" in over.detail) == ("verifier_memory", True)
        assert (await score(pool, "1.0")).reward == 1.0
    async with make_pool(EVAL) as pool:  # the control: without the limit there is room
        assert (await score(pool, taken)).reward == 512 * MIB
