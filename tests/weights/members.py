"""Members of collective transfers as processes of their own, which can be told to stop or die in a phase; and a learner
that only publishes."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch

from asyncrl.staleness import Weights
from asyncrl.weights.base import Recipient
from asyncrl.weights.collective import CollectiveSender
from asyncrl.weights.image import Image, Images

BUCKET = 1 << 20
"""Bytes; small, so that little data has several."""

MEMBER = """
import json, os, signal, sys, time
import torch
torch.set_num_threads(1)
from asyncrl.weights import collective_receiver, group
from asyncrl.weights.collective_receiver import CollectiveReceiver, Hashes
from asyncrl.weights.manifest import combined_checksum
from asyncrl.weights.meeting import Visit

name, fault, bucket = sys.argv[1], sys.argv[2], int(sys.argv[3])
group.BUCKET = bucket
roster, reach = Visit.roster, Hashes.reach
strikes = 1

def strike():
    global strikes
    if strikes:
        strikes -= 1
        os.kill(os.getpid(), signal.SIGKILL if fault.startswith("kill") else signal.SIGSTOP)

def knocked(*args):
    strike()
    return roster(*args)

def receiving(self, end):
    if 2 * bucket <= end < self._manifest.size:
        strike()
    reach(self, end)

def slow(self, end):
    time.sleep(0.1)
    if end > 2 * bucket and len(sys.argv) > 4:
        open(sys.argv[4], "w").close()  # "I am in the middle of it"
    reach(self, end)

if fault.endswith("knocked"):
    Visit.roster = knocked
if fault.endswith("receiving"):
    Hashes.reach = receiving
if fault == "slow":
    Hashes.reach = slow

receiver = CollectiveReceiver("incarnation-" + name)
print("up", flush=True)
for line in sys.stdin:
    offer, deadline_s = json.loads(line)
    began = time.monotonic()
    try:
        staged = receiver.stage(offer, deadline_s=deadline_s)
        found = {"weights": list(staged.weights), "checksum": combined_checksum(staged.tensors.items())}
    except Exception as error:
        found = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps({**found, "seconds": time.monotonic() - began}), flush=True)
"""


class Member:
    """One collector's receiver in a process."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self.process = process
        self._lines: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._line(60) == "up"

    def take(self, offer: Mapping[str, Any], *, deadline_s: float) -> None:
        """Begin to stage."""
        assert self.process.stdin is not None
        print(json.dumps([offer, deadline_s]), file=self.process.stdin, flush=True)

    def outcome(self, limit_s: float = 60) -> dict[str, Any]:
        """How that ended."""
        found: dict[str, Any] = json.loads(self._line(limit_s))
        return found

    def _line(self, limit_s: float) -> str:
        try:
            return self._lines.get(timeout=limit_s).strip()
        except Empty:
            raise TimeoutError(f"{self.name} said nothing for {limit_s} s") from None

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)


class Learner:
    """A sender and what it needs. Who receives is said by the test, as the outlet says it from beats."""

    def __init__(self, images: Images, *, deadline_s: float, **options: Any) -> None:
        self.images = images
        self.deadline_s = deadline_s
        self.sender = CollectiveSender(deadline_s=deadline_s, **{"toward": "127.0.0.1", **options})
        self.serving: dict[str, Weights | None] = {}
        self.image: Image | None = None

    def publish(self, version: int, *, nbytes: int = 8 * BUCKET) -> str:
        """The checksum of a new version."""
        tensors = [(f"t{i}", torch.full((nbytes // 16,), float(version + i))) for i in range(4)]
        self.image = self.images.write(Weights(1, version), tensors, tied={})
        self.look()
        return self.image.manifest.checksum

    def look(self) -> None:
        """Say who is there."""
        assert self.image is not None
        self.sender.serve(self.image, [recipient(name, serving) for name, serving in self.serving.items()])

    def offer(self, version: int, *, after: int = 0, limit_s: float = 30) -> Mapping[str, Any]:
        """The offer of this version, of an epoch after `after`."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            offer = self.sender.offer()
            if offer is not None and offer["version"] == version and offer["epoch"] > after:
                return offer
            time.sleep(0.005)
        raise TimeoutError(f"no offer of version {version} after epoch {after}: {self.sender.offer()}")

    def late(self, limit_s: float = 30) -> dict[str, str]:
        """Who is late, in which phase, as soon as anybody is."""
        end = time.monotonic() + limit_s
        while not (late := self.sender.late()):
            if time.monotonic() >= end:
                raise TimeoutError("nobody was named")
            time.sleep(0.005)
        return {one.member: one.phase for one in late}

    def close(self) -> None:
        self.sender.close()
        self.images.close()


def recipient(name: str, serving: Weights | None = None) -> Recipient:
    return Recipient(name, f"incarnation-{name}", None, "collective", serving)


def all_take(
    learner: Learner, members: Sequence[Member], version: int, *, deadline_s: float, rounds: int = 1, after: int = 0
) -> dict[str, dict[str, Any]]:
    """What came of it for each member, from an epoch after `after` on. One that is told `WeightsGone` takes the next
    offer, in as many rounds."""
    found: dict[str, dict[str, Any]] = {}
    left, epoch = list(members), after
    for _ in range(rounds):
        offer = learner.offer(version, after=epoch)
        epoch = offer["epoch"]
        for member in left:
            member.take(offer, deadline_s=deadline_s)
        found |= {member.name: member.outcome() for member in left}
        left = [member for member in left if found[member.name].get("error") == "WeightsGone"]
        if not left:
            break
    return found


Enroll = Callable[..., Member]
