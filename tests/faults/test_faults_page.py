"""Every test that docs/faults.md names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "faults.md"
NAMED = re.compile(r"`([a-z_/]+\.py)::(test_\w+)`")


def test_every_test_that_the_page_names_exists() -> None:
    named = NAMED.findall(PAGE.read_text(encoding="utf-8"))
    assert len(named) > 20
    for file, test in named:
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert test in functions, f"{file}::{test}"


def test_every_row_of_its_tables_names_one() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert [row for row in rows if not NAMED.search(row) and not row.startswith("| fault |")] == []
