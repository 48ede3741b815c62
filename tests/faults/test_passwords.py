"""A store's password is in the environment and in memory, and nowhere else."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.faults

PASSWORD = "s3cret-0f-the-store"
RUN_S = 150.0
RECIPE = """
extends: tiny-reverse
run: {{name: hidden, max_steps: 3, output_dir: out}}
buffer: {{url: "redis://:${{STORE_PASSWORD}}@127.0.0.1:{port}/0"}}
eval: {{at_start: false, at_end: false}}
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def files_with(folder: Path, text: str) -> list[str]:
    """Files in whose name or content the text is."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in found if text in path.name or text.encode() in path.read_bytes()]


def command_lines(processes: list[subprocess.Popen[str]]) -> set[str]:
    """Of these and of all that they started."""
    found = set()
    for process in processes:
        for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            try:
                found.add(" ".join(one.cmdline()))
            except psutil.NoSuchProcess:
                continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_password_is_in_no_file_of_a_run_and_in_no_list_of_processes(
    tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    port, secret = free_port(), {"STORE_PASSWORD": PASSWORD}
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(port=port))
    listening = ("--listen", f"127.0.0.1:{port}", "--password-env", "STORE_PASSWORD")
    store = spawn("store", "buffer", "serve", *listening, **secret)
    deadline = time.monotonic() + RUN_S
    while "store redis://:***@127.0.0.1" not in (tmp_path / "store.log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run = spawn("run", "run", "recipe.yaml", **secret)
    seen: set[str] = set()
    while run.poll() is None:
        assert time.monotonic() < deadline, (tmp_path / "run.log").read_text()
        seen |= command_lines([store, run])
        time.sleep(0.05)
    assert run.returncode == 0, (tmp_path / "run.log").read_text()
    assert any("collector" in line for line in seen)
    assert [line for line in seen if PASSWORD in line] == []
    assert files_with(tmp_path, PASSWORD) == []
    assert f":***@127.0.0.1:{port}" in (tmp_path / "out" / "recipe.yaml").read_text()


def test_a_password_in_a_log_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "learner.log").write_text(f"connecting to redis://:{PASSWORD}@127.0.0.1:6379/0")
    assert files_with(tmp_path, PASSWORD) == [str(tmp_path / "logs" / "learner.log")]
