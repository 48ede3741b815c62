"""What another rank begins with must be what rank 0 begins with, also where its host is another one."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from asyncrl.config.identity import identity
from asyncrl.config.recipe import Recipe, Run
from asyncrl.learners.checkpoint import MANIFEST, CheckpointError, file_entry
from asyncrl.learners.commands import Begin, decoded, encoded
from asyncrl.learners.rank import _loaded, _the_same

CHECKPOINT = Path(__file__).with_name("format-1")
RECIPE = Recipe(run=Run(name="rank"))


def begun(begin: Begin) -> Begin:
    """As it arrives."""
    found = decoded(encoded(begin))
    assert isinstance(found, Begin)
    return found


def test_another_recipe_is_refused_by_its_keys(tmp_path: Path) -> None:
    other = msgspec.structs.replace(RECIPE, run=msgspec.structs.replace(RECIPE.run, max_steps=7))
    with pytest.raises(ValueError, match=r"other values than rank 0's of: run\.max_steps; give all ranks the same"):
        _loaded(begun(Begin(identity=identity(other), run_dir=str(tmp_path))), RECIPE, None, tmp_path)  # type: ignore[arg-type]  # it comes to no work
    same = Begin(identity=identity(RECIPE), run_dir=str(tmp_path), checkpoint=str(tmp_path))
    with pytest.raises(CheckpointError, match="is not there"):  # control: the same recipe goes on to the checkpoint
        _loaded(begun(same), RECIPE, None, tmp_path)  # type: ignore[arg-type]


def test_a_checkpoint_that_is_not_on_this_host_or_another_one_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(next(CHECKPOINT.rglob(MANIFEST)).parent, tmp_path / "version-000001"))
    digest = file_entry(folder / MANIFEST).xxh3
    assert _the_same(folder, digest).folder == folder
    with pytest.raises(CheckpointError, match=r"is another checkpoint than rank 0 goes on from .*there 00\)"):
        _the_same(folder, "00")
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="runs/ must be a folder that all hosts share"):
        _the_same(folder, digest)
