"""Shared memory between real processes: another reader, a publisher that is killed, one that overwrites while read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.staleness import Weights
from asyncrl.weights import shm
from asyncrl.weights.base import WeightsError, WeightsGone
from asyncrl.weights.image import DATA_START, Images
from asyncrl.weights.segments import sweep
from asyncrl.weights.shm import ShmReceiver, shm_offer

READER = """
import json, sys
from asyncrl.weights.shm import ShmReceiver
for line in sys.stdin:
    staged = ShmReceiver().stage(json.loads(line), deadline_s=10)
    print(json.dumps([staged.checksum, {name: tensor.tolist() for name, tensor in staged.tensors.items()}]), flush=True)
"""

PUBLISHER = """
import json, sys, torch
from pathlib import Path
from asyncrl.staleness import Weights
from asyncrl.weights.image import Images
from asyncrl.weights.shm import shm_offer
images = Images("killed", folder=Path(sys.argv[1]))
offer = shm_offer(images.write(Weights(1, 4), [("a", torch.arange(8.0))], tied={}))
print(json.dumps(offer), flush=True)
sys.stdin.read()
"""

# Overwrites its two segments as fast as it can; every tensor of a version holds the version's number.
OVERWRITER = """
import itertools, json, os, sys, torch
from pathlib import Path
from asyncrl.staleness import Weights
from asyncrl.weights.image import Images
from asyncrl.weights.shm import shm_offer
torch.set_num_threads(1)
newest, draft = Path(sys.argv[2]), Path(sys.argv[2] + ".draft")
images = Images("overwriter", folder=Path(sys.argv[1]))
for version in itertools.count():
    tensors = ((f"t{i}", torch.full((4096,), version, dtype=torch.int64)) for i in range(16))
    draft.write_text(json.dumps(shm_offer(images.write(Weights(1, version), tensors, tied={}))))
    os.replace(draft, newest)
    if version == 0:
        print("ready", flush=True)
"""


@pytest.mark.parametrize("tied", [{}, {"head": "a"}], ids=["untied", "tied"])
def test_another_process_stages_what_was_published(
    tmp_path: Path, spawn: Callable[..., Any], tied: dict[str, str]
) -> None:
    images = Images("two-processes", folder=tmp_path)
    reader = spawn(READER)
    for version in range(3):
        tensors = [("a", torch.full((2, 2), float(version))), ("b", torch.tensor(version))]
        offer = shm_offer(images.write(Weights(1, version), tensors, tied=tied))
        print(json.dumps(offer), file=reader.stdin, flush=True)
        checksum, staged = json.loads(reader.stdout.readline())
        assert checksum == offer["manifest"]["checksum"]
        assert staged == {"a": [[version, version], [version, version]], "b": version}
    images.close()


def test_a_reader_that_dies_takes_no_weights_away(tmp_path: Path, spawn: Callable[..., Any]) -> None:
    images = Images("reader-dies", folder=tmp_path)
    offer = shm_offer(images.write(Weights(1, 0), [("a", torch.ones(2))], tied={}))
    reader = spawn(READER)
    print(json.dumps(offer), file=reader.stdin, flush=True)
    assert reader.stdout.readline()
    reader.stdin.close()
    assert reader.wait(timeout=20) == 0
    assert ShmReceiver().stage(offer, deadline_s=10).tensors["a"].tolist() == [1, 1]
    images.close()


@pytest.mark.faults
def test_segments_of_a_killed_publisher_are_swept_and_those_of_a_living_one_are_not(
    tmp_path: Path, spawn: Callable[..., Any]
) -> None:
    process = spawn(PUBLISHER, str(tmp_path))
    offer = json.loads(process.stdout.readline())
    assert sweep(tmp_path) == []
    process.kill()
    process.wait(timeout=20)
    # Until the next publisher starts, what the dead one published can still be staged.
    assert ShmReceiver().stage(offer, deadline_s=10).weights == Weights(1, 4)
    Images("next", folder=tmp_path).close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(WeightsGone):
        ShmReceiver().stage(offer, deadline_s=10)


def read_while_overwritten(newest: Path, *, seconds: float, enough: Callable[[dict[str, int]], bool]) -> dict[str, int]:
    """Stage the newest offer over and over: how often that was whole, gone, mixed, until `enough` or time is up."""
    counts = {"whole": 0, "gone": 0, "mixed": 0}
    receiver, end = ShmReceiver(), time.monotonic() + seconds
    while not enough(counts) and time.monotonic() < end:
        offer = json.loads(newest.read_text())
        try:
            staged = receiver.stage(offer, deadline_s=10)
        except WeightsGone:
            counts["gone"] += 1
            continue
        values = torch.cat(list(staged.tensors.values())).unique().tolist()
        counts["whole" if values == [offer["version"]] else "mixed"] += 1
    return counts


@pytest.mark.faults
def test_a_reader_of_overwritten_segments_gets_whole_versions_or_gone(
    tmp_path: Path, spawn: Callable[..., Any]
) -> None:
    newest = tmp_path / "newest.json"
    assert spawn(OVERWRITER, str(tmp_path), str(newest)).stdout.readline() == "ready\n"
    counts = read_while_overwritten(
        newest, seconds=60, enough=lambda counts: counts["gone"] >= 20 and counts["whole"] >= 20
    )
    assert counts["mixed"] == 0
    assert counts["gone"] >= 20
    assert counts["whole"] >= 20


@pytest.mark.faults
def test_without_lock_sequence_number_and_checksums_the_same_reader_gets_mixtures(
    tmp_path: Path, spawn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "read_lock", lambda _: os.open("/dev/null", os.O_RDONLY))
    monkeypatch.setattr(shm, "check_header", lambda *_: None)
    monkeypatch.setattr(shm, "compare", lambda *_, **__: None)
    newest = tmp_path / "newest.json"
    assert spawn(OVERWRITER, str(tmp_path), str(newest)).stdout.readline() == "ready\n"
    counts = read_while_overwritten(newest, seconds=60, enough=lambda counts: counts["mixed"] >= 1)
    assert counts["mixed"] >= 1


def test_a_corrupt_segment_is_refused_across_processes(tmp_path: Path, spawn: Callable[..., Any]) -> None:
    process = spawn(PUBLISHER, str(tmp_path))
    offer = json.loads(process.stdout.readline())
    with open(offer["path"], "r+b") as file:
        file.seek(DATA_START + offer["manifest"]["tensors"][0]["offset"] + 3)
        file.write(b"\x7f")
    with pytest.raises(WeightsError, match=r"1 of 1 tensors differ: a"):
        ShmReceiver().stage(offer, deadline_s=10)
