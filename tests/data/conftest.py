from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.recipe import DataSource
from asyncrl.data.dataset import Dataset
from asyncrl.data.rows import Record

Open = Callable[..., Dataset]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where what is made of large files is kept, of this test alone."""
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def opened(train: object, **keys: Any) -> Dataset:
    """A dataset of files, by the keys of `task.data`."""
    given = [str(path) for path in train] if isinstance(train, list) else str(train)
    if "heldout" in keys:
        keys["heldout"] = str(keys["heldout"])
    return Dataset(DataSource(train=given, **keys))


def everything(dataset: Dataset) -> list[Record]:
    """All rows, by their ids."""
    return sorted([*dataset.train, *dataset.heldout], key=lambda record: record.id)
