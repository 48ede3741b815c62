"""Calls in an answer's text: what a model writes is not always JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rewards.tool_call_text import ToolCall
from asyncrl.tasks.tool_calls import tool_calls

ADD = '{"name": "add", "arguments": {"a": 1}}'
CALL = ToolCall("add", {"a": 1})


def test_several_calls_are_read_in_order_and_the_text_around_them_is_kept():
    found = tool_calls(f"first <tool_call>\n{ADD}\n</tool_call>\n<tool_call>{ADD}</tool_call> then")
    assert (found.calls, found.problem) == ((CALL, CALL), "")
    assert found.content.split() == ["first", "then"]


def test_text_without_a_call_is_no_problem():
    assert tool_calls("just text {") == tool_calls("just text {", "hermes")
    assert (tool_calls("just text").calls, tool_calls("just text", "json").problem) == ((), "")


def test_a_call_whose_end_mark_the_model_left_out_counts():
    assert tool_calls(f"<tool_call>{ADD}").calls == (CALL,)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ('{"name": "add", "arguments": {"a": 1}', "delimiter"),
        ('{"name": "add", "name": "rm"}', "'name' occurs twice"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is no JSON value"),
        ('{"name": "add", "arguments": {"a": 1e999}}', "inf is no JSON number"),
        ('{"name": "add", "arguments": [1]}', "arguments of add must be an object"),
        ('{"arguments": {}}', "needs a name"),
        ("[3]", "an object with name and arguments"),
        ("[" * 100_000, "recursion"),
        ("", "Expecting value"),
    ],
)
def test_what_is_no_call_says_why_and_the_calls_before_it_stay(block, said):
    found = tool_calls(f"<tool_call>{ADD}</tool_call><tool_call>{block}</tool_call>")
    assert found.calls == (CALL,)
    assert said in found.problem
    assert found.faulty == block


def test_a_bare_object_or_list_is_read_where_the_recipe_says_json():
    llama = ADD.replace("arguments", "parameters")
    assert tool_calls(f" {llama}\n", "json").calls == tool_calls(f"[{ADD}]", "json").calls == (CALL,)


@given(st.text())
def test_no_text_breaks_it(text):
    for form in ("hermes", "json"):
        tool_calls(text, form)
        tool_calls(f"<tool_call>{text}</tool_call>", form)


@given(st.text(min_size=1), st.dictionaries(st.text(), st.integers() | st.text() | st.none()))
def test_whatever_is_called_is_read_back(name, arguments):
    block = json.dumps({"name": name, "arguments": arguments})
    assert tool_calls(block, "json").calls == (ToolCall(name, arguments),)
