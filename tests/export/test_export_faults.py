"""An export that ends in the middle, however it ends, leaves nothing at the target."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 100.0


def ended(place: Path, number: str, phase: str, *, in_place: bool = False) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-m", "tests.export.ended_child", number, phase, str(int(in_place)), "--output", "out"],
        check=False,
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.faults
@pytest.mark.parametrize("phase", ["write", "compare"])
def test_a_killed_export_leaves_nothing_at_the_target(called, make_run, phase: str) -> None:
    place = make_run().parents[1]
    assert ended(place, "SIGKILL", phase).returncode == -signal.SIGKILL
    assert not (place / "out").exists()
    assert [path.name.startswith(".out.") for path in place.glob(".*")] == [True]
    done = called("export", "--output", "out")
    assert done.returncode == 0, done.stderr
    assert (place / "out" / "export.json").is_file()


@pytest.mark.faults
def test_control_an_export_in_place_leaves_half_a_folder(make_run) -> None:
    place = make_run().parents[1]
    assert ended(place, "SIGKILL", "compare", in_place=True).returncode == -signal.SIGKILL
    assert (place / "out" / "model.safetensors").is_file()
    assert not (place / "out" / "export.json").exists()


@pytest.mark.faults
@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_removes_what_was_begun(make_run, number: str, code: int) -> None:
    place = make_run().parents[1]
    before = sorted(place.rglob("*"))
    done = ended(place, number, "compare")
    assert (done.returncode, done.stderr.strip()) == (code, "")
    assert sorted(place.rglob("*")) == before


@pytest.mark.faults
def test_a_full_disk_is_one_error_that_names_the_target(begin, make_run) -> None:
    """Files may not grow beyond 64 KiB, which the system says as it says that a disk is full."""
    place = make_run().parents[1]
    process = begin("export", "--output", "out")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, stderr
    assert stderr.startswith(f"Error: cannot export to {place / 'out'}: ")
    assert len(stderr.splitlines()) == 1
    assert not [path for path in place.iterdir() if path.name not in ("mine.yaml", "runs")]


def test_a_target_that_is_taken_meanwhile_stays_as_it_is(called, make_run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system decides, at the rename."""
    from asyncrl.runtime import export

    place = make_run().parents[1]
    write = export.write_form

    def slow(*positional, **named):
        (place / "out").mkdir()
        (place / "out" / "notes").write_text("mine")
        return write(*positional, **named)

    monkeypatch.setattr(export, "write_form", slow)
    done = called("export", "--output", "out")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert f"cannot export to {place / 'out'}" in done.stderr
    assert [path.name for path in (place / "out").iterdir()] == ["notes"]
    assert sorted(path.name for path in place.iterdir()) == ["mine.yaml", "out", "runs"]


def test_what_is_read_again_otherwise_is_no_export(called, make_run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that loses a bit between writing and reading."""
    from transformers import PreTrainedModel

    place = make_run().parents[1]
    save = PreTrainedModel.save_pretrained

    def losing(self, folder, **named):
        save(self, folder, **named)
        path = Path(folder) / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", losing)
    done = called("export", "--output", "out")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "1 of 24 tensors differ" in done.stderr
    assert not (place / "out").exists()
