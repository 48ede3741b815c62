"""Members and learners of collective transfers that die or freeze in each phase: who is named, and who goes on."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.staleness import Weights
from asyncrl.weights import collective, group
from asyncrl.weights.image import Images
from tests.weights.members import BUCKET, MEMBER, Learner, Member, all_take

pytestmark = pytest.mark.faults

DEADLINE_S = 12.0
"""Of each phase. Long enough that a machine that is busy with other tests is not taken for a member that froze."""

Enroll = Callable[..., Member]


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "BUCKET", BUCKET)


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Learner]:
    learner = Learner(Images("faults", folder=tmp_path), deadline_s=DEADLINE_S)
    yield learner
    learner.close()


@pytest.fixture
def enroll(spawn: Callable[..., Any]) -> Enroll:
    """Start a member with a fault in it."""

    def enroll(name: str, fault: str = "none") -> Member:
        return Member(name, spawn(MEMBER, name, fault, str(BUCKET)))

    return enroll


def outcomes_within_a_round(learner: Learner, version: int, healthy: list[Member], *faulty: Member) -> set[str]:
    """Offer the version to all, and to those who were called off once more. Returns the checksums that the healthy
    ones have in the end."""
    offer = learner.offer(version)
    for member in [*healthy, *faulty]:
        member.take(offer, deadline_s=DEADLINE_S)
    found = [member.outcome() for member in healthy]
    assert all(one["seconds"] < DEADLINE_S for one in found)
    again = [member for member, one in zip(healthy, found, strict=True) if one.get("error") == "WeightsGone"]
    if again:
        offer = learner.offer(version, after=offer["epoch"])
        for member in again:
            member.take(offer, deadline_s=DEADLINE_S)
        found += [member.outcome() for member in again]
    assert [one for one in found if one.get("error") not in (None, "WeightsGone")] == []
    return {one["checksum"] for one in found if "checksum" in one}


@pytest.mark.parametrize("phase", ["absent", "knocked", "receiving"])
@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_a_member_that_stops_or_dies_is_named_and_the_others_go_on(
    learner: Learner, enroll: Enroll, fault: str, phase: str
) -> None:
    healthy = [enroll("a"), enroll("z")]
    faulty = enroll("m", "none" if phase == "absent" else f"{fault}-{phase}")
    learner.serving = {"a": None, "m": None, "z": None}
    checksum = learner.publish(0)
    if phase == "absent":
        faulty.process.send_signal(signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
    assert outcomes_within_a_round(learner, 0, healthy, *([] if phase == "absent" else [faulty])) == {checksum}
    assert learner.late() == {"m": "announce" if phase == "absent" else "stage"}

    # The next version finds it excused: nobody waits for it any more.
    learner.serving = {"a": Weights(1, 0), "m": None, "z": Weights(1, 0)}
    checksum = learner.publish(1)
    began = time.monotonic()
    assert outcomes_within_a_round(learner, 1, healthy) == {checksum}
    assert time.monotonic() - began < DEADLINE_S
    if fault == "stop":
        # Back again, it is told that its epoch is over, and gets the newest weights in the next.
        faulty.process.send_signal(signal.SIGCONT)
        if phase != "absent":
            assert "error" in faulty.outcome()
        learner.serving = {"a": Weights(1, 1), "m": None, "z": Weights(1, 1)}
        learner.look()
        assert all_take(learner, [faulty], 1, deadline_s=DEADLINE_S, rounds=3)["m"]["checksum"] == checksum


@pytest.mark.timeout(60)
def test_without_limits_a_stopped_member_would_hang_the_others(
    tmp_path: Path, enroll: Enroll, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "TRANSFER", 1e4)
    learner = Learner(Images("faults", folder=tmp_path), deadline_s=DEADLINE_S)
    healthy, faulty = enroll("a"), enroll("m", "stop-receiving")
    learner.serving = {"a": None, "m": None}
    learner.publish(0)
    offer = learner.offer(0)
    healthy.take(offer, deadline_s=1e4)
    faulty.take(offer, deadline_s=1e4)
    with pytest.raises(TimeoutError, match="a said nothing"):
        healthy.outcome(2 * DEADLINE_S)
    assert learner.sender.late() == []
    learner.close()


def test_a_slow_member_is_waited_for_while_the_deadline_allows(learner: Learner, enroll: Enroll) -> None:
    members = [enroll("fast"), enroll("slow", "slow")]
    learner.serving = {"fast": None, "slow": None}
    checksum = learner.publish(0)
    found = all_take(learner, members, 0, deadline_s=DEADLINE_S)
    assert {one["checksum"] for one in found.values()} == {checksum}
    assert learner.sender.late() == []


# A learner that publishes one version to two members, and stops or dies in a phase.
LEARNER = """
import json, os, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from asyncrl.weights import group
from asyncrl.weights.collective import CollectiveSender
from asyncrl.weights.image import Images
from tests.weights.members import Learner
fault, phase, bucket = sys.argv[2], sys.argv[3], int(sys.argv[4])
group.BUCKET = bucket

def strike(*_):
    os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

if phase == "meeting":
    CollectiveSender._roster = strike
if phase == "sending":
    start, count = group._Works.start, []
    def counted(self, tensor):
        count.append(tensor)
        if len(count) == 4:
            strike()
        start(self, tensor)
    group._Works.start = counted
learner = Learner(Images("faults", folder=Path(sys.argv[1])), deadline_s=60)
learner.serving = {"a": None, "z": None}
learner.publish(0, nbytes=8 * bucket)
print(json.dumps(learner.offer(0)), flush=True)
if phase == "offered":
    strike()
sys.stdin.read()
"""


@pytest.mark.parametrize("phase", ["offered", "meeting", "sending"])
@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_a_learner_that_stops_or_dies_keeps_no_member_beyond_its_deadline(
    tmp_path: Path, spawn: Callable[..., Any], enroll: Enroll, fault: str, phase: str
) -> None:
    members = [enroll("a"), enroll("z")]
    learner = spawn(LEARNER, str(tmp_path), fault, phase, str(BUCKET))
    offer = json.loads(learner.stdout.readline())
    if phase == "offered" and fault == "stop":
        wait_until_stopped(learner.pid)
    if phase == "offered" and fault == "kill":
        learner.wait(timeout=30)  # until all its threads are gone, and with them what listened
    for member in members:
        member.take(offer, deadline_s=4)
    for member in members:
        found = member.outcome()
        # A frozen learner's kernel still takes connections: that it is late is all there is to be seen.
        assert found["error"] == ("WeightsLate" if fault == "stop" else "WeightsError")
        assert "the learner" in found["message"].lower()
        assert "127.0.0.1" in found["message"]
        assert found["seconds"] < 30


def wait_until_stopped(pid: int) -> None:
    end = time.monotonic() + 30
    while ") T" not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_members_go_on_with_the_learner_that_comes_after_a_killed_one(
    tmp_path: Path, spawn: Callable[..., Any], enroll: Enroll, learner: Learner
) -> None:
    members = [enroll("a"), enroll("z")]
    first = spawn(LEARNER, str(tmp_path), "kill", "sending", str(BUCKET))
    offer = json.loads(first.stdout.readline())
    for member in members:
        member.take(offer, deadline_s=DEADLINE_S)
    assert {member.outcome()["error"] for member in members} == {"WeightsError"}
    learner.serving = {"a": None, "z": None}
    checksum = learner.publish(1)
    found = all_take(learner, members, 1, deadline_s=DEADLINE_S)
    assert {one.get("checksum") for one in found.values()} == {checksum}
