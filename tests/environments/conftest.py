"""Modules of a user's, written into a folder that episodes' processes import from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Write NAME.py; its name. Forgotten by this process after the test."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    written: list[str] = []

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)
