"""What must not happen is never rewarded: a violation is below 0, and its weight is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asyncrl.config.loading import Loaded

Load = Callable[..., Loaded]
Refusal = Callable[..., str]


@pytest.mark.parametrize(
    "part",
    [
        "{type: regex, pattern: as an AI, role: violation}",
        "{type: format, pattern: x, role: violation, weight: -1}",
        "{type: exact, name: leaked, role: violation}",
        "{type: f1, role: violation}",
        "{type: tool-call, role: violation}",
    ],
)
def test_a_violation_that_would_never_be_one_is_refused(refusal: Refusal, part: str) -> None:
    said = refusal(f"task: {{rewards: [{part}]}}")
    assert "task.rewards[0].role is violation, which a part is when it is below 0" in said
    assert "function that returns -1.0" in said


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("{type: function, function: 'a:b', role: violation, weight: -2}", "function the weight -2"),
        ("{type: overlong, buffer_tokens: 2, weight: -1}", "overlong the weight -1"),
        ("{type: tool-call, weights: {malformed: -1}}", "malformed the weight -1"),
        ("{type: tool-call, name: call, weight: -1}", "call.malformed the weight -1"),
    ],
)
def test_a_weight_that_would_reward_a_violation_is_refused(refusal: Refusal, part: str, words: str) -> None:
    assert words in refusal(f"task: {{rewards: [{part}]}}")


@pytest.mark.parametrize(
    "part",
    [
        "{type: function, function: 'a:b', role: violation, weight: 0}",
        "{type: overlong, buffer_tokens: 2, role: violation}",
        "{type: length, target_tokens: 0, weight: -1}",
        "{type: regex, pattern: x, weight: -1, role: constraint}",
    ],
)
def test_other_roles_and_weights_are_a_persons_choice(load: Load, part: str) -> None:
    load(f"task: {{rewards: [{part}]}}")
