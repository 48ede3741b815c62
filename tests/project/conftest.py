from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def clean_environ() -> dict[str, str]:
    """The environment of a person who has set nothing of Python's or asyncrl's."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "ASYNCRL"))}
