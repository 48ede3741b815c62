"""Functions as tools: what a template is told of them, how they are called, and every way they can be wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.recipe import CustomTask
from asyncrl.learners.tiny_tokenizer import CHAT_TEMPLATE, build_tokenizer
from asyncrl.tasks.base import Answer, Row, TaskError
from asyncrl.tasks.build import build_task
from asyncrl.tasks.chat import template_text
from asyncrl.tasks.conversing import check_template_turns, check_turns, converses, tool_schemas
from asyncrl.tasks.tools import LONGEST_RESULT, as_text, call

UserModule = Callable[[str], Path]

LOOK = '''
def look(key: str, times: int = 1) -> str:
    """Look.

    Args:
        key: Where.
        times: How often.
    """
    return key * times
'''
TASK = """
class Mine:
    tools = [look]
    def rows(self, split): return [Row("1", "a question", answer="an answer")]
    def score(self, row, answer): return 1.0
"""
MINE = CustomTask(type="my_task:Mine")


def built() -> Any:
    return build_task(MINE, seed=0)


def look(key: str, times: int = 1) -> str:
    return key * times


def test_a_template_is_told_name_arguments_and_types(user_module: UserModule) -> None:
    user_module(LOOK + TASK)
    (schema,) = tool_schemas(built())
    function = schema["function"]
    assert (function["name"], function["parameters"]["required"]) == ("look", ["key"])
    assert {name: kind["type"] for name, kind in function["parameters"]["properties"].items()} == {
        "key": "string",
        "times": "integer",
    }
    messages = built().messages(Row("1", "a question"))
    text = template_text(build_tokenizer(100), messages, tools=[schema])
    assert text == "<|system|>look(key, times)<|end|><|user|>a question<|end|><|assistant|>"


def test_methods_of_the_task_are_tools_too(user_module: UserModule) -> None:
    user_module(
        '''
class Mine:
    def __init__(self):
        self.tools = [self.look]
        self.known = {"a": "1"}
    def look(self, key: str):
        """Look.

        Args:
            key: Where.
        """
        return self.known[key]
    def rows(self, split): return [Row("1", "a question")]
    def score(self, row, answer): return 1.0
'''
    )
    assert call(built().tools["look"], {"key": "a"}) == "1"
    assert list(tool_schemas(built())[0]["function"]["parameters"]["properties"]) == ["key"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "missing a required argument: 'key'"),
        ({"key": "a", "where": 1}, "got an unexpected keyword argument 'where'"),
        ({"key": 1}, "argument key: Expected `str`, got `int`"),
        ({"key": "a", "times": "2"}, "argument times: Expected `int`, got `str`"),
    ],
)
def test_arguments_that_a_function_does_not_take_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError) as caught:
        call(look, arguments)
    assert said in str(caught.value)
    assert call(look, {"key": "a", "times": 2}) == "aa"


def test_results_become_text_of_bounded_length() -> None:
    assert [as_text(value) for value in ("plain", 3, [1, "ä"], {"a": None}, {1})] == [
        "plain",
        "3",
        '[1, "ä"]',
        '{"a": null}',
        "{1}",
    ]
    long = as_text("x" * (LONGEST_RESULT + 1))
    assert long == "x" * LONGEST_RESULT + f"\n[cut: the result has {LONGEST_RESULT + 1} characters]"
    assert as_text("x" * LONGEST_RESULT) == "x" * LONGEST_RESULT


WRONG = {
    LOOK + TASK.replace("[look]", "look"): "give a list of functions",
    LOOK + TASK.replace("[look]", "[]"): "give a list of functions",
    LOOK + TASK.replace("[look]", "[look, 3]"): "tools has 3, which is no function",
    LOOK + TASK.replace("[look]", "[look, look]"): "two tools are named look",
    LOOK.replace("def look", "async def look") + TASK: "tool look is async",
    LOOK.replace("key: str", "key") + TASK: "nothing can be told of tool look",
    LOOK.replace("        key: Where.\n", "") + TASK: "nothing can be told of tool look",
    "def look(key: str): return key\n" + TASK: "nothing can be told of tool look",
    LOOK + TASK + "    def environment(self): return self\n": "tools and an environment",
    TASK.replace("tools = [look]", "environment = 3"): "environment is 3",
    TASK.replace("tools = [look]", "def environment(self, row): return self"): "environment takes arguments",
    TASK.replace("tools = [look]", "async def environment(self): return self"): "write `def environment(self)`",
    LOOK + TASK.replace("def score(self, row, answer): return 1.0", ""): "the class has no method score",
}


@pytest.mark.parametrize("source", WRONG, ids=range(len(WRONG)))
def test_a_task_that_cannot_be_played_says_so_when_it_is_built(user_module: UserModule, source: str) -> None:
    user_module(source)
    with pytest.raises(TaskError) as caught:
        built()
    assert WRONG[source] in str(caught.value)
    assert str(caught.value).startswith("task.type my_task:Mine")


def test_an_environment_may_be_all_that_scores(user_module: UserModule) -> None:
    user_module(
        TASK.replace("tools = [look]", "def environment(self): return self").replace(
            "def score(self, row, answer): return 1.0", ""
        )
    )
    task = built()
    assert converses(task)
    assert task.score(Row("1", "q"), Answer("a", (), "stop")) == {}


def test_one_turn_is_too_few_for_tools(user_module: UserModule) -> None:
    user_module(LOOK + TASK)
    with pytest.raises(TaskError, match=r"has tools, but collector\.max_turns is 1"):
        check_turns(built(), max_turns=1)
    check_turns(built(), max_turns=2)
    user_module(TASK.replace("    tools = [look]\n", ""))
    assert not converses(built())
    check_turns(built(), max_turns=1)


def test_processes_of_episodes_need_linux(user_module: UserModule, monkeypatch: pytest.MonkeyPatch) -> None:
    user_module(LOOK + TASK)
    task = built()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(TaskError, match="need Linux"):
        check_turns(task, max_turns=8)


def test_a_template_without_a_role_for_tools_is_refused_and_takes_results_from_the_user(
    user_module: UserModule, caplog: pytest.LogCaptureFixture
) -> None:
    user_module(LOOK + TASK)
    task, tokenizer = built(), build_tokenizer(100)
    check_template_turns(task, MINE, tokenizer)  # the built-in one has it, and shows the tools
    assert caplog.text == ""
    as_user = CustomTask(type=MINE.type, tool_role="user")
    tokenizer.chat_template = CHAT_TEMPLATE.replace("'assistant', 'tool')", "'assistant')")
    with pytest.raises(TaskError, match=r"refuses messages of the roles user, assistant, tool.*\n.*tool_role: user"):
        check_template_turns(task, MINE, tokenizer)
    check_template_turns(task, as_user, tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role != 'tool' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    )
    with pytest.raises(TaskError, match="leaves out messages of the role tool"):
        check_template_turns(task, MINE, tokenizer)
    check_template_turns(task, as_user, tokenizer)
    assert "tells the model nothing of tools" in caplog.text
