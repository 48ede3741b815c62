"""The processes of a learner's other ranks: who came, who was lost, and that the loss of one ends all."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from asyncrl.config.recipe import Learner, Recipe, Run
from asyncrl.learners.lost import RankLost
from asyncrl.runtime import children
from asyncrl.runtime.ranks import RankProcesses

LIMIT_S = 30.0


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """Ranks 1 and 2 of three that run this Python code; `argv[1]` is the file that says that one has come."""

    def ranks(code: str) -> RankProcesses:
        def command(argv):
            meeting, rank = argv[argv.index("--meeting") + 1], argv[argv.index("--rank") + 1]
            return [sys.executable, "-c", code, f"{meeting}/{rank}", rank]

        monkeypatch.setattr(children.tether, "command", command)
        (tmp_path / "logs").mkdir()
        (tmp_path / "meeting").mkdir()
        return RankProcesses(3, folder=tmp_path, meeting=tmp_path / "meeting", limit_s=7.0)

    return ranks


COME_AND_WAIT = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
RECIPE = Recipe(run=Run(name="ranks"), learner=Learner(ranks=3))


async def lost(processes: RankProcesses) -> str:
    """What `check` says once a rank is lost."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                processes.check()
            except RankLost as error:
                return str(error)
            await asyncio.sleep(0.02)


@pytest.mark.faults
@pytest.mark.asyncio
async def test_a_killed_rank_is_named_and_ends_the_others(ranks, is_alive, eventually):
    processes = ranks(COME_AND_WAIT)
    try:
        await processes.start(RECIPE, "redis://nowhere")
        assert await asyncio.wait_for(processes.met(asyncio.Event()), LIMIT_S)
        processes.check()
        first, second = (child.pid for child in processes._children)
        os.kill(second, signal.SIGKILL)
        said = await lost(processes)
        assert f"learner rank 2 (process {second}) was killed by SIGKILL" in said
        assert "learner-2.log" in said
        assert await asyncio.to_thread(eventually, 10, lambda: not is_alive(first))
        # Whatever rank 0 noticed of it comes from that; an error of its own does not.
        cause = await processes.cause(RuntimeError("Connection closed by peer"))
        assert isinstance(cause, RankLost)
        assert str(cause) == said
        own = ValueError("mine")
        assert await processes.cause(own) is own
    finally:
        await processes.kill()


@pytest.mark.faults
@pytest.mark.asyncio
async def test_without_the_watch_the_others_would_live_on(ranks, is_alive, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(RankProcesses, "_on_exit", lambda *_: None)
    processes = ranks(COME_AND_WAIT)
    try:
        await processes.start(RECIPE, "redis://nowhere")
        assert await asyncio.wait_for(processes.met(asyncio.Event()), LIMIT_S)
        first, second = processes._children
        os.kill(second.pid, signal.SIGKILL)
        assert await second.ended(LIMIT_S)
        processes.check()
        assert is_alive(first.pid)
    finally:
        await processes.kill()
    assert not is_alive(first.pid)


@pytest.mark.asyncio
async def test_a_rank_that_fails_before_it_comes_says_why(ranks):
    processes = ranks("import sys, time; sys.argv[2] == '1' or time.sleep(60); print('Error: no model'); sys.exit(2)")
    try:
        await processes.start(RECIPE, "redis://nowhere")
        with pytest.raises(RankLost, match=r"rank 1 .* ended with code 2; its log: .*: no model"):
            await asyncio.wait_for(processes.met(asyncio.Event()), LIMIT_S)
    finally:
        await processes.kill()


@pytest.mark.asyncio
async def test_waiting_for_ranks_ends_when_the_run_is_stopped(ranks):
    processes = ranks("import time; time.sleep(60)")
    stop = asyncio.Event()
    try:
        await processes.start(RECIPE, "redis://nowhere")
        meeting = asyncio.create_task(processes.met(stop))
        await asyncio.sleep(0)
        stop.set()
        assert await asyncio.wait_for(meeting, LIMIT_S) is False
    finally:
        await processes.kill()


@pytest.mark.asyncio
async def test_a_collective_that_takes_too_long_names_what_each_rank_does(ranks, monkeypatch):
    monkeypatch.setattr("asyncrl.runtime.ranks.NOTICE_S", 0.1)
    processes = ranks(COME_AND_WAIT)
    try:
        await processes.start(RECIPE, "redis://nowhere")
        assert await asyncio.wait_for(processes.met(asyncio.Event()), LIMIT_S)
        first, second = (child.pid for child in processes._children)
        os.kill(second, signal.SIGSTOP)
        cause = await processes.cause(RuntimeError("Timed out waiting 7000ms for recv operation to complete"))
        assert isinstance(cause, RankLost)
        assert "no answer within run.no_progress_s, 7 s" in str(cause)
        assert f"rank 1 (process {first}) is sleeping" in str(cause)
        assert f"rank 2 (process {second}) is stopped" in str(cause)
    finally:
        await processes.kill()
