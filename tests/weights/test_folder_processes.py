"""Folders of weights between real processes: writers that are killed or frozen, readers that are slow."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.staleness import Weights
from asyncrl.weights import file
from asyncrl.weights.base import WeightsError, WeightsGone
from asyncrl.weights.delta import DeltaReceiver, DeltaSender
from asyncrl.weights.file import FileReceiver, FileSender
from asyncrl.weights.folder_sender import FolderSender
from tests.weights.folders import Learner

ELEMENTS = 1_000_000

# Publishes as fast as it can; every tensor of a version holds the version's number, so that a mixture shows.
WRITER = f"""
import itertools, json, os, sys, torch
from pathlib import Path
from asyncrl.staleness import Weights
from asyncrl.weights.build import sender
from asyncrl.config.weights import WeightsConfig
from tests.weights.folders import Learner, recipient
torch.set_num_threads(1)
transport, folder, lineage = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
config = WeightsConfig(transport=transport, url=str(folder / "url"), anchor_every=3)
learner = Learner(folder, sender(transport, config, run="r", changed=lambda: None))
whole = torch.zeros({ELEMENTS}, dtype=torch.int16)
for version in itertools.count():
    tensors = [("whole", whole.fill_(version) if transport == "file" else whole)]
    tensors += [(f"t{{i}}", torch.full((4096,), version, dtype=torch.int64)) for i in range(8)]
    offer = learner.publish(Weights(lineage, version), tensors, recipients=[recipient()])
    (folder / "draft").write_text(json.dumps(offer))
    os.replace(folder / "draft", folder / "newest.json")
    if version == 2:
        print("ready", flush=True)
"""

READER = """
import json, sys, torch
from asyncrl.weights.build import receiver
torch.set_num_threads(1)
for line in sys.stdin:
    offer = json.loads(line)
    staged = receiver(offer).stage(offer, deadline_s=30)
    print(json.dumps([staged.checksum, staged.tensors["a"].tolist()]), flush=True)
