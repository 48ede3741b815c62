"""What is named is no recipe: what there is instead is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.errors import RecipeError
from asyncrl.config.loading import load_recipe


@pytest.mark.parametrize("name", ["tiny-revers", "./tiny-reverse", "/nowhere/x.yaml", "mine"])
def test_a_missing_recipe_lists_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="tiny-reverse"):
        load_recipe(name)


def test_a_file_named_without_its_suffix_is_pointed_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(RecipeError, match=r"write \./mine\.yaml"):
        load_recipe("mine")


def test_a_folder_or_bytes_in_place_of_a_recipe_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(str(tmp_path))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(str(tmp_path / "bytes.yaml"))
