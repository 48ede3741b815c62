"""`asyncrl sft` as a person calls it: recipes, bad input, signals, and what comes after it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config.errors import RecipeError
from asyncrl.config.loading import load_recipe, load_sft_recipe
from asyncrl.config.resolved import resolved_yaml
from asyncrl.config.sft import SftRecipe
from tests.processes import Start
from tests.sft.conftest import reversing

EXAMPLE = Path(__file__).parents[2] / "examples" / "sft-then-rl"


def call(begin: Start, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    process = begin(*arguments)
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.jsonl"
    file.write_text(reversing(40))
    return file


def refusal(**options: object) -> str:
    with pytest.raises(RecipeError) as caught:
        load_sft_recipe(None, **options)  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


@pytest.mark.usefixtures("rows")
def test_flags_files_and_settings_come_together() -> None:
    Path("base.yaml").write_text("sft: {epochs: 3, learning_rate: 1e-4}\nrun: {name: base}")
    Path("mine.yaml").write_text("extends: base.yaml\ndata: {train: train.jsonl}\nrun: {name: mine}")
    loaded = load_sft_recipe("./mine.yaml", overrides=["sft.epochs=2"], flags={"data": None, "model": "org/model"})
    recipe = loaded.recipe
    assert (recipe.run.name, recipe.sft.epochs, recipe.sft.learning_rate) == ("mine", 2, 1e-4)
    assert recipe.model.path == "org/model"
    assert set(loaded.parent_diff) == {"run.name", "data.train", "sft.epochs", "model.path"}
    Path("again.yaml").write_text(resolved_yaml(recipe))
    assert load_sft_recipe("./again.yaml").recipe.sft == recipe.sft


def test_a_recipe_needs_nothing_but_its_rows(rows: Path) -> None:
    assert "data.train is missing; name a file (--data train.jsonl" in refusal()
    assert load_sft_recipe(None, flags={"data": str(rows)}).recipe == SftRecipe(
        data=type(SftRecipe().data)(train=str(rows))
    )


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("sft.learning_rat=1", "Did you mean sft.learning_rate?"),
        ("data.trian=x.jsonl", "Did you mean data.train?"),
        ("sft.epochs=0", "sft.epochs is 0; it must be a whole number of 1 or more. Left out, it is 1"),
        ("sft.lr_scheduler_type=cosine", "it must be one of"),
        ("sft.betas=[0.9, 1.0]", "sft.betas is [0.9, 1.0]; each must be"),
        ("data.train=none.jsonl", 'data.train is "none.jsonl" (text); there is no such file'),
        ("data.heldout=none.jsonl", "data.heldout is"),
        ("data.answer=prompt", "data.prompt is 'prompt', and so is another column"),
        ("model.path=./nowhere", "there is no such folder"),
        ("run.name=a b", "run.name"),
    ],
)
def test_a_bad_key_or_value_is_named(setting: str, said: str) -> None:
    assert said in refusal(overrides=["data.train=train.jsonl", setting])


@pytest.mark.usefixtures("rows")
def test_recipes_of_the_two_commands_are_told_apart() -> None:
    Path("sft.yaml").write_text("sft: {epochs: 2}\ndata: {train: train.jsonl}")
    with pytest.raises(RecipeError, match=r"is a recipe of supervised training: asyncrl sft \./sft\.yaml"):
        load_recipe("./sft.yaml")
    with pytest.raises(RecipeError, match=r"tiny-reverse has the section .* so it is a recipe of `asyncrl run`"):
        load_sft_recipe("tiny-reverse")


@pytest.mark.usefixtures("rows")
def test_a_dry_run_checks_the_rows_and_says_what_follows(begin: Start, tmp_path: Path) -> None:
    done = call(begin, "sft", "--data", "train.jsonl", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "train: train.jsonl" in done.stdout
    assert "rows to train, " in done.stdout.splitlines()[-1]
    assert done.stdout.splitlines()[-1].endswith("held out; 1 steps")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "line", ['{"prompt": "p", "answer": null}', '{"messages": [{"role": "tool", "content": "x"}]}']
)
def test_a_bad_row_ends_the_command_before_anything_begins(begin: Start, rows: Path, line: str) -> None:
    rows.write_text(f"{line}\n{reversing(20)}")
    done = call(begin, "sft", "--data", "train.jsonl")
    assert done.returncode == 2
    assert done.stderr.startswith("Error: train.jsonl:1: ")
    assert len(done.stderr.splitlines()) <= 3
    assert not (rows.parent / "runs").exists()
    skipped = call(begin, "sft", "--data", "train.jsonl", "--set", "data.bad_rows=skip", "--dry-run")
    assert "1 row left out: " in skipped.stdout


def test_a_resumed_training_keeps_its_own_recipe(begin: Start, rows: Path, random_model: Path) -> None:
    folder = rows.parent / "runs" / "sft-20260101-1"
    folder.mkdir(parents=True)
    recipe = load_sft_recipe(None, flags={"data": str(rows), "model": str(random_model)}).recipe
    (folder / "recipe.yaml").write_text(resolved_yaml(recipe))
    for arguments, said in (
        (["--data", "train.jsonl"], "--data and --model: a resumed training keeps its own"),
        (["--set", "sft.learning_rate=1"], "--set sft.learning_rate: a resumed run keeps its own"),
        (["./other.yaml"], "--resume takes the recipe from"),
    ):
        done = call(begin, "sft", *arguments, "--resume")
        assert done.returncode == 2
        assert said in done.stderr


COMMAND = ("--set", "run.max_steps=60", "--set", "run.output_dir=run", "--set", "sft.checkpoint.every_steps=5")


@pytest.fixture
def command(rows: Path, random_model: Path) -> tuple[str, ...]:
    return ("sft", "--data", str(rows), "--model", str(random_model), *COMMAND)


def until(process: subprocess.Popen[str], words: str) -> None:
    """Read what it prints up to a line with `words`; the test's own limit ends a process that never says them."""
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
    raise AssertionError(f"it never said {words!r}: {process.communicate(timeout=20)}")


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_killed_and_stopped_and_resumed_it_ends_with_the_same_weights(
    begin: Start, command: tuple[str, ...], tmp_path: Path
) -> None:
    killed = begin(*command)
    until(killed, "version-000010")
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(timeout=30) == -signal.SIGKILL

    stopped = begin("sft", "--resume", "run")
    until(stopped, "version-000020")
    stopped.send_signal(signal.SIGTERM)
    out, err = stopped.communicate(timeout=60)
    assert stopped.returncode == 143, err
    assert "go on with asyncrl sft --resume" in out

    done = call(begin, "sft", "--resume", "run", timeout=200)
    assert done.returncode == 0, done.stderr
    whole = call(begin, *command, "--set", "run.output_dir=whole", timeout=200)
    assert whole.returncode == 0, whole.stderr
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert weights[0] == weights[1]


