"""Judges and reward models that cannot be meant are refused, and a key never stands in a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.config.loading import Loaded
from asyncrl.config.resolved import dump

Load = Callable[..., Loaded]
Refusal = Callable[..., str]

JUDGE = "task: {rewards: [{type: judge, url: 'http://h:1/v1', model: m%s}]}%s"


@pytest.mark.parametrize(
    ("keys", "around", "words"),
    [
        (", prompt: 'is {anwser} good?'", "", ("task.rewards[0].prompt has the field {anwser}", "{expected}")),
        (", prompt: 'good?'", "", ("neither {answer} nor {messages}",)),
        (", scale: [10, 1]", "", ("task.rewards[0].scale is [10.0, 1.0]", "worst verdict first")),
        (", timeout_s: 100", "", ("may be asked for 400 s (3 retries of 100 s)", "collector.group_timeout_s 300")),
        (", timeout_s: null", "", ("task.rewards[0].timeout_s",)),
        (
            ", requests_per_minute: 10",
            "\ncollector: {group_size: 8, max_concurrent_groups: 32}",
            ("the 256 answers", "wait up to 1536 s", "max_concurrent_groups"),
        ),
        (", api_key: sk-1", "", ("api_key", "api_key_env")),
        (", max_calls: 0", "", ("task.rewards[0].max_calls is 0",)),
        (", api_key_env: sk-1", "", ("task.rewards[0].api_key_env is no name of an environment variable",)),
        (", role: violation, weight: -0.5", "", ("gives judge the weight -0.5", "Use 0.5")),
    ],
)
def test_a_judge_that_cannot_be_meant_is_refused(
    refusal: Refusal, keys: str, around: str, words: tuple[str, ...]
) -> None:
    said = refusal(JUDGE % (keys, around))
    for word in words:
        assert word in said
    assert "sk-1" not in said


@pytest.mark.parametrize("url", ["h:1", "http://", "ftp://h/v1", "http://h/v1?a=1", "http://me:secret@h/v1"])
def test_an_address_that_is_none_is_refused_and_no_password_is_said(refusal: Refusal, url: str) -> None:
    said = refusal(f"task: {{rewards: [{{type: judge, url: '{url}', model: m}}]}}")
    assert "task.rewards[0].url is" in said
    assert "secret" not in said


def test_an_address_with_what_is_added_to_it_is_refused(refusal: Refusal) -> None:
    said = refusal("task: {rewards: [{type: judge, url: 'http://h:1/v1/chat/completions', model: m}]}")
    assert "/chat/completions is added to it. Write http://h:1/v1" in said


@pytest.mark.parametrize(
    ("keys", "around", "words"),
    [
        (", role: violation", "", ("task.rewards[0].role is violation",)),
        (", device: gpu", "", ('task.rewards[0].device is "gpu"', "cuda:1")),
        (", max_length: 512, max_tokens_per_batch: 256", "", ("max_tokens_per_batch is 256", "512 tokens")),
        ("", "\nrun: {deterministic: true}", ("run.deterministic is true", "Leave task.rewards[0] out")),
    ],
)
def test_a_reward_model_that_cannot_be_meant_is_refused(
    refusal: Refusal, keys: str, around: str, words: tuple[str, ...]
) -> None:
    said = refusal(f"task: {{rewards: [{{type: reward-model, path: p{keys}}}]}}{around}")
    for word in words:
        assert word in said


def test_braces_of_other_languages_are_no_fields(load: Load) -> None:
    prompt = r"Is {answer} right? Write \\frac{ab}{cd}, {x}, {} or {\"score\": 1}"
    load(JUDGE % (f', prompt: "{prompt}"', ""))


def test_a_recipe_names_where_the_key_is_and_not_what_it_is(load: Load) -> None:
    keys: dict[str, Any] = {"environ": {"JUDGE_KEY": "sk-1"}}
    recipe = load(JUDGE % (", api_key_env: JUDGE_KEY, extra_body: {api_key: sk-2}", ""), **keys).recipe
    from asyncrl.config.recipe import to_builtins
    from asyncrl.config.secrets import masked

    text = dump(masked(to_builtins(recipe)))
    assert "api_key_env: JUDGE_KEY" in text
    assert "sk-1" not in text
    assert "sk-2" not in text
