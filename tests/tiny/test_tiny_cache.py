from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from asyncrl.learners import cache, tiny

SHORT = (2, 2)
NAME = cache.tiny_name(0, (2, 2))


@pytest.fixture
def cached(short_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds the model already."""
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))
    shutil.copytree(short_tiny, tmp_path / NAME)
    return tmp_path / NAME


def stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_an_intact_model_is_taken_as_it_is(cached: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = stamps(cached)
    caplog.set_level(logging.INFO)
    assert tiny.ensure_tiny(0, digits=SHORT) == cached
    assert stamps(cached) == before
    assert not caplog.records
    assert [path.name for path in cached.parent.iterdir()] == [NAME]


@pytest.mark.parametrize("harm", ["truncated", "changed", "missing", "no checksums", "checksums are no JSON"])
def test_damage_is_seen(cached: Path, harm: str) -> None:
    assert cache.damage(cached) == ""
    weights, checksums = cached / "model.safetensors", cached / cache.CHECKSUMS
    match harm:
        case "truncated":
            os.truncate(weights, weights.stat().st_size // 2)
        case "changed":
            data = bytearray(weights.read_bytes())
            data[-1] ^= 1
            weights.write_bytes(data)
        case "missing":
            (cached / "tokenizer.json").unlink()
        case "no checksums":
            checksums.unlink()
        case _:
            checksums.write_text("[1")
    assert cache.damage(cached)


def test_a_damaged_model_is_made_again_with_a_warning_and_equal_weights(
    cached: Path, short_tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = cached / "model.safetensors"
    os.truncate(weights, 1000)
    (cached.parent / f".{NAME}.building").mkdir()  # what a killed builder leaves
    threads = torch.get_num_threads()
    random_state = torch.get_rng_state()
    assert tiny.ensure_tiny(0, digits=SHORT) == cached
    assert cache.damage(cached) == ""
    assert weights.read_bytes() == (short_tiny / "model.safetensors").read_bytes()  # same seed, same machine
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.get_num_threads() == threads
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "damaged (model.safetensors does not have its checksum)" in warnings[0]
    assert {path.name for path in cached.parent.iterdir()} == {NAME, f"{NAME}.lock"}


def test_a_cache_that_cannot_be_written_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file where a folder should be: unlike a read-only folder it stops the superuser of a container as well.
    (tmp_path / "file").touch()
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(cache.BuiltinModelError, match=r"cannot be kept in .*/file/cache .*set ASYNCRL_CACHE"):
        tiny.ensure_tiny(0, digits=SHORT)


def test_what_fails_while_it_is_made_is_not_blamed_on_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))

    def build(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("this file has no tokenizer")  # as transformers does

    with pytest.raises(OSError, match="this file has no tokenizer"):
        cache.ensure("other", build)
    assert cache.damage(tmp_path / "other")
    assert cache.ensure("other", lambda folder: (folder / "whole").touch()) == tmp_path / "other"
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == [cache.CHECKSUMS, "whole"]


def test_a_builder_that_hangs_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "LOCK_LIMIT_S", 0.2)
    caplog.set_level(logging.INFO)
    with FileLock(tmp_path / f"{NAME}.lock"), pytest.raises(cache.BuiltinModelError, match="another process has held"):
        tiny.ensure_tiny(0, digits=SHORT)
    assert "another process makes the built-in model" in caplog.text


def test_the_next_sub_seed_is_tried_and_a_hopeless_task_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tiny, "CLEAN", tiny.SftConfig(max_steps=10, learning_rate=6e-3))
    monkeypatch.setattr(tiny, "MAX_ATTEMPTS", 2)
    with pytest.raises(cache.BuiltinModelError, match=r"no warm start of 2 for seed 0 .*clean_steps=0"):
        tiny.build_tiny(tmp_path, seed=0, digits=SHORT)
    assert caplog.text.count("trying the next sub-seed") == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_of_two_processes_one_builds_and_a_killed_builder_is_followed(tmp_path: Path) -> None:
    code = (
        "import logging; logging.basicConfig(level='INFO', format='%(message)s')\n"
        "from asyncrl.learners.tiny import ensure_tiny\n"
        "ensure_tiny(0, digits=(2, 2))"
    )
    environment = {**os.environ, "ASYNCRL_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)

    def said(process: subprocess.Popen[str]) -> str:
        return process.communicate(timeout=200)[1]

    killed = start()
    assert killed.stderr is not None
    for line in killed.stderr:
        if "making the built-in model" in line:
            break
    killed.kill()
    killed.communicate(timeout=10)
    assert cache.damage(tmp_path / NAME)

    both = [start(), start()]
    outputs = [said(process) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sum("making the built-in model" in output for output in outputs) == 1
    assert cache.damage(tmp_path / NAME) == ""
