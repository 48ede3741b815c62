"""Shared memory between processes that are killed or stopped in each phase, and on a host whose memory is full."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights, WeightsError, WeightsGone
from asyncrl.weights.image import Images
from asyncrl.weights.manifest import combined_checksum
from asyncrl.weights.shm import ShmReceiver, shm_offer

pytestmark = pytest.mark.faults

LIMIT_S = 60.0

# Publishes version 0, says so, and then stops for good in the middle of the next version whose number is asked for.
WRITER = """
import json, sys, torch
from pathlib import Path
from asyncrl.staleness import Weights
from asyncrl.weights.image import Images
from asyncrl.weights.shm import shm_offer
images = Images("writer", folder=Path(sys.argv[1]))
def source(version, stop=False):
    yield "a", torch.full((50_000,), float(version))
    if stop:
        print(json.dumps(offers), flush=True)
        sys.stdin.read()
    yield "b", torch.full((50_000,), float(version))
offers = [shm_offer(images.write(Weights(1, version), source(version), tied={})) for version in range(2)]
images.write(Weights(1, 2), source(2, stop=True), tied={})
"""

# Stages what it is told to, holds it, and says at every further line what it holds then.
SERVER = """
import json, sys
from asyncrl.weights.manifest import combined_checksum
from asyncrl.weights.shm import ShmReceiver
receiver = ShmReceiver(mapped=True)
staged = receiver.stage(json.loads(sys.stdin.readline()), deadline_s=30)
print(staged.checksum, flush=True)
for _ in sys.stdin:
    print(combined_checksum(staged.tensors.items()), flush=True)
"""

# Says when it has read the first tensor, and goes on when it is told to.
SLOW_READER = """
import json, sys
from asyncrl.weights import shm
take, seen = shm._take, []
def slowly(*arguments):
    if seen:
        print("reading", flush=True)
        sys.stdin.readline()
    seen.append(1)
    return take(*arguments)
