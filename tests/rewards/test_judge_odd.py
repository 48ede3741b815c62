"""Replies that look like a verdict and are none, servers that forget to count, and what only shows at the start."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from asyncrl.config.rewards import Judge
from asyncrl.rewards.judge import JudgePart
from asyncrl.rewards.judge_limits import BudgetSpent
from asyncrl.rewards.pool import VerifierError
from tests.rewards.judge_server import LIMIT_S, completion, failure, judging, serving, unscored, verdict

pytestmark = pytest.mark.asyncio


def message(*, finish_reason: str | None = "stop", **fields: Any) -> web.Response:
    """A chat completion whose message has these fields."""
    choice = {"index": 0, "message": {"role": "assistant", **fields}, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30}
    return web.json_response({"id": "c-1", "object": "chat.completion", "choices": [choice], "usage": usage})


@pytest.mark.parametrize("ended", ["content_filter", "abort", "error", "tool_calls"])
async def test_what_the_judge_did_not_end_itself_is_no_verdict(ended: str) -> None:
    """1 may be the beginning of 10, whatever cut it."""
    async with judging(lambda *_: message(content="1", finish_reason=ended)) as (judge, _):
        error = await unscored(judge)
    assert error.failure == "judge_unreadable"
    assert ended in error.detail


async def test_a_server_that_does_not_say_how_it_ended_is_believed() -> None:
    async with judging(lambda *_: message(content="10", finish_reason=None)) as (judge, _):
        assert (await verdict(judge)).parts["judge"] == 1.0


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"content": None}, "it has no text"),
        ({"content": None, "refusal": "I cannot help."}, "the judge refused: I cannot help."),
        ({"content": None, "reasoning_content": "7", "finish_reason": "length"}, "it was cut off (max_tokens)"),
        ({"content": [{"type": "text", "text": "7"}]}, "it has no text"),
    ],
)
async def test_a_reply_without_text_says_why_and_is_asked_for_the_same_again(fields: dict[str, Any], why: str) -> None:
    async with judging(lambda *_: message(**fields)) as (judge, server):
        error = await unscored(judge)
    assert error.failure == "judge_unreadable"
    assert error.detail == why
    first, second = (asked["messages"] for asked in server.questions)
    assert first == second, "many servers refuse a message without text"


async def test_half_a_character_in_a_reply_costs_no_verdict(tmp_path: Path) -> None:
    async with judging(lambda *_: message(content="so \ud800\n7"), cache=str(tmp_path)) as (judge, server):
        found = [await verdict(judge) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0].detail == "so \\ud800\n7"
    assert len(server.questions) == 1, "it is kept, too"


async def test_a_body_that_no_parser_reads_is_unreadable_and_an_error_sent_as_a_success_is_shown() -> None:
    bodies = ["[" * 100_000, '{"error": {"message": "upstream is gone"}}']
    async with judging(lambda *_: web.Response(text=bodies.pop(0), content_type="application/json")) as (judge, _):
        assert (await unscored(judge)).failure == "judge_unreadable"
        assert "upstream is gone" in (await unscored(judge)).detail


async def test_replies_that_are_not_counted_or_no_replies_are_charged_all_the_same() -> None:
    left = [completion("7", tokens=None), web.json_response({"choices": [], "usage": {"total_tokens": 25}})]
    async with judging(lambda *_: left.pop(0), max_total_tokens=85) as (judge, server):
        await verdict(judge, "a")  # 30 of the trial, and as many for this
        await unscored(judge, "b")
        with pytest.raises(BudgetSpent, match="asked 3 times for 85 tokens"):
            await verdict(judge, "c")
    assert len(server.questions) == 2


async def test_requests_that_are_made_again_keep_the_pace() -> None:
    """By a window over what arrives: no more requests than the pace allows, failed ones included."""
    loop = asyncio.get_running_loop()
    arrived: list[float] = []

    def says(*_: Any) -> web.Response:
        arrived.append(loop.time())
        return failure(503, **{"retry-after-ms": "1"})

    async with judging(says, requests_per_minute=300, retries=3) as (judge, _):
        await asyncio.gather(unscored(judge, "a"), unscored(judge, "b"))
    assert len(arrived) >= 7, "the second may find that nobody is there"
    assert arrived[-1] - arrived[0] >= 0.2 * (len(arrived) - 2)


async def test_a_server_that_is_started_anew_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a judge that is away for some seconds would end the run, with as many answers lost as come meanwhile."""
    monkeypatch.setattr("asyncrl.rewards.judge.AWAY_S", 0.05)
    async with serving(lambda *_: "7") as first:
        judge = JudgePart(Judge(url=first.url, model="m", retries=0, timeout_s=25.0))
        await asyncio.wait_for(judge.start(), LIMIT_S)
    asking = [asyncio.create_task(verdict(judge, text)) for text in "ab"]
    await asyncio.sleep(0.5)
    assert not any(task.done() for task in asking)
    async with serving(lambda *_: "7", port=first.port):
        assert [(await task).parts["judge"] > 0.6 for task in asking] == [True, True]
    await judge.close()


