"""The reward part `tool-call`: which call is the right one, what is executed, and what each earns."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.errors import RecipeError
from asyncrl.config.loading import load_recipe
from asyncrl.config.rewards import ToolCall, ToolCallWeights, ToolPolicy, declared
from asyncrl.rewards.base import BadRow, Finding
from asyncrl.rewards.parts import weighted_sum
from asyncrl.rewards.tool_call import ToolCallVerifier
from asyncrl.rewards.tool_call_schema import same

MAIL = {
    "type": "object",
    "properties": {
        "to": {"type": "string"},
        "copies": {"type": "integer", "minimum": 1, "maximum": 9, "default": 1},
        "file": {"type": "string"},
    },
    "required": ["to"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "mail", "parameters": MAIL}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
FUNCTIONS = """
import time

calls = []

def mail(to, copies=1, file=""):
    calls.append(to)
    if to == "nobody":
        raise LookupError("no such person")
    while to == "ever":
        try:
            time.sleep(60)
        except Exception:
            pass
    if to == "exit":
        raise SystemExit(3)

def allowed(arguments):
    return not arguments.get("file", "").startswith("/")
"""
RIGHT = {"name": "mail", "arguments": {"to": "ann", "copies": 2}}


def row(expected: object = RIGHT, tools: object = TOOLS) -> dict[str, Any]:
    return {"id": "7", "prompt": "mail ann twice", "answer": expected, "info": {"tools": tools}}


def answer(text: object, finish_reason: str = "stop") -> dict[str, Any]:
    text = text if isinstance(text, str) else json.dumps(text)
    return {"text": text, "token_ids": [], "finish_reason": finish_reason, "messages": []}


def mail(**arguments: Any) -> str:
    return json.dumps({"name": "mail", "arguments": arguments})


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "tools_of_test.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tools_of_test", raising=False)
    import tools_of_test  # type: ignore[import-not-found]

    return tools_of_test


@pytest.fixture
def part(functions: Any) -> ToolCall:
    policy = ToolPolicy(name="mail", function="tools_of_test:mail", safe="tools_of_test:allowed")
    return ToolCall(tool_format="json", tools=[policy], call_timeout_s=0.2)


def reward(part: ToolCall, found: Finding) -> float:
    return weighted_sum(found.parts, {name: number.weight for name, number in declared([part]).items()})


# --- what it earns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wrong", "earned"),
    [
        (RIGHT, "", 1.0),
        ({"arguments": {"copies": 2.0, "to": "ann"}, "name": "mail"}, "", 1.0),
        ("mail ann", "malformed", -1.0),
        (json.dumps(RIGHT) + "!", "malformed", -1.0),
        ({"name": "stop", "arguments": {}}, "wrong_tool", 0.0),
        ({"name": "fax", "arguments": {}}, "wrong_tool", 0.0),
        (mail(to="bob", copies=2), "wrong_arguments", 0.6),
        (mail(to="ann"), "wrong_arguments", 0.6),
        (mail(to="ann", copies=10), "wrong_arguments", 0.4),
        (mail(to="ann", copies=True), "wrong_arguments", 0.4),
        (mail(to="ann", copies="2"), "wrong_arguments", 0.4),
        (mail(copies=2), "wrong_arguments", 0.4),
        (mail(to="ann", copies=2, bcc="bob"), "wrong_arguments", 0.4),
        (mail(to="ann", copies=2, file="/etc/passwd"), "unsafe", 0.4),
        (mail(to="nobody"), "wrong_arguments", 0.4),
    ],
)
def test_the_reward_is_0_4_tool_0_4_arguments_0_2_execution_and_minus_1_malformed(
    part: ToolCall, text: object, wrong: str, earned: float
) -> None:
    found = ToolCallVerifier(part).verify(row(), answer(text))
    assert found.wrong == wrong, found.detail
    assert reward(part, found) == pytest.approx(earned)
    assert list(found.parts) == ["tool", "arguments", "execution", "malformed"]


def test_a_call_that_was_cut_off_is_malformed(part: ToolCall) -> None:
    found = ToolCallVerifier(part).verify(row(), answer(RIGHT, "length"))
    assert (found.wrong, found.detail, reward(part, found)) == ("malformed", "cut off", -1.0)


def test_an_argument_that_is_left_out_is_its_default_on_both_sides(part: ToolCall) -> None:
    verifier = ToolCallVerifier(part)
    once = {"name": "mail", "arguments": {"to": "ann", "copies": 1}}
    assert verifier.verify(row(once), answer(mail(to="ann"))).wrong == ""
    assert verifier.verify(row({"name": "mail", "arguments": {"to": "ann"}}), answer(once)).wrong == ""


@pytest.mark.parametrize(
    ("to", "wrong"), [("nobody", "execution_failed"), ("exit", "execution_failed"), ("ever", "timeout")]
)
def test_a_right_call_whose_tool_fails_has_no_execution(part: ToolCall, to: str, wrong: str) -> None:
    expected = {"name": "mail", "arguments": {"to": to}}
    found = ToolCallVerifier(part).verify(row(expected), answer(expected))
    assert found.wrong == wrong
    assert reward(part, found) == pytest.approx(0.8)


def test_only_safe_calls_of_the_right_tool_are_executed(part: ToolCall, functions: Any) -> None:
    verifier = ToolCallVerifier(part)
    for text in (mail(to="a", file="/etc/passwd"), mail(to="b", copies=0), "mail c", {"name": "stop", "arguments": {}}):
        verifier.verify(row(), answer(text))
    stop = {"name": "stop", "arguments": {}}
    verifier.verify(row(stop), answer(mail(to="d")))
    assert functions.calls == []
    verifier.verify(row(), answer(mail(to="e")))
    assert functions.calls == ["e"]


def test_a_tool_without_a_policy_is_let_through_and_counts_as_executed() -> None:
    part = ToolCall(tool_format="json")
    found = ToolCallVerifier(part).verify(row(), answer(RIGHT))
    assert reward(part, found) == pytest.approx(1.0)
    unchecked = ToolCallVerifier(part).verify(row(), answer(mail(to="ann", copies=2, file="/etc/passwd")))
    assert unchecked.wrong == "wrong_arguments"  # without the predicate nothing is unsafe


def test_what_a_policy_or_a_tool_does_to_the_arguments_changes_nothing_of_the_answer(
    functions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(arguments: dict[str, Any]) -> bool:
        arguments["to"].append("eve")
        return True

    received: list[list[str]] = []

    def send(to: list[str]) -> None:
        received.append([*to])
        to.clear()

    monkeypatch.setattr(functions, "spoil", spoil, raising=False)
    monkeypatch.setattr(functions, "send", send, raising=False)
    tools = [{"type": "function", "function": {"name": "send", "parameters": {"type": "object"}}}]
    policy = ToolPolicy(name="send", function="tools_of_test:send", safe="tools_of_test:spoil")
    call = {"name": "send", "arguments": {"to": ["ann"]}}
    found = ToolCallVerifier(ToolCall(tool_format="json", tools=[policy])).verify(row(call, tools), answer(call))
    assert (found.wrong, received) == ("", [["ann"]])
    assert json.loads(found.read) == call


def test_its_numbers_can_be_weighted_and_named() -> None:
    found = declared([ToolCall(name="call", weight=2.0, weights=ToolCallWeights(tool=0.1))])
    assert {name: number.weight for name, number in found.items()} == {
        "call.tool": 0.2,
        "call.arguments": 0.8,
        "call.execution": 0.4,
        "call.malformed": 2.0,
    }
    assert [number.role for number in found.values()] == ["outcome", "outcome", "outcome", "violation"]


def test_what_was_read_is_the_same_text_for_calls_that_mean_the_same(part: ToolCall) -> None:
    verifier = ToolCallVerifier(part)
    one = verifier.verify(row(), answer('{"name":"mail","arguments":{"to":"ann","copies":2}}'))
    other = verifier.verify(row(), answer('{"arguments": {"copies": 2, "to": "ann"}, "name": "mail"}'))
    assert one.read == other.read != ""


# --- rows and recipes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (row(tools=None), "its column `tools` is None"),
        (row(tools=[{"name": "mail"}]), "is no tool: write"),
        (row(tools=[*TOOLS, TOOLS[0]]), "two tools are called mail"),
        (
            row(tools=[{"function": {"name": "mail", "parameters": {"type": "objekt"}}}]),
            "mail, parameters.type: 'objekt' is no",
        ),
        *(
            (row(tools=[{"function": {"name": "mail", "parameters": bad}}]), "mail, parameters")
            for bad in (None, True, [])
        ),
        (row(tools=[{"function": {"name": "mail", "parameters": {"$ref": "#/$defs/no"}}}]), r"refer to '/\$defs/no'"),
        (row("mail ann"), "is no tool call"),
        (row(None), "is no tool call"),
        (row({"name": "fax", "arguments": {}}), "one of fax; its tools are mail, stop"),
        (row({"name": "mail", "arguments": {}}), "'to' is a required property"),
        (row({"name": "mail", "arguments": {"to": "ann", "file": "/x"}}), "the policy forbids"),
    ],
)
def test_a_row_that_no_answer_could_satisfy_is_named(part: ToolCall, bad: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRow, match=said) as caught:
        ToolCallVerifier(part).check(bad)
    assert str(caught.value).startswith("row 7: ")
    assert len(str(caught.value).splitlines()) == 1


def test_an_expected_call_may_be_text(part: ToolCall) -> None:
    verifier = ToolCallVerifier(part)
    verifier.check(row(json.dumps(RIGHT)))
    assert verifier.verify(row(json.dumps(RIGHT)), answer(RIGHT)).wrong == ""


def test_an_argument_may_have_a_schema_that_allows_anything(part: ToolCall) -> None:
    schema = {"type": "object", "properties": {"to": True, "copies": {"default": 2}}}
    anything = row(tools=[{"function": {"name": "mail", "parameters": schema}}])
    ToolCallVerifier(part).check(anything)
    assert ToolCallVerifier(part).verify(anything, answer(mail(to="ann"))).wrong == ""


def test_no_number_keeps_a_call_from_being_scored(part: ToolCall) -> None:
    schema = {"type": "object", "properties": {"to": {}, "copies": {"type": "number", "multipleOf": 0.01}}}
    divided = row(tools=[{"function": {"name": "mail", "parameters": schema}}])
    for number in ("9" * 300, "-" + "9" * 400, "1e308", "1e-320", "0.001"):
        text = f'{{"name": "mail", "arguments": {{"to": "ann", "copies": {number}}}}}'
        assert ToolCallVerifier(part).verify(divided, answer(text)).wrong in ("malformed", "wrong_arguments")


def test_a_schema_fetches_nothing_from_the_network(part: ToolCall, monkeypatch: pytest.MonkeyPatch) -> None:
    import urllib.request

    def fetched(*arguments: object, **more: object) -> None:
        raise AssertionError("a schema was fetched")

    monkeypatch.setattr(urllib.request, "urlopen", fetched)
    tools = [{"function": {"name": "mail", "parameters": {"$ref": "http://127.0.0.1:9/schema.json"}}}]
    with pytest.raises(
        BadRow, match=r"row 7: its tools refer to 'http://127\.0\.0\.1:9/schema\.json', which is nowhere"
    ):
        ToolCallVerifier(part).verify(row(tools=tools), answer(RIGHT))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("tools: [{name: a, function: os.remove}]", r"tools\[0\].function is .*; write module:function"),
        ("tools: [{name: a, safe: os.remove}]", r"tools\[0\].safe is"),
        ("tools: [{name: a}, {name: a}]", r"tools has .* twice"),
        ("call_timeout_s: 10", "killed after collector.score_timeout_s 10"),
        ("call_timeout_s: 3, timeout_s: 2", r"killed after task.rewards\[0\].timeout_s 2"),
        ("form: json", "form"),
    ],
)
def test_a_recipe_that_cannot_be_meant_is_refused(setting: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe("tool-call", overrides=[f"task.rewards=[{{type: tool-call, {setting}}}]"])


# --- equality ---------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, JSON)
def test_values_are_the_same_only_if_they_are_written_alike(one: Any, other: Any) -> None:
    def plain(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key!r}:{plain(value[key])}" for key in sorted(value)) + "}"
        if isinstance(value, list):
            return f"[{','.join(map(plain, value))}]"
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return repr(value)

    assert same(one, one)
    assert same(one, other) == (plain(one) == plain(other))


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (1, 1.0, True),
        (1, True, False),
        (0, False, False),
        (None, False, False),
        ("1", 1, False),
        ("ann", "Ann", False),
        ([1, 2], [2, 1], False),
        ([1], [1, 1], False),
        (10**20, 1e20, True),
        (10**20 + 1, 1e20, False),
        ({"a": 1, "b": {"c": []}}, {"b": {"c": []}, "a": 1}, True),
        ({"a": 1}, {"a": 1, "b": None}, False),
    ],
)
def test_numbers_are_compared_by_value_texts_exactly_and_keys_in_any_order(one: Any, other: Any, equal: bool) -> None:
    assert same(one, other) == same(other, one) == equal
