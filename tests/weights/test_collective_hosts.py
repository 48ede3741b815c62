"""Two hosts, as network namespaces with a link between them, that is cut while weights are broadcast. Needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.staleness import Weights
from asyncrl.weights import group
from asyncrl.weights.image import Images
from tests.weights.members import BUCKET, MEMBER, Learner, Member, all_take

pytestmark = pytest.mark.faults

DEADLINE_S = 24.0
"""Half of it is the broadcast's limit: 40 buckets at the slow member's 0.1 s fit three times."""

HOST = f"asyncrl-{os.getpid()}"
LINK = f"arl{os.getpid()}"  # 15 characters at most


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=20)


@pytest.fixture
def other_host() -> Iterator[tuple[str, ...]]:
    """What a command begins with to run there. The link to it is the interface LINK here."""
    ip("netns", "add", HOST)
    try:
        ip("link", "add", LINK, "type", "veth", "peer", "name", "learner", "netns", HOST)
        ip("address", "add", "10.231.77.1/30", "dev", LINK)
        ip("link", "set", LINK, "up")
        ip("-n", HOST, "address", "add", "10.231.77.2/30", "dev", "learner")
        ip("-n", HOST, "link", "set", "learner", "up")
        yield ("ip", "netns", "exec", HOST)
    finally:
        ip("netns", "delete", HOST)  # and the link with it


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "BUCKET", BUCKET)


def test_a_cut_link_is_named_within_the_deadline_and_both_sides_go_on(
    tmp_path: Path,
    spawn: Callable[..., Any],
    other_host: tuple[str, ...],
    eventually: Callable[[float, Callable[[], object]], bool],
) -> None:
    middle = tmp_path / "middle"
    learner = Learner(Images("hosts", folder=tmp_path), deadline_s=DEADLINE_S, interface=LINK)
    near = Member("near", spawn(MEMBER, "near", "none", str(BUCKET)))
    far = Member("far", spawn(MEMBER, "far", "slow", str(BUCKET), str(middle), before=other_host))
    learner.serving = {"near": None, "far": None}

    # With the link, everything arrives on both hosts.
    checksum = learner.publish(0, nbytes=4 * BUCKET)
    found = all_take(learner, [near, far], 0, deadline_s=DEADLINE_S)
    assert {name: one.get("checksum") for name, one in found.items()} == {"near": checksum, "far": checksum}

    # It is cut in the middle of the next version.
    middle.unlink()
    learner.serving = {"near": Weights(1, 0), "far": Weights(1, 0)}
    checksum = learner.publish(1, nbytes=40 * BUCKET)
    offer = learner.offer(1)
    near.take(offer, deadline_s=DEADLINE_S)
    far.take(offer, deadline_s=DEADLINE_S)
    assert eventually(DEADLINE_S, middle.exists)
    ip("link", "set", LINK, "down")
    assert learner.late(DEADLINE_S) == {"far": "stage"}
    called_off = near.outcome()
    assert called_off["error"] == "WeightsGone"
    assert called_off["seconds"] < DEADLINE_S
    again = all_take(learner, [near], 1, deadline_s=DEADLINE_S, after=offer["epoch"])
    assert again["near"]["checksum"] == checksum
    cut = far.outcome()
    assert cut["error"] == "WeightsLate"
    assert "learner on 10.231.77.1" in cut["message"]

    # Once the link is back, the far host gets what there is by then.
    ip("link", "set", LINK, "up")
    learner.serving = {"near": Weights(1, 1), "far": Weights(1, 0)}
    learner.look()
    assert all_take(learner, [far], 1, deadline_s=DEADLINE_S, rounds=3)["far"]["checksum"] == checksum
    learner.close()
