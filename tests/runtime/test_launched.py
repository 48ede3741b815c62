"""Ranks that torchrun started: their place, how they find each other in its store, what they hear of each other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import TCPStore

from asyncrl.config.recipe import Learner, Recipe, Run
from asyncrl.learners.lost import RankLost
from asyncrl.runtime import launched
from asyncrl.runtime.launch import Launch, LaunchError
from asyncrl.runtime.launched import Here, Peers, check_reach, connected, earlier_folder, note_folder

LIMIT_S = 30.0
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def server() -> Iterator[list[TCPStore]]:
    """torchrun's store; it is gone once the list is empty."""
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    yield stores
    stores.clear()


def peers(server: list[TCPStore], rank: int, size: int = 2) -> Peers:
    launch = Launch(rank, size, local_rank=rank, local_size=size, address="127.0.0.1", port=server[0].port)
    return Peers(connected(launch), launch, limit_s=7.0)


async def met(*all_peers: Peers) -> None:
    async with asyncio.timeout(LIMIT_S):
        found = await asyncio.gather(*(one.meet(asyncio.Event(), interface=None) for one in all_peers))
    assert [meeting is not None and meeting.neighbours for meeting in found] == [len(all_peers)] * len(all_peers)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "BEAT_S", 0.05)
    monkeypatch.setattr(launched, "LOST_S", 1.0)


def test_a_rank_knows_its_place_from_what_torchrun_says() -> None:
    launch = Launch.of(TORCHRUN)
    assert launch == Launch(3, 4, 1, 2, "node0", 29500)
    assert launch is not None
    assert not launch.one_host


