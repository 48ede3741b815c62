"""The `asyncrl` command called as its console script calls it, in the tests' own process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from asyncrl.cli.main import main


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run `asyncrl ARGUMENTS` in the test's folder, in this process: importing torch again would take most of the
    time."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["asyncrl", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capfd.readouterr()
        assert isinstance(end.value.code, int)
        return Ended(end.value.code, out, err)

    return run
