"""Requests whose engine is lost go on elsewhere from what they had, and never under older weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from asyncrl.collectors import again, fleet, seats
from asyncrl.collectors.engines.base import EngineError, Request, Sampling
from asyncrl.collectors.engines.simulated import SimulatedEngine
from asyncrl.collectors.episode import Episode, EpisodeLost, Played, Turn
from asyncrl.collectors.fleet import Fleet, Host
from asyncrl.collectors.rollout import SimulatedPrompts
from asyncrl.collectors.seats import Seats
from asyncrl.rewards.scoring import Score
from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights
from tests.collector.test_entrance import part

pytestmark = pytest.mark.asyncio

LIMIT_S = 20.0
TOKENS = 100


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (again, seats):
        monkeypatch.setattr(module, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(fleet, "FIRST_BACKOFF_S", 0.0)


def request(name: str = "r", group: str = "g", turn: int = 0) -> Request:
    return Request(f"{name}/{turn}", group, name, (1, 2, 3), Sampling(max_tokens=TOKENS), seed=7)


async def serve(host: Host, version: int) -> None:
    await host.engine.stage(StagedWeights(Weights(1, version), {}, {}, f"{version:x}"))
    await host.engine.activate()


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - the progress of simulated engines; LIMIT_S bounds it
        await asyncio.sleep(0.001)


@asynccontextmanager
async def engines(*versions: int, token_s: float = 0.002, slots: int = 4) -> AsyncIterator[Fleet]:
    """A fleet that serves these versions, and starts again what failed, without weights."""

    def made(n: int) -> SimulatedEngine:
        return SimulatedEngine(f"e{n}", slots=slots, token_s=token_s, mean_tokens=TOKENS, cv=0.0, seed=0)

    async def nothing() -> None:
        return None

    found = Fleet([lambda n=n: made(n) for n in range(len(versions))])
    async with asyncio.timeout(LIMIT_S):
        await found.start()
        for host, version in zip(found.hosts, versions, strict=True):
            await serve(host, version)
        tending = asyncio.ensure_future(found.tend(on_failed=nothing, on_started=lambda: None))
        try:
            yield found
        finally:
            tending.cancel()
            await asyncio.wait({tending})
            await found.close()


def anything(found: Fleet, wait_s: float = LIMIT_S) -> Seats:
    return Seats(found, may=lambda _: True, wait_s=wait_s)


async def lose(found: Fleet, host: Host, why: str = "out of memory") -> None:
    engine = host.engine
    await engine.close()
    found.fail(host, engine, why)


async def test_an_answer_goes_on_at_another_engine_from_what_was_sampled() -> None:
    async with engines(3, 4) as found:
        places = anything(found)
        answer = asyncio.ensure_future(places.generate(request()))
        first, second = found.hosts
        await until(lambda: places.tokens >= 10)
        lost = first.engine
        await lose(found, first)
        await until(lambda: second.decoding)
        completion = await answer
        kept = completion.spans[0].end
    assert len(completion.token_ids) == TOKENS
    assert [span.weights.version for span in completion.spans] == [3, 4]
    assert kept >= 10
    assert second.engine.generated_tokens == TOKENS - kept, "what was sampled is not sampled again"
    assert lost.generated_tokens == 0
    assert (places.tokens, places.engines, places.touched) == (TOKENS, {"e0", "e1"}, {Weights(1, 3), Weights(1, 4)})
    assert not found.hosts[0].decoding
    assert not second.decoding


async def test_an_engine_that_cannot_tell_what_it_sampled_has_it_sampled_again(monkeypatch) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(SimulatedEngine, "partial", lambda self, request_id: None)
    async with engines(3, 4) as found:
        places = anything(found)
        answer = asyncio.ensure_future(places.generate(request()))
        await until(lambda: places.tokens >= 10)
        await lose(found, found.hosts[0])
        completion = await answer
        again = found.hosts[1].engine.generated_tokens
    assert [span.weights.version for span in completion.spans] == [4]
    assert len(completion.token_ids) == again == TOKENS


async def test_the_only_engine_s_requests_go_on_once_it_is_back_with_weights_that_are_as_new() -> None:
    async with engines(5) as found:
        (host,) = found.hosts
        places = anything(found)
        answer = asyncio.ensure_future(places.generate(request()))
        await until(lambda: places.tokens >= 10)
        await lose(found, host)
        await until(lambda: not host.failed)
        for version in (4, 6):
            assert not answer.done()
            assert list(found.waiting) == ["r/0"]
            assert host.engine.serving is None or host.engine.serving.version == 4
            await serve(host, version)
            found.activated()
            await asyncio.sleep(0.02)
        completion = await answer
        assert found.waiting == {}
    assert [span.weights.version for span in completion.spans] == [5, 6], "and not 4 between them"


async def test_nothing_goes_on_under_weights_below_what_the_ticket_was_issued_for_and_the_wait_ends() -> None:
    async with engines(3, 5) as found:
        places = Seats(found, may=lambda weights: weights >= Weights(1, 4), wait_s=0.05)
        await places.generate(request("a"))
        assert places.engines == {"e1"}
        await lose(found, found.hosts[1])
        with pytest.raises(EngineError, match=r"for 0.05 s no engine served weights that request a/1 may go on with"):
            await places.generate(request("a", turn=1))


async def test_an_engine_that_hangs_is_left_at_once_when_it_is_given_up(monkeypatch) -> None:
    async def hangs(self, request):
        await asyncio.Event().wait()

    async with engines(1, 1) as found:
        places = anything(found)
        monkeypatch.setattr(found.hosts[0].engine, "generate", hangs.__get__(found.hosts[0].engine))
        answer = asyncio.ensure_future(places.generate(request()))
        await until(lambda: found.hosts[0].entrance.inside)
        found.fail_still(0.0)
        assert found.hosts[0].failed.startswith("no token for")
        assert len((await answer).token_ids) == TOKENS
        assert places.engines == {"e1"}


async def test_who_waits_at_a_closed_entrance_does_not_wait_for_an_engine_that_is_lost() -> None:
    async with engines(1, 1) as found:
        first = found.hosts[0]
        first.entrance.close()
        places = anything(found)
        answer = asyncio.ensure_future(places.generate(request()))
        await until(lambda: first.decoding)
        await lose(found, first)
        assert len((await answer).token_ids) == TOKENS
        assert places.engines == {"e1"}


async def test_a_request_that_takes_engines_with_it_takes_only_so_many(monkeypatch) -> None:
    async def dies(self, request):
        raise EngineError("out of memory")

    monkeypatch.setattr(SimulatedEngine, "generate", dies)
    async with engines(1, 1, 1, 1, 1) as found:
        with pytest.raises(EngineError, match="out of memory"):
            await anything(found).generate(request())
        assert sum(host.restarts + bool(host.failed) > 0 for host in found.hosts) == len(seats.PAUSES_S) + 1


async def test_an_episode_stays_with_its_engine_while_that_takes_work_and_holds_no_slot_between_turns() -> None:
    async with engines(1, 1, token_s=0.0001) as found:
        places = anything(found)
        await places.generate(request("a"))
        (own,) = [host for host in found.hosts if host.engine.generated_tokens]
        assert not own.decoding
        own.take("other", seats.Ask("other", 10**6, 10**6))  # by its load alone, the other one would be chosen
        await places.generate(request("a", turn=1))
        assert own.engine.generated_tokens == 2 * TOKENS
        await lose(found, own)
        await places.generate(request("a", turn=2))
        assert {host.engine.generated_tokens for host in found.hosts if host is not own} == {TOKENS}


async def test_without_stickiness_the_less_loaded_engine_would_be_chosen(monkeypatch) -> None:
    """Negative control of the test above."""
    async with engines(1, 1, token_s=0.0001) as found:
        places = anything(found)
        await places.generate(request("a"))
        (own,) = [host for host in found.hosts if host.engine.generated_tokens]
        own.take("other", seats.Ask("other", 10**6, 10**6))
        places._sessions.clear()
        await places.generate(request("a", turn=1))
        assert own.engine.generated_tokens == TOKENS


async def test_the_slots_of_a_group_are_reserved_and_given_back() -> None:
    async with engines(1, 1) as found:
        assert found.startable(4) == 2
        places = anything(found)
        assert places.reserve(request(f"m{n}") for n in range(6))
        assert [len(host.decoding) for host in found.hosts] == [4, 2], "together, as far as slots allow"
        assert found.startable(4) == 0
        assert found.startable(2) == 1
        assert [host.load().tokens for host in found.hosts] == [3 + 4 * TOKENS, 3 + 2 * TOKENS], "one prompt each"
        places.release()
        assert found.startable(4) == 2
        assert [host.load().tokens for host in found.hosts] == [0, 0]


async def test_an_episode_that_was_lost_before_it_asked_has_one_slot_when_it_begins_again() -> None:
    async with engines(1) as found:
        (host,) = found.hosts
        places = anything(found)
        assert places.reserve(replace(request(f"m{n}"), member=n) for n in range(2))
        again = asyncio.ensure_future(places.generate(replace(request("m1+1"), member=1)))
        await until(lambda: host.entrance.inside)
        assert sorted(host.decoding) == ["m0/0", "m1+1/0"]
        await again
        assert list(host.decoding) == ["m0/0"]
        places.release()


async def test_what_was_sampled_is_outstanding_no_longer() -> None:
    async with engines(1) as found:
        (host,) = found.hosts
        answer = asyncio.ensure_future(anything(found).generate(request()))
        await until(lambda: host.entrance.progress(host.engine, "r/0") >= 10)
        assert host.load().tokens <= TOKENS - 10
        await answer
        assert host.load().tokens == 0


async def test_a_partial_answer_and_who_listens_to_it_survive_the_loss_of_the_engine(monkeypatch) -> None:
    listened: list[tuple[str, bool]] = []

    def listen(self: SimulatedEngine, request_id: str, heard: Callable[[], None]) -> None:
        listened.append((self.name, request_id in self._active))

    monkeypatch.setattr(SimulatedEngine, "listen", listen)
    async with engines(1, 1) as found:
        places = anything(found)
        places.listen("r/0", lambda: None)
        assert places.partial("r/0") is None
        answer = asyncio.ensure_future(places.generate(request()))
        await until(lambda: places.tokens >= 10)
        await lose(found, found.hosts[0])
        await until(lambda: found.hosts[1].decoding)
        partial = places.partial("r/0")
        assert partial is not None
        assert (partial.finish_reason, len(partial.token_ids) >= 10) == ("abort", True)
        await answer
    assert listened == [("e0", True), ("e1", True)], "each heard of it once the request had begun there"


class Loses:
    """A player whose first tries are lost."""

    def __init__(self, times: int) -> None:
        self.times, self.seen = times, []

    async def play(self, episode: Episode, sampler: Seats) -> Played:
        self.seen.append(episode.request())
        if len(self.seen) <= self.times:
            raise EpisodeLost("environment_gone", "its process ended")
        completion = part([1], 1, "stop")
        return Played((Turn(self.seen[-1], completion),), Score({}, 1.0, ""), 0.0, "stop")


async def test_a_lost_episode_is_another_sample_each_time_and_ends_after_so_many() -> None:
    episode = Episode(SimulatedPrompts().train(0), "4.1", "run/0", 4, 1, 2, Sampling())
    async with engines(1) as found:
        player = Loses(2)
        await again.play(episode, player, anything(found))
        assert [request.id for request in player.seen] == ["4.1.2", "4.1.2+1", "4.1.2+2"]
        assert len({request.seed for request in player.seen}) == 3
        assert len({request.session for request in player.seen}) == 3
        with pytest.raises(EpisodeLost, match="its process ended"):
            await again.play(episode, Loses(3), anything(found))