def test_a_torchrun_that_shares_no_store_is_refused() -> None:
    with pytest.raises(LaunchError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        Launch.of({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"})


def test_the_number_of_ranks_is_torchruns_unless_the_recipe_says_another() -> None:
    launch = Launch.of(TORCHRUN)
    assert launch is not None
    assert launch.overrides(Recipe(run=Run(name="r"))) == ["learner.ranks=4"]
    assert launch.overrides(Recipe(run=Run(name="r"), learner=Learner(ranks=4))) == []
    with pytest.raises(LaunchError, match=r"learner\.ranks is 2, but torchrun started 4 processes"):
        launch.overrides(Recipe(run=Run(name="r"), learner=Learner(ranks=2)))
    with pytest.raises(LaunchError, match=r"learner\.devices is \[4, 5\], but under torchrun"):
        launch.overrides(Recipe(run=Run(name="r"), learner=Learner(devices=[4, 5])))


def test_ranks_of_several_hosts_are_not_reached_by_loopback() -> None:
    check_reach([Here("a", 1, "127.0.0.1"), Here("a", 2, "127.0.0.1")])
    check_reach([Here("a", 1, "10.0.0.1"), Here("b", 1, "10.0.0.2")])
    with pytest.raises(LaunchError, match=r"rank 1 on b would be reached at 127\.0\.1\.1"):
        check_reach([Here("a", 1, "10.0.0.1"), Here("b", 1, "127.0.1.1")])


@pytest.mark.asyncio
async def test_ranks_meet_whoever_has_knocked_before(server: list[TCPStore], quick: None) -> None:
    """Processes of an earlier start have left their knocks in the store, which outlives them."""
    server[0].set("asyncrl/knock/1", "of-a-process-that-is-gone")
    first, second, third = (peers(server, rank, 3) for rank in range(3))
    waiting = asyncio.create_task(first.meet(asyncio.Event(), interface=None))
    async with asyncio.timeout(LIMIT_S):
        while not server[0].check(["asyncrl/welcome/of-a-process-that-is-gone"]):
            await asyncio.wait({waiting}, timeout=0.01)
        assert not waiting.done()
        others = [one.meet(asyncio.Event(), interface=None) for one in (third, second)]
        assert all(await asyncio.gather(waiting, *others))
    for one in (first, second, third):
        one.close()

    again = [peers(server, rank, 3) for rank in (2, 0, 1)]
    await met(*again)
    for one in again:
        one.close()
    assert server[0].get("asyncrl/starts") == b"2"


@pytest.mark.asyncio
async def test_a_rank_that_does_not_come_is_named(server: list[TCPStore], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "MEET_S", 0.3)
    with pytest.raises(RankLost, match="missing: 1"):
        async with asyncio.timeout(LIMIT_S):
            await peers(server, 0).meet(asyncio.Event(), interface=None)


@pytest.mark.asyncio
async def test_nobody_meets_once_it_is_stopped(server: list[TCPStore]) -> None:
    stop = asyncio.Event()
    stop.set()
    for rank in (0, 1):
        async with asyncio.timeout(LIMIT_S):
            assert await peers(server, rank).meet(stop, interface=None) is None


@pytest.mark.faults
@pytest.mark.asyncio
async def test_a_rank_that_falls_silent_is_what_the_others_failed_of(server: list[TCPStore], quick: None) -> None:
    first, second = peers(server, 0), peers(server, 1)
    await met(first, second)
    error = RuntimeError("Connection closed by peer")
    # Control: as long as all live, an error is an error.
    assert await first.cause(error) is error
    first.check()
    second.close()
    async with asyncio.timeout(LIMIT_S):
        cause = await first.cause(error)
    assert isinstance(cause, RankLost)
    assert "learner rank 1 (process" in str(cause)
    assert "was killed or does not answer" in str(cause)
    bug = ValueError("a bug")
    assert await first.cause(bug) is bug, "it is not of what goes on between ranks"
    first.close()


@pytest.mark.asyncio
async def test_a_collective_that_takes_too_long_names_who_may_hang(server: list[TCPStore], quick: None) -> None:
    first, second = peers(server, 0), peers(server, 1)
    await met(first, second)
    cause = await first.cause(RuntimeError("Timed out waiting 7000ms for recv operation to complete"))
    assert "no answer within run.no_progress_s, 7 s, of one of learner rank 1 (process" in str(cause)
    first.close()
    second.close()


@pytest.mark.asyncio
async def test_what_a_rank_fails_of_is_known_to_the_others(server: list[TCPStore], quick: None) -> None:
    first, second = peers(server, 0), peers(server, 1)
    await met(first, second)
    second.complain("the model is not there")
    async with asyncio.timeout(LIMIT_S):
        cause = await first.cause(RuntimeError("Connection closed by peer"))
        assert "learner rank 1 (process" in str(cause)
        assert str(cause).endswith("failed: the model is not there")
        with pytest.raises(RankLost, match="the model is not there"):
            first.check()
    first.complain(str(cause))
    async with asyncio.timeout(LIMIT_S):
        told = await second.cause(RuntimeError("Connection closed by peer"))
    assert "learner rank 0 (process" in str(told)
    first.close()
    second.close()


@pytest.mark.asyncio
async def test_any_rank_can_be_asked_to_stop(server: list[TCPStore], quick: None) -> None:
    first, second = peers(server, 0), peers(server, 1)
    await met(first, second)
    stop = asyncio.Event()
    first.on_stop(asyncio.get_running_loop(), stop)
    second.ask_to_stop()
    async with asyncio.timeout(LIMIT_S):
        await stop.wait()
    first.close()
    second.close()


@pytest.mark.faults
@pytest.mark.asyncio
async def test_ranks_end_when_torchruns_store_is_gone(server: list[TCPStore], quick: None) -> None:
    first, second = peers(server, 0), peers(server, 1)
    await met(first, second)
    server.clear()
    for one in (first, second):
        async with asyncio.timeout(LIMIT_S):
            cause = await one.cause(RuntimeError("Connection closed by peer"))
        assert "torchrun's store at 127.0.0.1, port" in str(cause)
        one.close()


def test_ranks_that_are_started_again_find_the_folder_of_the_run(server: list[TCPStore], tmp_path) -> None:
    launch = Launch(0, 2, local_rank=0, local_size=2, address="127.0.0.1", port=server[0].port)
    assert earlier_folder(launch) is None
    note_folder(launch, tmp_path)
    assert earlier_folder(launch) == tmp_path


def test_a_store_that_is_not_there_is_named(server: list[TCPStore], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "ANSWER_S", 0.5)
    port = server[0].port
    server.clear()
    with pytest.raises(LaunchError, match=rf"torchrun's store at 127\.0\.0\.1, port {port} does not answer"):
        connected(Launch(0, 2, 0, 2, "127.0.0.1", port))
