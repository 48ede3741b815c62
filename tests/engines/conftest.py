"""Fixtures of the engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from .letters import save_letters
from .tiny_models import make_model


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as the engine loads it (its weights are those of seed 99, which no test serves)."""
    path = tmp_path_factory.mktemp("model")
    make_model(seed=99).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def saved_with_letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a tokenizer, of one character a token."""
    path = tmp_path_factory.mktemp("model-with-letters")
    make_model(seed=99).save_pretrained(path)
    save_letters(path)
    return path
