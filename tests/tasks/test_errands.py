"""The task `errands`: its rows, what its recipe says of answers to them, and the demonstrations for `asyncrl sft`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from asyncrl.config.loading import load_recipe
from asyncrl.config.rewards import declared
from asyncrl.learners.tiny_tokenizer import build_tokenizer
from asyncrl.rewards.build import verifier
from asyncrl.rewards.parts import weighted_sum
from asyncrl.tasks.base import Row
from asyncrl.tasks.chat import render
from asyncrl.tasks.errands import CARELESS, DEMONSTRATIONS, TOOLS, ErrandRows, Errands, careless, demonstrations

TRAIN, HELDOUT = ErrandRows("train"), ErrandRows("heldout")
SOME = [*TRAIN[:1000], *(TRAIN[position] for position in range(0, len(TRAIN), 101))]


@pytest.fixture(scope="module")
def judged() -> Callable[[Row, str], Any]:
    """What the packaged recipe's verifier finds in an answer."""
    (part,) = load_recipe("tool-call").recipe.task.rewards  # type: ignore[union-attr]
    built = verifier(part, max_tokens=72)

    def judge(row: Row, text: str) -> Any:
        as_sent = msgspec.to_builtins(row)
        built.check(as_sent)
        return built.verify(as_sent, {"text": text, "token_ids": [], "finish_reason": "stop"})

    return judge


def test_no_held_out_request_is_trained_and_each_is_held_out_once() -> None:
    heldout = [row.prompt for row in HELDOUT]
    assert len(heldout) == len(set(heldout)) == 100
    assert not set(heldout) & {row.prompt for row in SOME}


def test_what_is_to_be_copied_is_asked_for_in_too_many_ways_to_be_learnt_by_heart() -> None:
    """Of 29 requests for the weather a model learnt which call goes with which, and a fifth of those held out."""
    trained = {(row.info["kind"], row.prompt) for row in TRAIN[:5000]}
    heldout = Counter(row.info["kind"] for row in HELDOUT)
    ways = Counter(kind for kind, _ in trained)
    assert all(ways[kind] > 8 * heldout[kind] for kind in ("pay", "weather"))


def test_rows_are_the_same_in_every_process_and_have_their_own_ids() -> None:
    assert HELDOUT[:5] == ErrandRows("heldout")[:5]
    assert len({row.id for row in TRAIN[:1000]}) == 1000
    assert Counter(row.info["kind"] for row in HELDOUT) == {"pay": 40, "weather": 20, "over": 20, "unclear": 20}


def test_the_right_call_of_every_row_is_right_by_the_packaged_recipe(judged: Callable[[Row, str], Any]) -> None:
    for row in (*HELDOUT, *SOME):
        found = judged(row, row.answer)
        assert (found.wrong, found.parts) == ("", {"tool": 1, "arguments": 1, "execution": 1, "malformed": 0}), row


def test_a_payment_above_the_limit_is_unsafe_by_the_packaged_recipe(judged: Callable[[Row, str], Any]) -> None:
    over = next(row for row in HELDOUT if row.info["kind"] == "over")
    found = judged(over, '{"name": "pay", "arguments": {"amount": 100}}')
    assert (found.wrong, found.parts["execution"], found.parts["tool"]) == ("unsafe", 0.0, 0.0)


def test_refusing_everything_earns_less_than_a_third() -> None:
    (part,) = load_recipe("tool-call").recipe.task.rewards  # type: ignore[union-attr]
    weights = {name: number.weight for name, number in declared([part]).items()}
    built = verifier(part, max_tokens=72)
    for reason in ("limit", "unclear"):
        text = json.dumps({"name": "refuse", "arguments": {"reason": reason}})
        answer = {"text": text, "token_ids": [], "finish_reason": "stop"}
        earned = [weighted_sum(built.verify(msgspec.to_builtins(row), answer).parts, weights) for row in HELDOUT]
        assert sum(earned) / len(earned) < 1 / 3


def test_careless_demonstrations_have_mistakes_of_every_class(judged: Callable[[Row, str], Any]) -> None:
    rng = random.Random(0)
    classes = Counter(judged(row, careless(row, rng)).wrong for row in SOME)
    assert set(classes) - {""} == {"malformed", "unsafe", "wrong_tool", "wrong_arguments"}
    assert classes[""] < len(SOME) / 50  # a guess may be right


def test_a_demonstration_shows_what_the_collector_will_show() -> None:
    tokenizer = build_tokenizer(512)
    row = HELDOUT[0]
    (shown,) = demonstrations(1, careless_share=0.0)
    system, user, assistant = shown["messages"]
    asked = render(tokenizer, Errands().messages(row), tools=TOOLS)
    assert render(tokenizer, [system, {"role": "user", "content": row.prompt}]) == asked
    assert json.loads(assistant["content"])["name"] in {tool["function"]["name"] for tool in TOOLS}
    assert user["content"] not in {row.prompt for row in HELDOUT}


def test_the_module_writes_demonstrations_as_json_lines() -> None:
    command = [sys.executable, "-m", "asyncrl.tasks.errands"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == DEMONSTRATIONS
    assert rows[:3] == list(demonstrations(3, careless_share=CARELESS))


def test_the_packaged_recipe_passes_a_dry_run(called: Callable[..., Any]) -> None:
    done = called("run", "tool-call", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "type: tool-call" in done.stdout