async def test_one_that_stays_away_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.rewards.judge.AWAY_S", 0.05)
    async with serving(lambda *_: "7") as server:
        judge = JudgePart(Judge(url=server.url, model="m", retries=0, timeout_s=1.0))
        await asyncio.wait_for(judge.start(), LIMIT_S)
    assert "no reply within 1 s" in (await unscored(judge)).detail
    assert "ConnectError" in (await unscored(judge)).detail, "at once: as many wait behind it as there are answers"
    await judge.close()


@pytest.mark.parametrize("key", ["sk-1\n", "sk-1\r", '"sk 1"', "sk-\N{EN DASH}1"])
async def test_a_key_that_cannot_be_one_is_told_without_it(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    judge = JudgePart(Judge(url="http://127.0.0.1:1/v1", model="m", api_key_env="JUDGE_KEY"))
    with pytest.raises(VerifierError, match=r"JUDGE_KEY holds .* which no key has") as caught:
        await judge.start()
    assert "sk-" not in str(caught.value)


async def test_a_server_without_encryption_is_told_as_one() -> None:
    """Not as one that is not there, which may be refused, unknown, or without a certificate."""
    async with serving(lambda *_: "7") as server:
        judge = JudgePart(Judge(url=server.url.replace("http:", "https:"), model="m", retries=0))
        with pytest.raises(VerifierError, match=r"cannot be asked: Connection error.*SSL"):
            await asyncio.wait_for(judge.start(), LIMIT_S)
        await judge.close()


async def test_a_model_that_refuses_settings_is_told_at_the_start_with_what_to_set() -> None:
    refuses = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
    async with serving(lambda *_: "7") as server:
        server.trial = failure(400, refuses)
        judge = JudgePart(Judge(url=server.url, model="o4"))
        with pytest.raises(VerifierError, match=r"Use 'max_completion_tokens'.*\n.*max_tokens: null.*extra_body") as e:
            await asyncio.wait_for(judge.start(), LIMIT_S)
        await judge.close()
    assert len(str(e.value).splitlines()) <= 3


async def test_a_kept_reply_that_cannot_be_read_is_asked_for_once_and_replaced(tmp_path: Path) -> None:
    """As after a version of asyncrl that read it otherwise."""
    async with judging(lambda *_: "7", cache=str(tmp_path)) as (judge, server):
        await verdict(judge)
        table = sqlite3.connect(tmp_path / "judge.sqlite")
        table.execute("UPDATE replies SET reply = '7 or 8'")
        table.commit()
        table.close()
        assert [(await verdict(judge)).parts["judge"] for _ in range(3)] == [pytest.approx(6 / 9)] * 3
        assert len(server.questions) == 2
