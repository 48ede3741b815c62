"""Environments of the real package verifiers: their tasks as rows, their rewards as scores, and what is refused."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.convert import convert
from asyncrl.config.packages import VerifiersTask
from asyncrl.config.recipe import Collector
from asyncrl.data.split import prompt_key
from asyncrl.tasks.base import Answer, TaskError
from asyncrl.tasks.build import build_task
from asyncrl.tasks.verifiers import Verifiers
from asyncrl.tasks.verify import scoring_of
from tests.processes import Start

EXAMPLE = Path(__file__).parents[2] / "examples" / "verifiers"

MODULE = """
import verifiers.v1 as vf

__all__ = ["Words"]

class Data(vf.TaskData):
    answer: str = ""

class Word(vf.Task[Data]):
    {methods}

class Config(vf.TasksetConfig):
    words: list[str] = ["one", "two", "three"]

class Words(vf.Taskset[Word, Config]):
    def load(self):
        {load}
"""
RIGHT = """
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)
"""
LOAD = (
    "return [Word(Data(prompt=f'upper {word}', answer=word.upper()), self.config.task) for word in self.config.words]"
)

Write = Callable[..., str]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module into the working folder and returns its name. Modules and sys.path are as before afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(methods: str = RIGHT, load: str = LOAD, source: str = MODULE) -> str:
        text = source.replace("{methods}", methods.strip()).replace("{load}", load)
        (tmp_path / "my_words.py").write_text(text)
        return "my-words"

    yield write
    for name in ("my_words", "my_rewards"):
        sys.modules.pop(name, None)


def task_of(name: str, **keys: Any) -> Verifiers:
    config = convert({"task": {"type": "verifiers", "environment": name, **keys}}).task
    task = build_task(config, seed=0)
    assert isinstance(task, Verifiers)
    return task


def said(text: str, finish_reason: str = "stop", tokens: int = 2) -> Answer:
    return Answer(text, tuple(range(tokens)), finish_reason)


def test_tasks_become_rows_and_one_prompt_in_ten_is_held_out(environment: Write) -> None:
    words = [f"w{n}" for n in range(60)] + ["w1 "]
    task = task_of(environment(), args={"words": words})
    train, heldout = task.rows("train"), task.rows("heldout")
    assert {row.id for row in (*train, *heldout)} == {str(n) for n in range(61)}
    keys = [{prompt_key(task.messages(row)) for row in rows} for rows in (train, heldout)]  # type: ignore[arg-type]
    assert keys[0].isdisjoint(keys[1])
    assert 1 <= len(heldout) <= 15
    row = next(row for row in (*train, *heldout) if row.id == "7")
    assert (task.messages(row), row.answer) == ([{"role": "user", "content": "upper w7"}], "W7")


def test_held_out_rows_may_be_those_of_another_configuration(environment: Write) -> None:
    task = task_of(environment(), args={"words": ["a", "b"]}, heldout_args={"words": ["c"]})
    assert [[row.answer for row in task.rows(split)] for split in ("train", "heldout")] == [["A", "B"], ["C"]]


def test_a_system_prompt_and_examples_come_before_the_question(environment: Write) -> None:
    load = (
        "return [Word(Data(system_prompt='Be brief.', answer=w, prompt=[vf.UserMessage(content='upper x'), "
        "vf.AssistantMessage(content='X'), vf.UserMessage(content=w)])) for w in 'ab']"
    )
    task = task_of(environment(load=load))
    roles = [(message["role"], message["content"]) for message in task.messages(task.rows("train")[0])]
    question = task.rows("train")[0].answer
    assert roles == [("system", "Be brief."), ("user", "upper x"), ("assistant", "X"), ("user", question)]


def test_parts_are_the_reward_functions_with_their_weights_plugged_ones_too(environment: Write, tmp_path: Path) -> None:
    methods = """
    @vf.reward
    def plain(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.5)
    async def brief(self, trace) -> float:
        return float(trace.calls[0].usage.completion_tokens <= 2 and not trace.is_truncated)

    @vf.reward
    async def letters(self, trace) -> dict:
        return {"first": trace.last_reply[:1] == self.data.answer[:1], "seen": len(trace.messages)}

    @vf.metric
    async def length(self, trace) -> float:
        return len(trace.last_reply)
    """
    (tmp_path / "my_rewards.py").write_text("async def loud(trace):\n    return trace.last_reply.isupper()\n")
    name = environment(methods.replace("def plain", "async def plain"))
    task = task_of(name, args={"task": {"rewards": {"loud": {"fn": "my_rewards:loud", "weight": 2.0}}}})
    row = task.rows("train")[0]
    right = str(row.answer)
    assert task.part_weights() == {"brief": 0.5, "loud": 2.0}
    assert task.score(row, said(right)) == {"plain": 1, "brief": 1, "first": 1, "seen": 2, "loud": 1}
    assert task.score(row, said("x", "length")) == {"plain": 0, "brief": 0, "first": 0, "seen": 2, "loud": 0}
    assert task.score(row, said(right, tokens=3))["brief"] == 0


def test_setup_and_finalize_run_before_the_rewards_in_a_folder_of_their_own(environment: Write) -> None:
    methods = """
    async def setup(self, trace, runtime):
        await runtime.write("kept.txt", b"setup ")

    async def finalize(self, trace, runtime):
        kept = await runtime.read("kept.txt")
        await runtime.write("kept.txt", kept + trace.last_reply.encode())

    @vf.reward
    async def kept(self, trace, runtime) -> float:
        found = await runtime.run(["cat", "kept.txt"], {})
        return float(found.stdout == "setup " + self.data.answer)
    """
    task = task_of(environment(methods))
    row = task.rows("train")[0]
    assert [task.score(row, said(text)) for text in (str(row.answer), "x")] == [{"kept": 1.0}, {"kept": 0.0}]


@pytest.mark.parametrize(("value", "complaint"), [("1 / 0", "ZeroDivisionError"), ("None", "NoneType")])
def test_a_reward_that_raises_or_returns_nothing_gives_no_score(environment: Write, value: str, complaint: str) -> None:
    task = task_of(environment(f"@vf.reward\n    async def right(self, trace): return {value}"))
    with pytest.raises(Exception, match=f"task Word scoring: .*{complaint}"):
        task.score(task.rows("train")[0], said("x"))


def test_scores_by_name_of_a_function_with_a_weight_are_refused(environment: Write) -> None:
    task = task_of(environment("@vf.reward(weight=2)\n    async def both(self, trace): return {'a': 1, 'b': 0}"))
    with pytest.raises(ValueError, match="the reward 'a' has the weight 2 of a function that returns scores by name"):
        task.score(task.rows("train")[0], said("x"))


REFUSED: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "import raises": (
        {"source": "raise OSError('no such device')"},
        {},
        r"importing it raised OSError: no such device",
    ),
    "missing dependency": (
        {"source": "import nowhere_at_all"},
        {},
        "importing it raised ModuleNotFoundError: No module",
    ),
    "no taskset": ({"source": "__all__ = []"}, {}, "exports no Taskset subclass"),
    "old": ({"source": "def load_environment(): pass"}, {}, r"has load_environment\(\), as verifiers had before 0.4"),
    "unknown key": (
        {},
        {"args": {"word": []}},
        r"task.args.word is \[\]: Extra inputs .* has system_prompt, task, words",
    ),
    "wrong value": ({}, {"args": {"words": 5}}, "task.args.words is 5: Input should be a valid list"),
    "load raises": (
        {"load": "raise KeyError('data')"},
        {},
        r"loading its tasks raised KeyError: 'data' \(.*my_words.py",
    ),
    "no tasks": ({}, {"args": {"words": []}}, r"has no tasks, with task.args {'words': \[\]}"),
    "no prompt": ({"load": "return [Word(Data())]"}, {}, "task 0 has no prompt: it waits for a user who begins"),
    "image": ({"load": "return [Word(Data(prompt='x', image='ubuntu'))]"}, {}, "task 0 wants a container"),
    "picture": (
        {
            "load": "return [Word(Data(prompt=[vf.UserMessage(content=[vf.TextContentPart(text='a')])]))]",
        },
        {},
        "task 0 has more than text in its prompt",
    ),
    "one prompt": ({}, {"args": {"words": ["a", "a"]}}, "all 2 tasks have the same prompt"),
    "endless": (
        {
            "load": "return (Word(Data(prompt=str(n))) for n in __import__('itertools').count())",
            "methods": RIGHT,
            "source": MODULE.replace("def load", "INFINITE = True\n    def load"),
        },
        {},
        "tasks without end: write how many are to be used as task.rows",
    ),
    "changed": (
        {"load": "return [Word(Data(prompt='x'), vf.TaskConfig(stops={'a': {'fn': 'a:b'}}))]"},
        {},
        "would not be itself in the verifier's process",
    ),
    "no reward": ({"methods": "pass"}, {}, "has no reward function: decorate a method of its Word"),
    "tools": (
        {
            "methods": RIGHT + "    @classmethod\n    def toolsets(cls, config): return [Search(vf.ToolsetConfig())]",
            "source": MODULE.replace("class Word(", "class Search(vf.Toolset): pass\n\nclass Word("),
        },
        {},
        r"has tools \(Search\); .*each task is answered once",
    ),
    "agents": (
        {
            "source": MODULE.replace('["Words"]', '["Words", "Duel"]')
            + "\nclass Duel(vf.SingleAgentEnv):\n    async def run(self, task, agents): pass\n"
        },
        {},
        "has an Env of its own, Duel",
    ),
    "container": ({"methods": "NEEDS_CONTAINER = True\n" + RIGHT}, {}, "wants a container for its Word"),
    "intercept": (
        {"methods": RIGHT + "    @vf.intercept\n    async def shorten(self, request: vf.Request): return None"},
        {},
        "has shorten, which looks at requests before the model does",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_cannot_be_trained_on_is_refused_with_the_reason(environment: Write, mistake: str) -> None:
    parts, keys, complaint = REFUSED[mistake]
    name = environment(**parts)
    with pytest.raises(TaskError, match=complaint) as caught:
        task_of(name, **keys)
    assert str(caught.value).startswith("task.environment my-words")
    assert len(str(caught.value).splitlines()) <= 3


def test_tasks_without_end_are_used_as_far_as_the_recipe_says(environment: Write) -> None:
    parts, _, _ = REFUSED["endless"]
    task = task_of(environment(**parts), rows=30)
    assert len(task.rows("train")) + len(task.rows("heldout")) == 30


@pytest.mark.usefixtures("environment")
def test_an_environment_that_is_not_there_is_named_with_the_commands_that_install_it() -> None:
    with pytest.raises(
        TaskError, match=r"no installed package gsm9k, and no gsm9k.py in /.*\n.*pip install gsm9k"
    ) as e:
        task_of("primeintellect/gsm9k@0.1")
    assert "prime env install OWNER/NAME" in str(e.value)


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TaskError, match=r"pip install 'asyncrl\[verifiers\]'"):
        task_of("anything")


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_verifier_process_scores_and_what_raises_there_is_unscored_and_never_zero(environment: Write) -> None:
    """The process costs the package's import, seconds."""
    methods = RIGHT.replace("return float", "assert trace.last_reply, 'nothing said'\n        return float")
    config = VerifiersTask(environment=environment(methods))
    rows = build_task(config, seed=0).rows("train")
    pool = scoring_of(config, Collector(score_workers=1, score_timeout_s=30), seed=0, max_tokens=8)
    await asyncio.wait_for(pool.start(), 90)
    try:
        texts = (str(rows[0].answer), "wrong", "")
        scores = await asyncio.wait_for(asyncio.gather(*(pool.score(rows[0], said(text)) for text in texts)), 90)
    finally:
        await pool.close()
    assert [score.parts for score in scores] == [{"right": 1.0}, {"right": 0.0}, {}]
    assert [score.failure for score in scores] == ["", "", "verifier_raised"]
    assert scores[2].reward != 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_trains(begin: Start, tmp_path: Path) -> None:
    """Two small steps: docs/packages.md has what all of them bring."""
    for file in EXAMPLE.glob("*.*"):
        shutil.copy(file, tmp_path)
    settings = ("run.output_dir=out", "run.max_steps=2", "learner.groups_per_step=4", "eval.prompts=8")
    process = begin("run", "./rl.yaml", *(part for setting in settings for part in ("--set", setting)))
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["steps"] == 2
