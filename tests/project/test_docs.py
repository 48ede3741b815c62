"""The documentation is whole, leads somewhere, and says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.cli.main import COMMANDS
from asyncrl.config.objective import PRESETS
from docs import generate, objective_tables

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
MEASURED = {"waiting_costs", "dropping_costs"}
"""Parts that take a minute to compute; some of their cells are checked."""


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_resolves(page: Path) -> None:
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    for target in LINK.findall(prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = page if not name else (page.parent / name).resolve()
        assert linked.exists(), target
        assert not anchor or anchor in headings(linked), target


def test_every_page_is_listed_in_the_readme() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert {f"docs/{page.name}" for page in DOCS.glob("*.md")} <= linked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    in_blocks = re.findall(r"^(?:\$ )?asyncrl ([a-z][a-z-]*)", "\n".join(FENCED.findall(text)), re.MULTILINE)
    assert {*in_blocks, *re.findall(r"`asyncrl ([a-z][a-z-]*)", text)} <= set(COMMANDS)


def test_the_map_of_the_house_shows_every_folder_of_code() -> None:
    shown = (ROOT / "README.md").read_text(encoding="utf-8").split("## The house")[1].split("```")[1]
    packages = [folder.parent for folder in (ROOT / "asyncrl").glob("*/__init__.py")]
    folders = [folder for folder in ROOT.iterdir() if folder.is_dir() and any(folder.glob("*.py"))]
    assert [folder.name for folder in (*packages, *folders) if f"{folder.name}/" not in shown] == []


def test_generated_parts_are_those_of_the_code() -> None:
    committed = {name: part for page in PAGES for name, part in generate.parts_of(page).items()}
    assert set(committed) == set(generate.PARTS)
    for name in set(committed) - MEASURED:
        assert committed[name] == generate.PARTS[name](), f"run `make docs`: {name} is out of date"


def test_a_preset_has_no_key_that_its_formula_leaves_out() -> None:
    assert {key for parts in PRESETS.values() for key in parts} <= set(objective_tables.KEYS)


def test_the_tables_of_ages_are_the_models() -> None:
    parts = generate.parts_of(DOCS / "which-age.md")
    for part, policy in (("waiting_costs", "wait"), ("dropping_costs", "drop")):
        rows = {row.split("|")[1].strip(): row.split("|")[2:] for row in parts[part].splitlines()}
        cells = rows["1 step"][:-1]
        for age in (4, 8):  # these take a second
            found = generate.outcome(policy, 1.0, age)
            assert cells[generate.AGES.index(age)].strip().startswith(f"{100 * found.efficiency:.0f} %")
