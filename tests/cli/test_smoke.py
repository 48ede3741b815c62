"""`asyncrl run --smoke`: two steps with all parts, what each took, and what failed first."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.loading import load_recipe, packaged_recipes
from asyncrl.runtime.smoke import Short, overrides, table
from tests.commands import Ended

PARTS = ["learner", "first evaluation", "step 1", "checkpoint 1", "step 2", "checkpoint 2", "last evaluation"]


def records() -> list[dict[str, Any]]:
    """Of a short run that ended well: 10 s until the learner is there, 20 s until answers are, 30 and 40 s a step."""
    step = {"skipped": False, "tokens": 1000, "groups": 4, "train_s": 5.0, "publish_s": 1.0}
    weights = {"weights/bytes": 10**6, "weights/publish_s": 1.0}
    saved = {"event": "checkpoint", "checkpoint/save_s": 8.0, "checkpoint/stall_s": 2.0}
    return [
        {"event": "start", "time": 1010.0, "version": 0},
        {"event": "eval", "time": 1030.0, "version": 0},
        {**step, **weights, "step": 1, "time": 1055.0},
        {**step, **weights, "step": 2, "time": 1095.0},
        {**saved, "version": 1, "time": 1096.0},
        {**saved, "version": 2, "time": 1097.0},
        {"event": "eval", "time": 1100.0, "version": 2},
        {"event": "end", "time": 1101.0, "version": 2},
    ]


def test_each_part_has_its_time_and_the_whole_run_follows() -> None:
    short = Short(records(), began=1000.0, generating=1025.0)
    assert [(part.name, part.seconds) for part in short.parts] == [
        *zip(PARTS, [10.0, 20.0, 30.0, 8.0, 40.0, 8.0, 5.0], strict=True)
    ]
    assert short.failed == ""
    assert all(line.startswith("ok ") for line in table(short.parts))
    whole = load_recipe("tiny-reverse", overrides=["run.max_steps=100", "eval.prompts=512"]).recipe
    # 10 + 20 to begin, 100 x 35 s, a save every 20 steps that halts it 2 s, and 2 x 512 prompts by 256 slots, 5 s each
    assert short.projected(whole).startswith("100 steps will take about 59:20: 35.0 s a step")
    assert "work for 6.0 s" in short.projected(whole)


@pytest.mark.parametrize(
    ("missing", "failed"),
    [(0, "learner"), (1, "first evaluation"), (2, "step 1"), (4, "checkpoint 1"), (6, "last evaluation")],
)
def test_the_first_part_that_did_not_end_is_named(missing: int, failed: str) -> None:
    short = Short([one for n, one in enumerate(records()) if n != missing], began=1000.0, generating=1025.0)
    assert short.failed == failed
    lines = table(short.parts)
    assert "failed" in lines[-1]
    assert len(lines) == PARTS.index(failed) + 1


def test_a_step_without_a_finite_gradient_has_not_worked() -> None:
    short = Short([{**one, "skipped": True} for one in records()], began=1000.0, generating=1025.0)
    assert (short.failed, "gradients were not finite" in table(short.parts)[-1]) == ("step 1", True)


@pytest.mark.parametrize("name", packaged_recipes())
def test_a_short_run_differs_in_nothing_but_its_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_PASSWORD", "x")
    whole = load_recipe(name, overrides=["eval.every_steps=20", "learner.checkpoint.keep_best=1"], elsewhere=True)
    short = load_recipe(name, overrides=overrides(whole.recipe), elsewhere=True).recipe
    assert (short.run.max_steps, short.learner.checkpoint.every_steps, short.eval.prompts) == (2, 1, 8)
    assert short.run.name == f"{whole.recipe.run.name}-smoke"
    for section in ("model", "task", "buffer", "collector", "objective", "telemetry"):
        assert getattr(short, section) == getattr(whole.recipe, section)


@pytest.mark.slow
def test_a_recipe_that_works_says_so_part_by_part(called: Callable[..., Ended], tmp_path: Path) -> None:
    done = called("run", "--smoke", "--set", "learner.groups_per_step=4")
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    found = [re.fullmatch(r"ok  (.{16}) +[\d.]+ s  .+", line) for line in lines]
    assert [match[1].strip() for match in found if match] == PARTS
    assert re.match(r"60 steps will take about [\d:]+: ", lines[-1])
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("tiny-reverse-smoke-")
    assert len(list((folder / "checkpoints").glob("version-*"))) == 2
    assert len(list((folder / "eval").iterdir())) == 2


@pytest.mark.slow
def test_a_recipe_that_does_not_work_names_the_part_and_the_reason(
    called: Callable[..., Ended], tmp_path: Path
) -> None:
    """The task is found and built, which is all that is checked before; its scores then fail."""
    (tmp_path / "broken.py").write_text(
        "from asyncrl.tasks.reverse import Reverse\n"
        "class Broken(Reverse):\n"
        "    def __init__(self):\n"
        "        super().__init__((3, 6))\n"
        "    def score(self, row, answer):\n"
        "        raise RuntimeError('no reward today')\n"
    )
    done = called("run", "--smoke", "--set", "task={type: 'broken:Broken'}", "--set", "learner.groups_per_step=4")
    assert done.returncode == 1, done
    # The answers of the first evaluation and those of the first step fail alike; who is told first, is chance.
    assert re.match(r"Error: (first evaluation|step 1): ", done.stderr), done.stderr
    assert "no reward today" in done.stderr
    parts = r"^ok  learner .*\n(ok  first evaluation .*\n)? {4}(first evaluation|step 1) +failed "
    assert re.search(parts, done.stdout, re.M), done.stdout


@pytest.mark.parametrize("other", ["--dry-run", "--resume"])
def test_a_short_run_is_one_of_its_own(called: Callable[..., Ended], other: str) -> None:
    done = called("run", "--smoke", other)
    assert (done.returncode, "leave out --dry-run and --resume" in done.stderr) == (2, True)