@pytest.mark.faults
@pytest.mark.timeout(120)
def test_the_second_signal_ends_it_now_and_a_second_process_is_refused(begin: Start, command: tuple[str, ...]) -> None:
    process = begin(*command, "--set", "run.max_steps=1000000")
    until(process, "version-000005")
    other = call(begin, "sft", "--resume", "run")
    assert other.returncode == 2
    assert "is in use by a live run" in other.stderr
    process.send_signal(signal.SIGSTOP)  # so that both signals are there before either is looked at
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=30)
    assert process.returncode in (130, 143)
    assert "second signal" in err


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_example_goes_from_imitation_to_practice(begin: Start, tmp_path: Path) -> None:
    for file in EXAMPLE.iterdir():
        shutil.copy(file, tmp_path)
    subprocess.run([sys.executable, "make_data.py"], cwd=tmp_path, check=True, timeout=30, env={**os.environ})
    taught = call(begin, "sft", "./sft.yaml", timeout=180)
    assert taught.returncode == 0, taught.stderr
    summary = json.loads((tmp_path / "sort-sft" / "summary.json").read_text())
    assert summary["heldout_loss"] < 0.5 < 2 < summary["heldout_loss_before"]
    practised = call(begin, "run", "./rl.yaml", timeout=200)
    assert practised.returncode == 0, practised.stderr
    result = json.loads((tmp_path / "sort-rl" / "summary.json").read_text())
    assert result["success_before"] > 0.1, "supervised training taught nothing"
    assert result["success_after"] > result["success_before"]
