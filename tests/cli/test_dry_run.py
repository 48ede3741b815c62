"""`asyncrl run --dry-run`: what is wrong with the recipe is an error; what this machine lacks is only said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import Ended

Called = Callable[..., Ended]

SINGLE_TURN = "task={type: single-turn, data: {train: rows.jsonl}}"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (SINGLE_TURN, 'task.data.train is "rows.jsonl" (text); there is no such file'),
        ("model.path=./nowhere", 'model.path is "./nowhere" (text); there is no such folder'),
        ("model.path=asyncrl/no-such-model", "not in the local cache; a run downloads it"),
        ("collector.engine.type=vllm", "which is not installed: pip install 'asyncrl[vllm]'"),
        ("collector.engine={type: vllm-server, url: 'http://h:1', api_key_env: NO_SUCH_KEY}", "NO_SUCH_KEY"),
        ("buffer.url=redis://127.0.0.1:1/0", "127.0.0.1:1"),
        ("weights.interface=none0", 'weights.interface is "none0"'),
        ("learner.devices=[93]", "learner.devices is [93], but this machine has "),
    ],
)
def test_what_is_not_here_is_said_and_is_an_error_of_the_run_itself(called: Called, setting: str, said: str) -> None:
    dry = called("run", "--dry-run", "--set", setting)
    assert dry.returncode == 0, dry
    (line,) = (line for line in dry.stderr.splitlines() if line.startswith("not here: "))
    assert said in dry.stderr
    assert "  max_trajectory_age: 1" in dry.stdout
    assert ("# memory: not for this machine; `asyncrl plan " in dry.stdout) == ("learner.devices" in setting)
    real = called("run", "--set", setting)
    assert real.returncode == 2
    assert line.removeprefix("not here: ")[:40] in real.stderr or "Hugging Face" in line


def test_what_is_wrong_with_a_recipe_is_wrong_anywhere(called: Called, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    for setting in ("learner.ranks=0", "learner.devices=[0, 1]", SINGLE_TURN, "task.type=no_such:Task"):
        done = called("run", "--dry-run", "--set", setting)
        assert (done.returncode, done.stdout) == (2, ""), (setting, done)
