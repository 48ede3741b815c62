from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.errors import RecipeError
from asyncrl.config.loading import Loaded, load_recipe

Load = Callable[..., Loaded]
Refusal = Callable[..., str]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a recipe given as text, from a working folder of its own and an environment with nothing in it."""
    monkeypatch.chdir(tmp_path)

    def _load(
        text: str = "",
        *,
        overrides: Sequence[str] = (),
        flags: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Loaded:
        (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
        return load_recipe("mine.yaml", overrides=overrides, flags=flags, environ=environ or {}, **options)

    return _load


@pytest.fixture
def refusal(load: Load) -> Refusal:
    """The message with which a recipe is refused. It has one to three lines, always."""

    def _refusal(text: str = "", **options: Any) -> str:
        with pytest.raises(RecipeError) as caught:
            load(text, **options)
        message = str(caught.value)
        assert 1 <= len(message.splitlines()) <= 3, message
        return message

    return _refusal
