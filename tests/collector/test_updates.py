"""Weights that come late, wrong, or over the fallback: who is late is named, what is served goes on being served."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from msgspec import to_builtins

from asyncrl.buffers.base import Member
from asyncrl.collectors import fetching, fleet
from asyncrl.collectors.engines.simulated import SimulatedEngine
from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights, WeightsError, WeightsGone
from asyncrl.weights.reach import here

pytestmark = pytest.mark.asyncio

SLOW = {"engine": {"type": "simulated", "slots": 4, "token_s": 0.001, "mean_tokens": 10.0}}


class Line:
    """The other end of every receiver: what each transport does when it is asked. Thread-safe where it is called."""

    def __init__(self) -> None:
        self.does: dict[str, Callable[[], None]] = {}
        self.made: list[str] = []
        self.closed: list[str] = []
        self.ends = threading.Event()  # at the end of the test: nothing hangs for ever

    def receiver(self, offer: Mapping[str, Any], *, me: str, device: str) -> _Receiver:
        self.made.append(offer["transport"])
        return _Receiver(self, offer["transport"])

    def hang(self) -> None:
        self.ends.wait(30.0)


class _Receiver:
    def __init__(self, line: Line, transport: str) -> None:
        self.line, self.transport = line, transport

    def stage(self, offer: Mapping[str, Any], *, deadline_s: float, verify: bool = True) -> StagedWeights:
        self.line.does.get(self.transport, lambda: None)()
        weights = Weights(offer["lineage"], offer["version"])
        return StagedWeights(weights, {}, {}, offer.get("checksum", f"{weights.version:04x}"))

    def close(self) -> None:
        self.line.closed.append(self.transport)


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Line()
    monkeypatch.setattr("asyncrl.weights.build.receiver", made.receiver)
    monkeypatch.setattr(fetching, "GRACE_S", 0.1)
    monkeypatch.setattr(fetching, "CLOSE_S", 0.5)
    monkeypatch.setattr(fleet, "FIRST_BACKOFF_S", 0.01)
    yield made
    made.ends.set()


def offered(*transports: str) -> Callable[[Weights], Mapping[str, Any]]:
    def publish(weights: Weights) -> Mapping[str, Any]:
        names = {"lineage": weights.lineage, "version": weights.version}
        return {"place": to_builtins(here()), "offers": [{"transport": name, **names} for name in transports]}

    return publish


def told(buffer: Any) -> Mapping[str, Any]:
    member = buffer.model.members.get("c0-1")
    return {} if member is None else member.info.get("weights") or {}


def serving(buffer: Any) -> Weights | None:
    member = buffer.model.members.get("c0-1")
    return None if member is None else member.serving


FALLBACK = {"deadline_s": 0.4, "transport": "collective", "fallback": {"transport": "file", "url": "/nowhere"}}


async def test_what_does_not_come_in_time_comes_over_the_fallback_and_the_next_over_the_first_again(kit, line):
    recipe = kit.recipe(weights=FALLBACK)
    buffer = kit.buffer(recipe, member_timeout_s=0.4)
    learner = kit.learner(buffer, offered("collective"))
    async with kit.collecting(recipe, buffer) as task:
        await learner.start()
        await kit.until(lambda: serving(buffer) == Weights(1, 0), task)
        assert told(buffer)["transport"] == "collective"
        learner.publish = offered("shm")
        await learner.step()
        await kit.until(lambda: told(buffer).get("transport") == "file", task)
        assert "not to be had over collective; offered are shm 1/1" in told(buffer)["error"]
        assert serving(buffer) == Weights(1, 0)
        learner.publish = offered("shm", "file")  # the learner has seen it in a beat
        await learner.announce()
        await kit.until(lambda: serving(buffer) == Weights(1, 1), task)
        await kit.until(lambda: told(buffer)["transport"] == "collective", task)
        assert told(buffer)["error"] == ""
        learner.publish = offered("collective", "file")
        await learner.step()
        await kit.until(lambda: serving(buffer) == Weights(1, 2), task)
    assert line.made == ["collective", "file"]
    assert sorted(line.closed) == ["collective", "file"]


async def test_without_a_deadline_it_would_wait_for_the_first_for_ever(kit, line):
    """Negative control of the test above."""
    recipe = kit.recipe(weights={**FALLBACK, "deadline_s": 1000.0})
    buffer = kit.buffer(recipe, member_timeout_s=0.4)
    learner = kit.learner(buffer, offered("collective"))
    async with kit.collecting(recipe, buffer) as task:
        await learner.start()
        await kit.until(lambda: serving(buffer) == Weights(1, 0), task)
        learner.publish = offered("shm", "file")
        await learner.step()
        await kit.until(lambda: told(buffer).get("phase") == "announce", task)
        await asyncio.sleep(1.0)
        assert (told(buffer)["phase"], told(buffer)["transport"]) == ("announce", "collective")
        assert serving(buffer) == Weights(1, 0)


async def test_a_receiver_that_does_not_come_back_holds_nothing_up_and_is_replaced(kit, line):
    """Nor does it hold up the end: the collector leaves while one still hangs."""
    recipe = kit.recipe(weights={"deadline_s": 0.3, "transport": "file", "url": "/nowhere"})
    buffer = kit.buffer(recipe, member_timeout_s=0.4)
    learner = kit.learner(buffer, offered("file"))
    async with kit.collecting(recipe, buffer) as task:
        await learner.start()
        await kit.until(lambda: serving(buffer) == Weights(1, 0), task)
        line.does["file"] = line.hang
        await learner.step()
        await kit.until(lambda: told(buffer).get("phase") == "stage", task)
        await kit.until(lambda: "did not come back within" in told(buffer).get("error", ""), task)
        await learner.step()  # tickets, groups and beats go on
        assert serving(buffer) == Weights(1, 0)
        del line.does["file"]
        await kit.until(lambda: serving(buffer) == Weights(1, 2), task)
        assert told(buffer)["error"] == ""
        line.does["file"] = line.hang
        await learner.step()
        await kit.until(lambda: told(buffer).get("phase") == "stage", task)
    assert len(line.made) >= 2
    assert len(buffer.model.members) == 0


async def test_versions_skip_what_is_gone_and_a_lagging_offer_is_taken_in_the_meantime(kit, line):
    recipe = kit.recipe(weights={"deadline_s": 10.0, "transport": "file", "url": "/nowhere"})
    buffer = kit.buffer(recipe, member_timeout_s=0.4)
    learner = kit.learner(buffer, offered("file"))
    tries = []

    def gone() -> None:
        tries.append(1)
        raise WeightsGone("another one by now")

    async with kit.collecting(recipe, buffer) as task:
        await learner.start()
        await kit.until(lambda: serving(buffer) == Weights(1, 0), task)
        line.does["file"] = gone
        await learner.step()
        await kit.until(lambda: len(tries) >= 2, task)
        assert (told(buffer)["error"], serving(buffer)) == ("", Weights(1, 0))
        lagging = offered("file")(Weights(1, 1))
        learner.publish = lambda weights: lagging
        del line.does["file"]
        await learner.step()
        await kit.until(lambda: serving(buffer) == Weights(1, 1), task)
        await kit.until(lambda: told(buffer)["phase"] == "announce", task)
        assert told(buffer)["weights"] == [1, 2], "what it lacks is waited for"
        learner.publish = offered("file")
        await learner.announce()
        await kit.until(lambda: serving(buffer) == Weights(1, 2), task)


@pytest.mark.parametrize(
    ("offer", "wrong"),
    [
        ({"checksum": "beef"}, "file: (1, 1) came with checksum beef, published was 0001"),
        ({"lineage": 1, "version": 1, "brings": 9}, "offered as (1, 1), the transport brought (1, 9)"),
    ],
)
async def test_what_is_not_what_was_announced_is_refused(kit, line, monkeypatch, offer, wrong):
    recipe = kit.recipe(weights={"transport": "file", "url": "/nowhere"})
    buffer = kit.buffer(recipe, member_timeout_s=0.4)
    learner = kit.learner(buffer, offered("file"))
    stage = _Receiver.stage

    def brings(self, offer, **how):
        return stage(self, {**offer, "version": offer.get("brings", offer["version"])}, **how)

    monkeypatch.setattr(_Receiver, "stage", brings)

    def published(weights: Weights) -> Mapping[str, Any]:
        document = offered("file")(weights)
        name = f"{weights.lineage}/{weights.version}"
        return {**document, "offers": [document["offers"][0] | offer], "checksums": {name: f"{weights.version:04x}"}}

    async with kit.collecting(recipe, buffer) as task:
        await learner.start()
        await kit.until(lambda: serving(buffer) == Weights(1, 0), task)
        learner.publish = published
        await learner.step()
        await kit.until(lambda: wrong in told(buffer).get("error", ""), task)
        assert serving(buffer) == Weights(1, 0)


@pytest.mark.parametrize("phase", ["stage", "activate", "verify"])
async def test_an_engine_that_is_late_is_named_with_the_phase_and_started_again(kit, monkeypatch, caplog, phase):
    monkeypatch.setattr(fleet, "FIRST_BACKOFF_S", 0.01)
    hung: list[str] = []
    real = {"stage": SimulatedEngine.stage, "activate": SimulatedEngine.activate}

    async def hangs_once(engine: SimulatedEngine) -> None:
        if engine.serving is not None and not hung:
            hung.append(engine.name)
            await asyncio.Event().wait()

    async def stage(self, staged):
        if phase == "stage":
            await hangs_once(self)
        await real["stage"](self, staged)

    async def activate(self, kv="keep", *, exchanged=None):
        if phase == "verify" and exchanged is not None:
            exchanged()
        if phase in ("activate", "verify"):
            await hangs_once(self)
        return await real["activate"](self, kv, exchanged=exchanged)

    monkeypatch.setattr(SimulatedEngine, "stage", stage)
    monkeypatch.setattr(SimulatedEngine, "activate", activate)
    recipe = kit.recipe(weights={"deadline_s": 0.5})
    buffer = kit.buffer(recipe, member_timeout_s=0.4)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer) as task:
        await learner.start()
        await learner.step()
        await kit.until(lambda: told(buffer).get("phase") == phase, task)
        assert told(buffer)["weights"] == [1, 1]
        await kit.until(lambda: f"did not {phase} (1, 1) within 0.5 s" in caplog.text, task)
        for _ in range(4):
            await learner.step()
        await kit.until(lambda: told(buffer)["error"] == "", task)
    assert hung == ["c0/0"]


# --- what an engine serves is proved before the first ticket ----------------------------------------------------------


async def test_an_engine_that_serves_since_an_earlier_membership_is_hashed_again_first(kit, monkeypatch, caplog):
    """While its process was stopped, what is under a mapping may have changed."""
    monkeypatch.setattr("asyncrl.collectors.service.REJOIN_S", 0.01)
    monkeypatch.setattr(fleet, "FIRST_BACKOFF_S", 0.01)
    honest, seen = SimulatedEngine.verify, []

    async def verify(self):
        weights, checksum = await honest(self)
        seen.append((weights, kept.model.next_ordinal))
        return weights, "ffff" if len(seen) == 1 else checksum

    monkeypatch.setattr(SimulatedEngine, "verify", verify)
    recipe = kit.recipe()
    buffer = kept = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer) as task:
        await learner.start()
        await learner.step()
        await kit.until(lambda: serving(buffer) == Weights(1, 1), task)
        assert seen == [], "a first membership has nothing to prove"
        await buffer.leave(Member("c0", "c0-1"))
        for _ in range(5):
            await learner.step()
    assert [weights for weights, _ in seen] == [Weights(1, 1)]
    assert "serves checksum ffff, 0001 was published" in caplog.text


async def test_a_restarted_engine_takes_no_ticket_before_its_weights_are_verified(kit, line, monkeypatch):
    recipe = kit.recipe(weights={"transport": "file", "url": "/nowhere"})
    buffer = kit.buffer(recipe, member_timeout_s=0.4)
    learner = kit.learner(buffer, offered("file"))

    def corrupt() -> None:
        raise WeightsError("tensor 3 differs")

    made = []
    init = SimulatedEngine.__init__
    monkeypatch.setattr(SimulatedEngine, "__init__", lambda self, *a, **k: made.append(self) or init(self, *a, **k))
    async with kit.collecting(recipe, buffer) as task:
        await learner.start()
        await learner.step()
        await kit.until(lambda: serving(buffer) == Weights(1, 1), task)
        line.does["file"] = corrupt
        await made[-1].close()  # what is asked of it from now on raises EngineError
        await kit.until(lambda: "tensor 3 differs" in told(buffer).get("error", ""), task)
        assert serving(buffer) is None
        issued = buffer.model.next_ordinal
        assert made[-1].serving is None
        await asyncio.sleep(0.2)
        assert buffer.model.next_ordinal == issued
        del line.does["file"]
        await learner.step()
        await kit.until(lambda: serving(buffer) == Weights(1, 2), task)
    assert len(made) == 2


async def test_first_weights_that_were_published_unhashed_wait_for_their_checksum(kit, line):
    """Later ones do not: the recipe says how often they are proved."""
    recipe = kit.recipe(weights={"transport": "file", "url": "/nowhere"})
    buffer = kit.buffer(recipe, member_timeout_s=0.4)

    def unhashed(weights: Weights) -> Mapping[str, Any]:
        document = offered("file")(weights)
        return {**document, "offers": [document["offers"][0] | {"checksum": ""}]}

    learner = kit.learner(buffer, unhashed)
    async with kit.collecting(recipe, buffer) as task:
        await learner.start()
        await kit.until(lambda: told(buffer).get("phase") == "announce", task)
        await asyncio.sleep(0.3)
        assert (serving(buffer), told(buffer)["error"], buffer.model.next_ordinal) == (None, "", 0)
        learner.publish = lambda weights: {**unhashed(weights), "checksums": {"1/0": "abcd"}}
        await learner.announce()
        await kit.until(lambda: serving(buffer) == Weights(1, 0), task)
        assert buffer.model.members["c0-1"].checksum == "abcd"
        learner.publish = unhashed
        await learner.step()
        await kit.until(lambda: serving(buffer) == Weights(1, 1), task)
        assert buffer.model.members["c0-1"].checksum == ""
