"""The documentation of recipes says what the code does: every key, every name of another system.

That the reference is the one made from the code is tested in `tests/project/test_docs.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from asyncrl.config.convert import convert, every_key
from asyncrl.config.foreign import PLANNED, SYSTEMS, TABLE, foreign_name
from asyncrl.config.identity import HOST_LOCAL, NOT_IDENTITY
from asyncrl.config.recipe import Recipe
from asyncrl.config.yaml_text import parse

DOCS = Path(__file__).parents[2] / "docs"
RECIPE = (DOCS / "recipe.md").read_text(encoding="utf-8")
BLOCKS: list[dict[str, Any]] = [parse(block) for block in re.findall(r"```yaml\n(.*?)```", RECIPE, re.DOTALL)]


def _keys(value: Any, prefix: str = "") -> set[str]:
    """Dotted keys, inner ones included; items of lists count as their list."""
    if isinstance(value, list):
        return set().union(*(_keys(item, prefix) for item in value)) if value else set()
    if not isinstance(value, dict):
        return set()
    return {prefix + key for key in value} | set().union(*(_keys(v, f"{prefix}{k}.") for k, v in value.items()))


def test_every_key_is_documented_and_every_documented_key_exists() -> None:
    documented: set[str] = set().union(*map(_keys, BLOCKS))
    documented -= {key for key in documented if key.startswith("task.tasks.task.")}  # those of any task
    assert documented == set(every_key()) - {"extends"}


def test_the_default_sections_together_are_the_default_recipe() -> None:
    first: dict[str, Any] = {}
    for block in BLOCKS:
        for section, value in block.items():
            first.setdefault(section, value)
    assert convert(first) == Recipe()


def test_the_documented_exceptions_of_the_hash_are_the_codes() -> None:
    tail = RECIPE.split("Two recipes describe the same run")[1]
    assert set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", tail)) == {*NOT_IDENTITY, *HOST_LOCAL} - {"extends"}


def test_the_table_of_other_systems_names_is_the_codes() -> None:
    rows = [
        [re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")]
        for line in (DOCS / "coming-from.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    assert rows == [[[row.here], *map(list, row[1:])] for row in TABLE]
    assert "| here | " + " | ".join(SYSTEMS) + " |" in (DOCS / "coming-from.md").read_text(encoding="utf-8")


def test_every_name_of_another_system_leads_to_a_key_that_exists_or_is_planned() -> None:
    for row in TABLE:
        assert row.here in every_key() or row.here in PLANNED
        for names in row[1:]:
            for name in names:
                assert foreign_name(name) is not None


def test_no_planned_key_exists_already() -> None:
    assert PLANNED.isdisjoint(every_key())
