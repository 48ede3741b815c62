import json
import os
import re
import subprocess
import sys
import time

import pytest

from asyncrl.config.loading import load_recipe
from asyncrl.runtime import folder as folders
from asyncrl.runtime.folder import RunFolderError


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(name: str = "tiny-reverse"):
    folder = folders.create(name, None)
    folders.describe(folder, load_recipe(None, overrides=[f"run.name={name}"]))
    return folder


def test_folders_are_numbered_and_none_is_made_twice(working_folder):
    names = [folders.create("a", None).name for _ in range(3)]
    assert [re.fullmatch(r"a-\d{8}-(\d+)", name)[1] for name in names] == ["1", "2", "3"]


def test_a_given_folder_must_be_new_or_empty(tmp_path):
    given = tmp_path / "mine"
    given.mkdir()
    assert folders.create("a", str(given)) == given
    with pytest.raises(RunFolderError, match=rf"{given} exists and is not empty.*--resume {given}"):
        folders.create("a", str(given))


def test_a_folder_that_cannot_be_written_is_one_error_that_names_it():
    with pytest.raises(RunFolderError, match=r"cannot write the run folder /proc/.*run.output_dir"):
        folders.create("a", "/proc/self/runs")


def test_a_folder_says_what_was_run(monkeypatch):
    monkeypatch.setenv("SECRET", "s3cret")
    loaded = load_recipe(None, overrides=["run.max_steps=7", "buffer.url=redis://u:${SECRET}@127.0.0.1:6379/0"])
    folder = folders.create("a", None)
    folders.describe(folder, loaded)
    kept = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
    assert "max_steps: 7" in kept["recipe.yaml"]
    assert "run.max_steps: 7" in kept["recipe-diff.yaml"]
    assert "learning_rate" not in kept["recipe-diff.yaml"]
    assert all("s3cret" not in text for text in kept.values())
    versions = json.loads(kept["versions.json"])
    assert {"torch", "transformers", "asyncrl"} <= set(versions["packages"])


def test_a_run_is_found_by_folder_by_name_or_as_the_newest():
    first = made("tiny")
    other = made("tiny-reverse")
    second = made("tiny")
    for age, folder in enumerate((other, second, first)):
        os.utime(folder / "recipe.yaml", (time.time() - age, time.time() - age))
    assert folders.find(None) == other
    assert folders.find("tiny") == second, "the name tiny does not mean tiny-reverse"
    assert folders.find(first.name) == first
    assert folders.find(str(first)) == first
    with pytest.raises(RunFolderError, match="no run 'nope'"):
        folders.find("nope")


def test_a_folder_that_is_not_yet_a_run_is_not_found():
    folders.create("a", None)
    with pytest.raises(RunFolderError, match="no run in"):
        folders.find(None)


def test_the_folder_of_a_live_run_is_refused_and_free_again_after_it(monkeypatch):
    monkeypatch.setattr(folders, "LOCK_S", 0.1)
    folder = made()
    refused = pytest.raises(RunFolderError, match=rf"in use by a live run \(process {os.getpid()}\)")
    with folders.locked(folder, "run"), refused, folders.locked(folder, "run"):
        pass
    with folders.locked(folder, "run"):
        pass


def test_a_lock_is_held_by_those_who_inherit_its_file_too(tmp_path):
    """As a learner's ranks do: whoever comes after a learner that was killed waits for them."""
    hold = "import sys; print('here', flush=True); sys.stdin.read()"
    with folders.locked(tmp_path, "learner") as lock:
        child = subprocess.Popen(
            [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[lock], text=True
        )
    try:
        assert child.stdout.readline() == "here\n"
        refused = pytest.raises(RunFolderError, match="in use by a live learner")
        with refused, folders.locked(tmp_path, "learner", wait_s=0.2):
            pass
    finally:
        child.communicate(timeout=20)
    with folders.locked(tmp_path, "learner", wait_s=0.2):
        pass
