"""What a recipe says of an agent is looked at before a run begins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncrl.config.convert import convert
from asyncrl.tasks.agent import Agent, check_agent
from asyncrl.tasks.base import TaskError
from asyncrl.tasks.build import build_task
from asyncrl.tasks.scorer import replaced

ROWS = "".join(f'{{"prompt": "{n}", "answer": "{n}!"}}\n' for n in range(40))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The section `task` of an agent's recipe, with rows and an agents' file in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "rows.jsonl").write_text(ROWS)
    (tmp_path / "agents_of_test_agent.py").write_text(
        "async def run(row, endpoint): return 1.0\ndef alone(row): return 1.0\ndef odd(*words, **others): ...\n"
    )

    def make(**task):
        return convert({"task": {"type": "agent", "data": {"train": "rows.jsonl"}, **task}}).task

    yield make
    sys.modules.pop("agents_of_test_agent", None)


@pytest.mark.parametrize("agent", ["run", "odd"])
def test_an_agent_that_takes_row_and_endpoint_is_one(config, agent):
    check_agent(config(agent=f"agents_of_test_agent:{agent}"))
    check_agent(config(command=[sys.executable, "x.py"]))


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"agent": "agents_of_test_agent:runs"}, "has no function runs; did you mean 'run'"),
        ({"agent": "agents_of_test_agent:alone"}, r"cannot be called with a row and an endpoint .*def alone\(row, end"),
        ({"agent": "agents_of_nobody:run"}, "there is no module agents_of_nobody"),
        ({"command": ["no-such-program-here"]}, "there is no program no-such-program-here"),
    ],
)
def test_an_agent_that_cannot_run_is_refused_by_name(config, task, said):
    with pytest.raises(TaskError, match=said):
        check_agent(config(**task))


def test_its_rows_are_those_of_single_turn_and_its_answers_scored_if_the_recipe_says_so(config):
    task = build_task(config(agent="a:b", rewards=[{"type": "exact"}]), seed=0)
    assert isinstance(task, Agent)
    assert task.rows("train")
    assert replaced(config(agent="a:b", rewards=[{"type": "exact"}, {"type": "format", "pattern": "."}])) == {"exact"}
