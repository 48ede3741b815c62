"""`asyncrl init`: what it writes runs as it stands, and it overwrites nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.cli.init import FILES


@pytest.fixture
def written(cli, tmp_path: Path) -> Path:
    """A folder that `asyncrl init` has written."""
    done = cli("init", "mine")
    assert done.returncode == 0, done.stderr
    return tmp_path / "mine"


def python(folder: Path, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, check=False, capture_output=True, text=True, timeout=timeout
    )


def test_it_writes_four_files_and_says_what_to_do_next(cli, tmp_path):
    done = cli("init", "some where/mine")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "some where" / "mine").iterdir()} == set(FILES)
    said = done.stdout.splitlines()
    assert [line for line in said if line.startswith("wrote ")] == [f"wrote some where/mine/{name}" for name in FILES]
    following = said[said.index("Next:") :]
    assert following[1] == "  cd 'some where/mine'"
    for command in ("asyncrl profile recipe.yaml", "asyncrl run recipe.yaml"):
        assert any(line.startswith(f"  {command} ") for line in following)


def test_in_the_folder_itself_there_is_nowhere_to_go(cli, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    done = cli("init", ".")
    assert done.returncode == 0, done.stderr
    assert "  cd " not in done.stdout
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_file_that_is_there_is_named_and_nothing_is_written(cli, tmp_path):
    (tmp_path / "task.py").write_text("precious")
    (tmp_path / "recipe.yaml").symlink_to("nowhere")
    done = cli("init", ".")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "Error: . has task.py, recipe.yaml already, and nothing is overwritten; give another folder\n"
    assert (tmp_path / "task.py").read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"task.py", "recipe.yaml"}


@pytest.mark.parametrize("folder", ["/proc/self/mine", "task.py"])
def test_a_folder_that_cannot_be_made_is_named(cli, tmp_path, folder):
    (tmp_path / "task.py").touch()
    done = cli("init", folder)
    assert done.returncode == 2
    assert folder in done.stderr
    assert "Traceback" not in done.stderr


def test_the_recipe_passes_every_check_that_comes_before_training(cli, written):
    done = python(written, "-m", "asyncrl.cli.main", "run", "recipe.yaml", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "type: task:MyTask" in done.stdout


@pytest.mark.parametrize("runner", [["-m", "unittest"], ["test_task.py"], ["-m", "pytest", "-q"]])
def test_its_test_passes_and_fails_for_a_reward_that_pays_for_anything(written, runner):
    done = python(written, *runner)
    assert done.returncode == 0, done.stdout + done.stderr
    task = written / "task.py"
    task.write_text(task.read_text().replace("return 0.0", "return 1.0"))
    assert python(written, *runner).returncode != 0


def test_the_data_are_what_the_built_in_model_knows(written):
    rows = [json.loads(line) for line in (written / "data.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) == 500
    for row in rows:
        verb, digits = row["prompt"].split()
        assert (verb, row["answer"]) == ("reverse", digits[::-1])
        assert 3 <= len(digits) <= 6


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_recipe_trains_and_the_reward_rises(written):
    done = python(written, "-m", "asyncrl.cli.main", "run", "recipe.yaml", timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    (folder,) = (written / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 60
    assert summary["eval_n"] == 100
    assert summary["success_after"] > summary["success_before"] + 0.4  # 0.10 -> 0.93 is usual
