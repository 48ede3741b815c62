from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncrl.learners.cache import seal
from asyncrl.learners.tiny import build_tiny

SHORT = (2, 2)
"""Two digits: a warm start of seconds."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def short_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warm-started model for two digits; tests that change its files work on a copy."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    folder.mkdir()
    build_tiny(folder, seed=0, digits=SHORT)
    seal(folder)
    return folder
