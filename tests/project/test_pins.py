"""`constraints.txt` pins all that an installation brings, within the ranges that `pyproject.toml` promises."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("dev", "packages")  # that the tests are run with


@pytest.fixture(scope="module")
def pins(root: Path) -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (root / "constraints.txt").read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line]
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_pin_lies_in_its_range(root: Path, pins: dict[str, str]) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    promised = [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    for requirement in map(Requirement, promised):
        assert requirement.specifier, f"{requirement} has no range"
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier


def test_every_package_of_the_closure_is_pinned(pins: dict[str, str]) -> None:
    waiting, seen = [Requirement(f"asyncrl[{','.join(EXTRAS)}]")], set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        # What the CUDA build of torch brings, torch pins itself.
        if (name, *requirement.extras) in seen or name == "torch":
            continue
        seen.add((name, *requirement.extras))
        assert name == "asyncrl" or name in pins, f"{name} is not pinned"
        for line in importlib.metadata.requires(requirement.name) or []:
            needed = Requirement(line)
            if any(
                needed.marker is None or needed.marker.evaluate({"extra": extra})
                for extra in (requirement.extras or {""})
            ):
                waiting.append(needed)
