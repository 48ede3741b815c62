"""A store's password is in the environment and in memory, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

PASSWORD = "s3cret-0f-the-store"
RUN_S = 150.0
RECIPE = """
run: {{name: hidden, max_steps: 3}}
buffer: {{url: "redis://:${{STORE_PASSWORD}}@127.0.0.1:{port}/0"}}
eval: {{at_start: false, at_end: false}}
"""


def found_in(folder: Path, text: str) -> list[str]:
    """Files whose name or content has the text."""
    return [
        str(path)
        for path in folder.rglob("*")
        if text in path.name or (path.is_file() and text.encode() in path.read_bytes())
    ]


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_password_is_in_no_file_of_a_run_and_in_no_process_list(tmp_path: Path, free_port: int) -> None:
    (tmp_path / "recipe.yaml").write_text("extends: tiny-reverse\n" + RECIPE.format(port=free_port))
    environment = {**os.environ, "STORE_PASSWORD": PASSWORD}

    def start(*arguments: str) -> subprocess.Popen[str]:
        with (tmp_path / f"{arguments[0]}.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "asyncrl.cli.main", *arguments],
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                text=True,
                start_new_session=True,
            )

    store = start("buffer", "serve", "--listen", f"127.0.0.1:{free_port}", "--password-env", "STORE_PASSWORD")
    run = None
    try:
        deadline = time.monotonic() + RUN_S
        while not (tmp_path / "buffer.log").read_text().startswith("store "):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        run = start("run", "recipe.yaml")
        seen: set[str] = set()
        while run.poll() is None:
            assert time.monotonic() < deadline, (tmp_path / "run.log").read_text()
            for process in (psutil.Process(store.pid), psutil.Process(run.pid)):
                for child in [process, *process.children(recursive=True)]:
                    try:
                        seen.add(" ".join(child.cmdline()))
                    except psutil.Error:
                        continue
            time.sleep(0.05)
        assert run.returncode == 0, (tmp_path / "run.log").read_text()
        assert any("collector" in line for line in seen)
        assert [line for line in seen if PASSWORD in line] == []
        assert found_in(tmp_path, PASSWORD) == []
        assert "***@127.0.0.1" in (next((tmp_path / "runs").iterdir()) / "recipe.yaml").read_text()
    finally:
        for process in filter(None, (run, store)):
            for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
                child.kill()
            process.kill()
            process.wait(timeout=20)


def test_a_password_in_a_file_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "learner.log").write_text(f"connecting to redis://:{PASSWORD}@127.0.0.1:6379/0")
    assert found_in(tmp_path, PASSWORD) == [str(tmp_path / "logs" / "learner.log")]