"""

TRANSPORTS = pytest.mark.parametrize("transport", ["file", "delta"])


def sender_for(transport: str, url: Path) -> FolderSender:
    if transport == "file":
        return FileSender("r", str(url), deadline_s=30, changed=lambda: None)
    return DeltaSender("r", str(url), deadline_s=30, anchor_every=3, changed=lambda: None)


def newest(folder: Path) -> dict[str, Any]:
    offer: dict[str, Any] = json.loads((folder / "newest.json").read_text())
    return offer


def versions_in(staged: Any) -> list[int]:
    return torch.cat([tensor for name, tensor in staged.tensors.items() if name != "whole"]).unique().tolist()


@TRANSPORTS
def test_another_process_stages_what_was_published(tmp_path: Path, spawn: Callable[..., Any], transport: str) -> None:
    learner = Learner(tmp_path, sender_for(transport, tmp_path / "url"))
    reader = spawn(READER)
    try:
        for version in range(5):
            offer = learner.publish(Weights(1, version), [("a", torch.tensor([version, 1, 2, 3, 4, 5, 6, 7]))])
            print(json.dumps(offer), file=reader.stdin, flush=True)
            assert json.loads(reader.stdout.readline()) == [offer["checksum"], [version, 1, 2, 3, 4, 5, 6, 7]]
    finally:
        learner.close()


@pytest.mark.faults
@TRANSPORTS
def test_a_writer_killed_while_it_writes_leaves_whole_versions_only(
    tmp_path: Path, spawn: Callable[..., Any], eventually: Callable[..., bool], transport: str
) -> None:
    root = tmp_path / "url" / "r"
    for lineage in range(1, 21):
        writer = spawn(WRITER, transport, str(tmp_path), str(lineage))
        assert writer.stdout.readline() == "ready\n"
        assert eventually(60, lambda: list(root.glob("writing-*/*")))
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=20)
        if half_written := list(root.glob("writing-*/*")):
            break  # else it was done with that one just before the signal came: once more
    assert half_written
    offer = newest(tmp_path)
    staged = (FileReceiver() if transport == "file" else DeltaReceiver()).stage(offer, deadline_s=30)
    assert versions_in(staged) == [offer["version"]]
    for folder in root.glob("*-*/"):
        assert folder.name.startswith("writing-") or (folder / "manifest.json").exists()

    learner = Learner(tmp_path, sender_for(transport, tmp_path / "url"))
    learner.publish(Weights(lineage + 1, 0), [("a", torch.ones(4))])
    assert eventually(20, lambda: sorted(path.name for path in root.iterdir()) == [f"{lineage + 1}-0", "LATEST"])
    learner.close()


def read_while_written(
    folder: Path, receiver: Any, *, seconds: float, enough: Callable[[dict[str, int]], bool]
) -> dict[str, int]:
    """Stage the newest offer over and over: how often that was whole, gone, mixed, until `enough` or time is up."""
    counts, end = {"whole": 0, "gone": 0, "mixed": 0}, time.monotonic() + seconds
    while not enough(counts) and time.monotonic() < end:
        offer = newest(folder)
        try:
            staged = receiver.stage(offer, deadline_s=30)
        except WeightsGone:
            counts["gone"] += 1
            continue
        counts["whole" if versions_in(staged) == [offer["version"]] else "mixed"] += 1
    return counts


@pytest.mark.faults
@TRANSPORTS
def test_a_reader_beside_a_writer_that_does_not_wait_gets_whole_versions_or_gone(
    tmp_path: Path, spawn: Callable[..., Any], transport: str
) -> None:
    assert spawn(WRITER, transport, str(tmp_path), "1").stdout.readline() == "ready\n"
    receiver = FileReceiver() if transport == "file" else DeltaReceiver()
    counts = read_while_written(tmp_path, receiver, seconds=60, enough=lambda counts: counts["whole"] >= 30)
    assert counts["mixed"] == 0
    assert counts["whole"] >= 30


@pytest.mark.faults
def test_a_slow_reader_finds_its_version_gone_and_takes_the_next(
    tmp_path: Path, spawn: Callable[..., Any], eventually: Callable[..., bool]
) -> None:
    assert spawn(WRITER, "file", str(tmp_path), "1").stdout.readline() == "ready\n"
    offer = newest(tmp_path)
    assert eventually(60, lambda: newest(tmp_path)["version"] >= offer["version"] + 5)
    with pytest.raises(WeightsGone, match="has been removed"):
        FileReceiver().stage(offer, deadline_s=30)
    counts = read_while_written(tmp_path, FileReceiver(), seconds=60, enough=lambda counts: counts["whole"] >= 1)
    assert counts["whole"] >= 1


@pytest.mark.faults
@TRANSPORTS
def test_of_a_frozen_writer_the_newest_version_can_be_staged(
    tmp_path: Path, spawn: Callable[..., Any], transport: str
) -> None:
    writer = spawn(WRITER, transport, str(tmp_path), "1")
    assert writer.stdout.readline() == "ready\n"
    os.kill(writer.pid, signal.SIGSTOP)
    try:
        offer = newest(tmp_path)
        receiver = FileReceiver() if transport == "file" else DeltaReceiver()
        assert versions_in(receiver.stage(offer, deadline_s=30)) == [offer["version"]]
    finally:
        os.kill(writer.pid, signal.SIGCONT)


@pytest.mark.faults
def test_corrupt_bytes_are_refused_across_processes_and_served_without_verification(
    tmp_path: Path, spawn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = spawn(WRITER, "file", str(tmp_path), "1")
    assert writer.stdout.readline() == "ready\n"
    writer.kill()
    writer.wait(timeout=20)
    offer = newest(tmp_path)
    path = tmp_path / "url" / "r" / f"1-{offer['version']}" / "model.safetensors"
    with open(path, "r+b") as opened:
        opened.seek(-3, 2)
        opened.write(b"\x7f")
    with pytest.raises(WeightsError, match=r"model\.safetensors: 1 of 9 tensors differ: whole \(expected xxh3"):
        FileReceiver().stage(offer, deadline_s=30)
    monkeypatch.setattr(file, "compare", lambda *_, **__: None)
    assert FileReceiver().stage(offer, deadline_s=30).tensors["whole"].unique().numel() == 2