shm._take = slowly
staged = shm.ShmReceiver(mapped=sys.argv[1] == "mapped").stage(json.loads(sys.stdin.readline()), deadline_s=60)
print(staged.checksum, flush=True)
"""

# Fills its shared memory, in whatever way this machine allows it to be small.
FULL = """
import ctypes, json, os, resource, sys, torch
from pathlib import Path
from asyncrl.staleness import Weights
from asyncrl.weights.base import WeightsError
from asyncrl.weights.image import Images
from asyncrl.weights.shm import ShmReceiver, shm_offer
folder, libc = Path(sys.argv[1]), ctypes.CDLL(None)
CLONE_NEWNS, MS_REC_PRIVATE = 0x20000, 1 << 18 | 1 << 14
small = (
    hasattr(libc, "unshare")
    and libc.unshare(CLONE_NEWNS) == 0
    and libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None) == 0
    and libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=2m") == 0
)
if not small:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
images, receiver = Images("full", folder=folder), ShmReceiver()
def publish(version, size):
    tensors = [(f"t{i}", torch.full((size // 4,), float(version))) for i in range(4)]
    return shm_offer(images.write(Weights(1, version), tensors, tied={}))
kept = [publish(version, 100_000) for version in range(2)][1]
errors = []
for size in (3_000_000, 3_000_000):
    try:
        publish(2, size)
    except WeightsError as error:
        errors.append(str(error))
found = receiver.stage(kept, deadline_s=30).tensors["t3"][-1].item()
after = receiver.stage(publish(3, 100_000), deadline_s=30).tensors["t3"][-1].item()
print(json.dumps({"errors": errors, "found": found, "after": after, "segments": len(images.segments)}), flush=True)
"""


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Images]:
    images = Images("faults", folder=tmp_path)
    yield images
    images.close()


def publish(images: Images, version: int) -> dict[str, Any]:
    tensors = [(name, torch.full((1000,), float(version))) for name in "ab"]
    return shm_offer(images.write(Weights(1, version), tensors, tied={}))


def stage(offer: dict[str, Any], **how: bool) -> StagedWeights:
    return ShmReceiver(**how).stage(offer, deadline_s=30)


def files(folder: Path) -> int:
    """Segments in the folder; each has a companion."""
    names = [path.name for path in folder.iterdir()]
    assert sum(name.endswith(".readers") for name in names) * 2 == len(names)
    return len(names) // 2


def test_full_shared_memory_is_an_error_that_says_what_to_do_and_no_bus_error(
    tmp_path: Path, spawn: Callable[..., Any]
) -> None:
    process = spawn(FULL, str(tmp_path))
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    result = json.loads(said)
    assert len(result["errors"]) == 2
    assert all("do not fit in" in error and "--shm-size" in error for error in result["errors"])
    assert (result["found"], result["after"], result["segments"]) == (1.0, 3.0, 2)


def test_a_learner_that_is_killed_while_it_writes_leaves_the_last_whole_version_and_nothing_torn(
    tmp_path: Path, spawn: Callable[..., Any]
) -> None:
    writer = spawn(WRITER, str(tmp_path))
    older, newest = json.loads(writer.stdout.readline())
    for _ in range(2):  # while it writes, and after
        with pytest.raises(WeightsGone):
            stage(older)
        assert stage(newest).tensors["b"].tolist() == [1.0] * 50_000
        writer.kill()
        writer.wait(LIMIT_S)
    Images("next", folder=tmp_path).close()
    assert files(tmp_path) == 0


def test_what_a_killed_learner_wrote_last_is_served_after_its_memory_was_swept(
    tmp_path: Path, spawn: Callable[..., Any]
) -> None:
    writer = spawn(WRITER, str(tmp_path))
    staged = stage(json.loads(writer.stdout.readline())[1], mapped=True)
    writer.kill()
    writer.wait(LIMIT_S)
    images = Images("next", folder=tmp_path)
    assert files(tmp_path) == 0
    for version in range(3):
        publish(images, version)
    assert combined_checksum(staged.tensors.items()) == staged.checksum
    images.close()


def test_a_stopped_collector_keeps_the_version_that_it_serves(
    images: Images, tmp_path: Path, spawn: Callable[..., Any]
) -> None:
    server = spawn(SERVER)
    offer = publish(images, 0)
    print(json.dumps(offer), file=server.stdin, flush=True)
    checksum = server.stdout.readline()
    assert checksum.strip() == offer["manifest"]["checksum"]
    server.send_signal(signal.SIGSTOP)
    for version in range(1, 8):
        publish(images, version)
    assert files(tmp_path) == 3
    server.send_signal(signal.SIGCONT)
    print(file=server.stdin, flush=True)
    assert server.stdout.readline() == checksum


def test_a_collector_that_is_killed_gives_back_the_version_that_it_served(
    images: Images, tmp_path: Path, spawn: Callable[..., Any]
) -> None:
    server = spawn(SERVER)
    print(json.dumps(publish(images, 0)), file=server.stdin, flush=True)
    server.stdout.readline()
    for version in range(1, 4):
        publish(images, version)
    assert files(tmp_path) == 3
    server.kill()
    server.wait(LIMIT_S)
    publish(images, 4)
    assert files(tmp_path) == 2


@pytest.mark.parametrize("how", ["mapped", "copied"])
def test_a_collector_that_is_stopped_while_it_reads_ends_with_the_version_it_began(
    images: Images, tmp_path: Path, spawn: Callable[..., Any], how: str
) -> None:
    reader = spawn(SLOW_READER, how)
    offer = publish(images, 0)
    print(json.dumps(offer), file=reader.stdin, flush=True)
    assert reader.stdout.readline() == "reading\n"
    reader.send_signal(signal.SIGSTOP)
    for version in range(1, 5):
        publish(images, version)
    assert files(tmp_path) == 3
    reader.send_signal(signal.SIGCONT)
    print(file=reader.stdin, flush=True)
    assert reader.stdout.readline().strip() == offer["manifest"]["checksum"]


@pytest.mark.parametrize("how", ["mapped", "copied"])
def test_a_collector_that_is_killed_while_it_reads_holds_nothing(
    images: Images, tmp_path: Path, spawn: Callable[..., Any], how: str
) -> None:
    reader = spawn(SLOW_READER, how)
    print(json.dumps(publish(images, 0)), file=reader.stdin, flush=True)
    assert reader.stdout.readline() == "reading\n"
    reader.kill()
    reader.wait(LIMIT_S)
    for version in range(1, 4):
        publish(images, version)
    assert files(tmp_path) == 2


def test_without_the_readers_lock_what_is_served_would_change(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.weights.shm.read_lock", lambda _: os.open("/dev/null", os.O_RDONLY))
    staged = stage(publish(images, 0), mapped=True)
    for version in range(1, 4):
        publish(images, version)
    assert combined_checksum(staged.tensors.items()) != staged.checksum


def test_two_learners_on_one_host_leave_each_other_alone(
    images: Images, tmp_path: Path, spawn: Callable[..., Any]
) -> None:
    mine = publish(images, 0)
    writer = spawn(WRITER, str(tmp_path))
    other = json.loads(writer.stdout.readline())[1]
    second = Images("faults", folder=tmp_path)  # of the same run, by mistake
    for version in range(5, 9):
        publish(second, version)
    assert stage(mine).tensors["a"].tolist() == [0.0] * 1000
    assert stage(other).tensors["a"].tolist() == [1.0] * 50_000
    with pytest.raises(WeightsError, match="another version"):
        stage({**mine, "path": other["path"]})
    second.close()
    assert stage(mine).tensors["a"].tolist() == [0.0] * 1000
    assert stage(other).tensors["a"].tolist() == [1.0] * 50_000
