"""Checkpoints: whole or not there, the right one found, old ones removed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.learners.checkpoint import CheckpointError, find_resumable, load, prune, survey
from asyncrl.learners.model import load_model, load_tokenizer
from asyncrl.learners.randomness import restore
from asyncrl.learners.writing import save
from asyncrl.staleness import Lineages, Weights

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, model_path: Path) -> Write:
    model = load_model(model_path, "float32", "auto")
    tokenizer = load_tokenizer(model_path)

    def one(version: int, lineage: int = 1) -> Path:
        return save(
            tmp_path,
            model=model,
            tokenizer=tokenizer,
            training={"optimizer": {"step": torch.tensor(float(version))}},
            weights=Weights(lineage, version),
            forks={lineage: (0, 0)},
            trained=[(lineage, version - 1)],
            tokens=100 * version,
        )

    return one


def test_a_checkpoint_loads_in_transformers_and_gives_back_what_was_saved(write: Write, model_path: Path) -> None:
    torch.manual_seed(5)
    folder = write(7)
    expected = torch.rand(3)
    assert folder.name == "version-000007"
    original, saved = (AutoModelForCausalLM.from_pretrained(path) for path in (model_path, folder))
    for name, tensor in original.state_dict().items():
        assert torch.equal(saved.state_dict()[name], tensor), name
    assert "asyncrl" not in (folder / "config.json").read_text()
    assert AutoTokenizer.from_pretrained(folder).vocab_size == 24
    found = load(folder)
    assert found.weights == Weights(1, 7)
    assert (found.manifest.trained, found.manifest.tokens, found.manifest.forks) == ([(1, 6)], 700, {1: (0, 0)})
    state = found.training_state()
    assert float(state["optimizer"]["step"]) == 7
    torch.manual_seed(99)
    restore(state["rng"], 0, torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected)


def test_the_newest_is_found_by_lineage_and_number_not_by_name(write: Write, tmp_path: Path) -> None:
    assert find_resumable(tmp_path / "nowhere") is None
    for version in (9, 10, 100):
        write(version)
    (tmp_path / "version-abc").mkdir()
    assert find_resumable(tmp_path).weights == Weights(1, 100)  # type: ignore[union-attr]
    write(50, lineage=2)  # (2, 50) is newer than (1, 100), which a rewind left behind
    assert [c.weights for c in survey(tmp_path)[0]] == [Weights(2, 50), Weights(1, 100), Weights(1, 10), Weights(1, 9)]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing file", "no manifest", "torn manifest", "format"])
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(write: Write, tmp_path: Path, damage: str) -> None:
    write(1)
    folder = write(2)
    weights, manifest = folder / "model.safetensors", folder / "checkpoint.json"
    if damage == "truncated":
        os.truncate(weights, weights.stat().st_size - 1)
    elif damage == "flipped":
        data = bytearray(weights.read_bytes())
        data[-5] ^= 1
        weights.write_bytes(data)
    elif damage == "missing file":
        (folder / "training.pt").unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "torn manifest":
        os.truncate(manifest, 100)
    else:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    sound, damaged = survey(tmp_path)
    assert [c.weights for c in sound] == [Weights(1, 1)]
    assert len(damaged) == 1
    assert "version-000002" in damaged[0]


def test_a_version_of_a_rewound_branch_is_replaced(write: Write, tmp_path: Path) -> None:
    write(4, lineage=1)
    write(4, lineage=2)
    assert [c.weights for c in survey(tmp_path)[0]] == [Weights(2, 4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-000004"]


def test_pruning_keeps_the_newest_of_the_branch_and_never_prefers_a_dead_one(write: Write, tmp_path: Path) -> None:
    for version in (20, 40, 60):
        write(version)
    write(50, lineage=2)  # resumed from (1, 40): (1, 60) is dead
    prune(tmp_path, keep_last=2, lineages=Lineages({1: (0, 0), 2: (1, 40)}), current=2)
    assert [c.weights for c in survey(tmp_path)[0]] == [Weights(2, 50), Weights(1, 40)]


def test_what_cannot_be_removed_is_no_reason_to_stop(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for version in (1, 2):
        write(version)

    def busy(path: Path) -> None:
        raise OSError(16, "Device or resource busy", str(path))

    monkeypatch.setattr(shutil, "rmtree", busy)
    prune(tmp_path, keep_last=1, lineages=Lineages({1: (0, 0)}), current=1)
    assert "version-000001" in caplog.text


def test_a_full_or_read_only_disk_is_a_clear_error_and_leaves_the_old_ones(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(1)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"version-000002.*No space left"):
        write(2)
    assert [path.name for path in tmp_path.iterdir()] == ["version-000001"]


KILLER = """
import os, signal, sys, time, torch
from pathlib import Path
from asyncrl.learners.model import load_model, load_tokenizer
from asyncrl.learners.writing import save
from asyncrl.staleness import Weights
torch.set_num_threads(1)
model_path, folders = Path(sys.argv[1]), Path(sys.argv[2])
for attempt in range(12):
    reader, writer = os.pipe()
    child = os.fork()  # before anything loads: a fork beside the loader's threads can inherit a lock nobody frees
    if child == 0:
        model, tokenizer = load_model(model_path, "float32", "auto"), load_tokenizer(model_path)
    version = 0
    while child == 0:
        version += 1
        save(folders / str(attempt), model=model, tokenizer=tokenizer, training={"optimizer": {}},
             weights=Weights(1, version), forks={1: (0, 0)}, trained=[], tokens=0)
        os.write(writer, bytes([version]))
    os.close(writer)
    acknowledged = os.read(reader, 1)
    time.sleep(0.005 * attempt)  # where in the next save the kill lands
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reader, 4096):
        acknowledged = more
    print(acknowledged[-1], flush=True)
"""


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_writer_killed_anywhere_leaves_only_whole_checkpoints(tmp_path: Path, model_path: Path) -> None:
    killer = subprocess.run(
        [sys.executable, "-c", KILLER, str(model_path), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=250,
        check=True,
    )
    acknowledged = [int(line) for line in killer.stdout.split()]
    assert len(acknowledged) == 12
    for attempt, version in enumerate(acknowledged):
        sound, damaged = survey(tmp_path / str(attempt))
        assert damaged == []
        assert sound[0].weights.version >= version

    # Negative control: had the unfinished ones stood under their final names, they would have been found and refused.
    unfinished = list(tmp_path.glob("*/.version-*"))
    assert unfinished
    refused = 0
    for leftover in unfinished:
        try:
            load(leftover.rename(leftover.with_name("version-999999")))
        except CheckpointError:
            refused += 1
    assert refused
