"""Every test that the pages on faults name is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "faults.md"
ENVIRONMENTS = TESTS.parent / "docs" / "environments.md"
NAMED = re.compile(r"`([a-z_/]+\.py)::(test_\w+)`")


@pytest.mark.parametrize(
    ("page", "least"), [(PAGE, 20), (ENVIRONMENTS, 10)], ids=lambda given: getattr(given, "stem", "")
)
def test_every_test_that_a_page_names_exists(page: Path, least: int) -> None:
    named = NAMED.findall(page.read_text(encoding="utf-8"))
    assert len(named) > least
    for file, test in named:
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert test in functions, f"{file}::{test}"


def test_every_row_of_its_tables_names_one() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert [row for row in rows if not NAMED.search(row) and not row.startswith("| fault |")] == []
