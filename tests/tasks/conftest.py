"""A working folder with a user's module in it, as the command line would find it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HEAD = "from asyncrl.tasks.base import Row\n\n"


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Writes `my_task.py` into the working folder. sys.path and the module cache are as before afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(source: str) -> Path:
        sys.modules.pop("my_task", None)
        path = tmp_path / "my_task.py"
        path.write_text(HEAD + source)
        return path

    yield write
    sys.modules.pop("my_task", None)
