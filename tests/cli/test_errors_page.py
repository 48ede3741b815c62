"""`docs/errors.md` shows what is really said."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.transcripts import run_again

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
BLANK = re.compile(r"<[^>]+>")


def test_every_command_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run_again(PAGE, tmp_path).splitlines() == PAGE.splitlines(), "run `make docs`"


def texts() -> Iterator[str]:
    """Every string in the code, with {} for what is filled in."""
    for folder in ("asyncrl", "buffers", "collectors", "learners"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_messages_that_take_longer_to_cause_are_in_the_code() -> None:
    blocks = re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
    lines = {BLANK.sub("{}", line) for line in [*rows, *"".join(blocks).splitlines()]}
    assert len(lines) > 8
    said = "\n".join(texts()).replace("{}{}", "{}")
    assert {line for line in lines if line not in said} == set()
