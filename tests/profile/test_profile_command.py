"""`asyncrl profile` with a real model, real engine and real verifier processes."""

from __future__ import annotations

import csv
import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest

SHORT = ("--set", "task.digits=[2, 2]", "--outputs", "8", "--per-prompt", "4")

TASK = """
from asyncrl.rewards.base import Finding
from asyncrl.tasks.base import Row

class Even:
    '''Right is an answer whose token ids add up to an even number: a model of noise succeeds half of the time.'''

    def rows(self, split):
        return [Row(id=f"{split}-{n}", prompt="reverse 12", answer=n) for n in range(6)]

    def score(self, row, answer):
        right = sum(answer.token_ids) % 2 == 0
        return Finding({"even": float(right), "grave": 0.0}, "" if right else "odd_sum", "<b>counted</b>")

    def part_weights(self):
        return {"even": 2.0, "grave": 0.5}
"""

RECIPE = """
model: {{path: {model}}}
task: {{type: "{module}:Even"}}
collector: {{group_size: 4, sampling: {{max_tokens: 8}}}}
"""


@pytest.fixture
def recipe(tmp_path: Path, model: Path) -> str:
    module = f"even_{tmp_path.name}"  # another one for each test, which all run in this process
    (tmp_path / f"{module}.py").write_text(TASK)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=model, module=module))
    return "recipe.yaml"


