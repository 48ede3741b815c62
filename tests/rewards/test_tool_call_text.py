"""From an answer's text to the one tool call that it is, or why it is none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rewards.tool_call_text import Malformed, only_call


def mail(**arguments: Any) -> str:
    return json.dumps({"name": "mail", "arguments": arguments})


@pytest.mark.parametrize(
    "arguments", ['{"a":1,}', '{"a":', '```json {"a":1}```', '{"a":NaN}', '{"a":1,"a":2}', "", "{'a': 1}", "Infinity"]
)
def test_arguments_that_are_no_strict_json_make_no_call(arguments: str) -> None:
    for form, text in (("json", "%s"), ("hermes", "<tool_call>%s</tool_call>")):
        call = text % f'{{"name": "mail", "arguments": {arguments}}}'
        with pytest.raises(Malformed):
            only_call(call, tool_format=form, fences="strip")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (mail(to="ann") + " Done!", "Extra data"),
        (mail(to="ann") + mail(to="bob"), "Extra data"),
        (f"[{mail(to='ann')}]", "an object"),
        ("Sure: " + mail(to="ann"), "Expecting value"),
        (mail(to="ann")[:-1], "delimiter"),
        ('{"name": "mail", /* to her */ "arguments": {}}', "property name"),
        ('{"name": "mail", "arguments": {"a": 1e999}}', "inf is no JSON number"),
        ('{"name": "mail", "arguments": "{}"}', "must be an object"),
        ('{"name": "mail"}', "the keys name and arguments, got name"),
        ('{"name": "mail", "arguments": {}, "why": "asked"}', "got name, arguments, why"),
        ('{"name": 3, "arguments": {}}', "a name that is a string"),
        ('{"a":' * 100_000, "recursion"),
        ("9" * 10_000, "integer string"),
        (f'{{"name": "mail", "arguments": {{"copies": {"9" * 400}}}}}', "beyond what a JSON number can be"),
        ("\ufeff" + mail(to="ann"), "BOM"),
        ("null", "an object"),
        ("", "Expecting value"),
    ],
)
def test_a_text_that_is_not_one_call_says_why(text: str, said: str) -> None:
    with pytest.raises(Malformed, match=said):
        only_call(text, tool_format="json", fences="refuse")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (mail(to="ann"), "there is no <tool_call>"),
        (f"<tool_call>{mail(to='ann')}", "without </tool_call>"),
        (f"<tool_call>{mail(to='ann')}</tool_call> Done!", "text behind the call: 'Done!'"),
        (f"<tool_call>{mail(to='ann')}</tool_call><tool_call>{mail(to='ann')}</tool_call>", "text behind"),
        (f"I write <tool_call> now. <tool_call>{mail(to='ann')}</tool_call>", "Expecting value"),
    ],
)
def test_a_hermes_call_has_both_marks_and_is_the_last_thing(text: str, said: str) -> None:
    with pytest.raises(Malformed, match=said):
        only_call(text, tool_format="hermes", fences="refuse")


def test_thoughts_before_a_hermes_call_are_the_models_own_affair() -> None:
    call = only_call(
        f"She wants it. <tool_call>\n{mail(to='ann')}\n</tool_call>\n", tool_format="hermes", fences="refuse"
    )
    assert (call.name, call.arguments) == ("mail", {"to": "ann"})


@pytest.mark.parametrize("text", ["```json\n%s\n```", "```%s```", "```json %s```"])
def test_fences_are_refused_unless_the_recipe_strips_them(text: str) -> None:
    fenced = text % mail(to="ann")
    assert only_call(fenced, tool_format="json", fences="strip").arguments == {"to": "ann"}
    with pytest.raises(Malformed):
        only_call(fenced, tool_format="json", fences="refuse")
    with pytest.raises(Malformed):
        only_call(fenced.rstrip("`"), tool_format="json", fences="strip")


@given(st.text())
def test_no_text_breaks_the_reading(text: str) -> None:
    for form in ("json", "hermes"):
        for fences in ("refuse", "strip"):
            with pytest.raises(Malformed):
                only_call(text, tool_format=form, fences=fences)  # type: ignore[arg-type]


def test_200_kilobytes_are_read_in_no_time() -> None:
    keys = ",".join(f'"{n}":1' for n in range(20_000))
    for text in (f'{{"name":"mail","arguments":{{{keys},"0":1}}}}', "```" * 70_000, "<tool_call>" * 20_000):
        with pytest.raises(Malformed):
            only_call(text, tool_format="json", fences="strip")