def document(folder: Path, name: str = "profile.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_bytes())
    return found


def test_train_rows_are_answered_and_the_verdict_comes_with_its_files(cli, tmp_path, recipe):
    done = cli("profile", recipe, "--outputs", "16", "--per-prompt", "4", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "judgements.csv",
        "profile.html",
        "profile.json",
    ]
    found = document(tmp_path / "out")
    answers, report = found["answers"], found["report"]
    assert len(answers) == 16
    assert {answer["row_id"].partition("-")[0] for answer in answers} == {"train"}
    assert len({answer["row_id"] for answer in answers}) == report["prompts"] == 4
    assert {answer["reward"] for answer in answers} == {0.0, 2.0}
    assert report["passed"] + report["wrong"]["odd_sum"] == 16
    assert (report["parts"]["even"]["weight"], report["parts"]["even"]["share"]) == (2.0, pytest.approx(1.0))
    assert report["speed"]["tokens_per_s"] > 0
    assert found["verdict"]["verdict"] == "train"
    assert done.stdout.startswith("profiled    recipe recipe.yaml, model ")
    assert [line for line in done.stdout.splitlines() if line.startswith("verdict     train: ")]
    assert "&lt;b&gt;counted&lt;/b&gt;" in (tmp_path / "out" / "profile.html").read_text()


def test_the_sheet_filled_in_says_how_far_a_person_agrees(cli, tmp_path, recipe):
    assert cli("profile", recipe, "--outputs", "16", "--per-prompt", "4", "--out", "out").returncode == 0
    sheet = tmp_path / "out" / "judgements.csv"
    head, *rows = csv.reader(io.StringIO(sheet.read_text(encoding="utf-8-sig"), newline=""))
    column, reward = head.index("judgement"), head.index("reward")
    passing = [row for row in rows if float(row[reward]) > 0]
    for row in rows:
        row[column] = "right" if row in passing[1:] else "wrong"  # one that passes is wrong
    filled = tmp_path / "filled.csv"
    with filled.open("w", newline="") as file:
        csv.writer(file, delimiter=";").writerows([head, *rows])
    done = cli("profile", "out", "--agree", str(filled))
    assert done.returncode == 0, done.stderr
    found = document(tmp_path / "out", "agreement.json")
    assert found["agreement"]["judged"] == 16
    assert found["agreement"]["false_passes"]["count"] == 1
    assert f"false pass  {passing[0][0]}: " in done.stdout
    sheet.write_bytes(filled.read_bytes())
    assert cli("profile", "--agree", str(sheet)).stdout == done.stdout
    assert document(tmp_path / "out")["verdict"]["verdict"] == "train", "what was written stays as it was"


MIXTURE = """
model: {{path: {model}}}
task:
  type: mixture
  tasks:
    - name: short
      task: {{type: reverse, digits: [2, 2], rewards: [{{type: length, weight: 0.5, target_tokens: 0}}]}}
    - {{name: long, task: {{type: reverse, digits: [5, 5]}}}}
collector: {{sampling: {{max_tokens: 8}}}}
"""


def test_a_mixture_shows_the_parts_of_each_task_with_their_weights(cli, tmp_path, model):
    (tmp_path / "mixture.yaml").write_text(MIXTURE.format(model=model))
    done = cli("profile", "mixture.yaml", "--outputs", "16", "--per-prompt", "2", "--out", "out")
    assert done.returncode == 0, done.stderr
    parts = document(tmp_path / "out")["report"]["parts"]
    assert {name: (part["weight"], part["role"]) for name, part in parts.items()} == {
        "long/exact": (1.0, "outcome"),
        "short/exact": (1.0, "outcome"),
        "short/length": (0.5, "constraint"),
    }


def test_a_model_that_never_succeeds_is_not_trained_yet(cli, tmp_path, model):
    done = cli("profile", "tiny-reverse", "--set", f"model.path={model}", *SHORT)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("profile-tiny-reverse-*-1")
    assert document(folder)["verdict"]["verdict"] == "not yet"
    assert "docs/when-rl.md#it-does-not-succeed-yet" in done.stdout


def test_what_passes_is_the_recipes_to_say(cli, tmp_path, recipe):
    """Rewards are 0 and 2."""
    few = ("--outputs", "8", "--per-prompt", "4", "--set", "eval.pass_above=2.0", "--out", "out")
    assert cli("profile", recipe, *few).returncode == 0
    report = document(tmp_path / "out")["report"]
    assert (report["pass_above"], report["passed"], report["reward"]["mean"] > 0) == (2.0, 0, True)


def test_nothing_is_overwritten(cli, tmp_path, recipe):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    done = cli("profile", recipe, "--out", "out")
    assert (done.returncode, "not empty" in done.stderr) == (2, True)
    for _ in range(2):
        assert cli("profile", recipe, "--outputs", "2", "--per-prompt", "2").returncode == 0
    assert [len(list(folder.iterdir())) for folder in tmp_path.glob("profile-*-[12]")] == [3, 3]


BROKEN = TASK.replace("return Finding", "return 1 / 0, Finding")


def test_a_verifier_that_fails_comes_first_and_leaves_no_number(cli, tmp_path, recipe):
    (tmp_path / "broken.py").write_text(BROKEN)
    done = cli(
        "profile", recipe, "--set", "task.type=broken:Even", "--outputs", "4", "--per-prompt", "2", "--out", "out"
    )
    assert done.returncode == 0, done.stderr
    found = document(tmp_path / "out")
    assert found["verdict"]["verdict"] == "verifier first"
    assert found["report"]["failures"] == {"verifier_raised": 4}
    assert "ZeroDivisionError" in found["verdict"]["reasons"][0]["text"]


SLOW = TASK.replace("right = sum", "exec('while sum(answer.token_ids) % 2: pass')\n        right = sum")


def test_a_verifier_that_has_to_be_killed_is_what_the_profile_says(cli, tmp_path, recipe):
    (tmp_path / "slow.py").write_text(SLOW)
    settings = ("--set", "task.type=slow:Even", "--set", "collector.score_timeout_s=0.3")
    done = cli("profile", recipe, *settings, "--outputs", "8", "--per-prompt", "4", "--out", "out")
    assert done.returncode == 0, done.stderr
    found = document(tmp_path / "out")
    assert found["verdict"]["verdict"] == "verifier first"
    assert list(found["report"]["failures"]) == ["verifier_timeout"]
    assert sum(answer["verifier_s"] is None for answer in found["answers"]) == found["report"]["unscored"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing-of-that-name",), "nothing-of-that-name is no run folder"),
        (("recipe.yaml", "--outputs", "10"), "--outputs 10 is no multiple of --per-prompt 8"),
        (("tiny-reverse", "--set", "collector.engine={type: simulated}"), "no model"),
        (("recipe.yaml", "--set", "task.type=nowhere:Task"), "nowhere"),
        (("--agree", "nowhere.csv"), "nowhere.csv"),
        (("--agree", "sheet.csv"), "there is no profile.json; name the profile's folder"),
        (("--agree", "sheet.csv", "--outputs", "8"), "--outputs says how to sample"),
        (("other", "--agree", "sheet.csv"), "profile.json is not what `asyncrl profile` writes"),
    ],
)
def test_bad_input_is_one_clear_error_and_leaves_no_folder(cli, tmp_path, recipe, arguments, said):
    (tmp_path / "sheet.csv").write_text("id,judgement\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "profile.json").write_text("[]")
    done = cli("profile", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3
    assert not list(tmp_path.glob("profile-*"))


@pytest.mark.faults
def test_an_interrupt_ends_it_with_its_verifiers_and_leaves_no_folder(
    begin, descendants, eventually, is_alive, model, tmp_path
):
    process = begin("profile", "tiny-reverse", "--set", f"model.path={model}", "--outputs", "32000")
    assert eventually(60, lambda: descendants(process.pid) or process.poll() is not None)
    verifiers = [child.pid for child in descendants(process.pid)]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert verifiers
    assert eventually(20, lambda: not [pid for pid in verifiers if is_alive(pid)])
    assert not list(tmp_path.glob("profile-*"))
