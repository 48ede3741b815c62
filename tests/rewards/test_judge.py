"""A judge behind a real server that is down, late, busy, talks nonsense, or is fine."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from asyncrl.config.convert import convert
from asyncrl.config.recipe import Collector
from asyncrl.config.rewards import Judge
from asyncrl.rewards.judge import JudgePart
from asyncrl.rewards.judge_cache import ReplyCache
from asyncrl.rewards.judge_limits import BudgetSpent, Pace
from asyncrl.rewards.pool import VerifierError
from asyncrl.rewards.scoring import Score
from asyncrl.tasks.base import Answer, Row
from asyncrl.tasks.verify import scoring_of
from tests.rewards.judge_server import (
    LIMIT_S,
    ROW,
    Scripted,
    completion,
    failure,
    judging,
    said,
    serving,
    unscored,
    verdict,
)

pytestmark = pytest.mark.asyncio


async def test_its_verdict_is_the_part_and_the_question_goes_as_it_should() -> None:
    async with judging(lambda *_: "Good, if short.\n7", name="taste", max_tokens=99) as (judge, server):
        finding = await verdict(judge)
    assert finding.parts == {"taste": pytest.approx(6 / 9)}
    assert (finding.wrong, finding.detail) == ("", "Good, if short.\n7")
    (asked,) = server.questions
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("m", 0.0, 99)
    (message,) = asked["messages"]
    assert message["role"] == "user"
    assert "four" in message["content"]
    assert server.trials == 1


async def test_a_poor_answer_has_a_class_and_as_a_violation_only_the_best_is_none() -> None:
    async with judging(lambda *_: "2") as (judge, _):
        assert (await verdict(judge)).wrong == "judged_poor"
    replies = iter(("1", "0"))
    async with judging(lambda *_: next(replies), role="violation", scale=(0.0, 1.0)) as (judge, _):
        assert [(await verdict(judge)).parts["judge"] for _ in range(2)] == [0.0, -1.0]


async def test_settings_that_a_model_refuses_are_not_sent_and_other_fields_are() -> None:
    keys = {"temperature": None, "max_tokens": None, "extra_body": {"reasoning_effort": "low"}}
    async with judging(lambda *_: "7", **keys) as (judge, server):
        await verdict(judge)
    (asked,) = server.questions
    assert "temperature" not in asked
    assert "max_tokens" not in asked
    assert asked["reasoning_effort"] == "low"


async def test_a_busy_server_is_asked_again_when_it_says_so() -> None:
    left = [failure(429, **{"Retry-After": "0.05"}), failure(500), completion("7")]
    async with judging(lambda *_: left.pop(0)) as (judge, server):
        assert (await verdict(judge)).parts["judge"] > 0.6
    assert len(server.questions) == 3


@pytest.mark.parametrize("status", [429, 500, 503, 401, 404])
async def test_one_that_stays_down_leaves_the_answer_unscored(status: int) -> None:
    async with judging(lambda *_: failure(status, "no more", **{"retry-after-ms": "5"})) as (judge, server):
        error = await unscored(judge)
    assert error.failure == "judge_unavailable"
    assert f"{status}" in error.detail
    assert "no more" in error.detail
    assert len(server.questions) == (3 if status in (429, 500, 503) else 1), "a wrong key does not get right by asking"


async def test_a_question_that_is_refused_says_nothing_of_the_server() -> None:
    async with judging(lambda *_: failure(400, "too long")) as (judge, server):
        assert (await unscored(judge)).failure == "judge_refused"
    assert len(server.questions) == 1


async def test_one_that_hangs_or_is_gone_is_unavailable() -> None:
    async with judging(lambda *_: 60.0, retries=0, timeout_s=2.0) as (judge, server):
        error = await unscored(judge)
        assert error.failure == "judge_unavailable"
        assert "timed out" in error.detail.lower() or "no reply within" in error.detail
    async with serving(lambda *_: "7") as server:
        judge = JudgePart(Judge(url=server.url, model="m", retries=0, timeout_s=2.0))
        await asyncio.wait_for(judge.start(), LIMIT_S)
    assert (await unscored(judge)).failure == "judge_unavailable"
    await judge.close()


async def test_one_that_sends_a_byte_now_and_then_is_late_all_the_same() -> None:
    """The client's own limit begins anew with each byte."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = (b"10" if b"This is a trial" in await reader.readuntil(b"best).") else b"") and _body("10")
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (len(body) or 999)
        )
        writer.write(body)
        try:
            while not body:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)
        except ConnectionError:
            pass
        writer.close()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    part = Judge(url=f"http://127.0.0.1:{port}/v1", model="m", retries=0, timeout_s=2.0)
    judge = JudgePart(part)
    try:
        await asyncio.wait_for(judge.start(), LIMIT_S)
        assert (await unscored(judge)).detail == "no reply within 2 s"
    finally:
        await judge.close()
        server.close()


def _body(text: str) -> bytes:
    body = completion(text).body
    assert isinstance(body, bytes)
    return body


@pytest.mark.parametrize(
    "nonsense",
    [
        "I cannot say.",
        "",
        web.Response(text="<html>hello</html>", content_type="text/html"),
        web.Response(text="{", content_type="application/json"),
        web.json_response({"choices": []}),
        web.json_response({"choices": [{"message": None}]}),
        web.json_response([1, 2]),
        completion("Score: 1", finish_reason="length"),
    ],
    ids=["words", "nothing", "html", "half", "no choice", "no message", "list", "cut off"],
)
async def test_a_reply_without_a_verdict_is_never_a_number(nonsense: Any) -> None:
    def says(*_: Any) -> Any:
        if isinstance(nonsense, str):
            return nonsense
        return web.Response(body=nonsense.body, content_type=nonsense.content_type)  # one is sent once

    async with judging(says) as (judge, _):
        assert (await unscored(judge)).failure == "judge_unreadable"


async def test_an_unreadable_reply_is_asked_again_with_the_reason() -> None:
    replies = iter(("I like it a lot.", "9"))
    async with judging(lambda *_: next(replies)) as (judge, server):
        assert (await verdict(judge)).parts["judge"] == pytest.approx(8 / 9)
    first, second = (asked["messages"] for asked in server.questions)
    assert second[:2] == [*first, {"role": "assistant", "content": "I like it a lot."}]
    assert "could not be read: it does not end with a number" in second[2]["content"]


@pytest.mark.slow
async def test_a_silent_server_is_asked_once_for_each_answer_until_it_speaks() -> None:
    there: list[str] = []
    async with judging(lambda *_: there[0] if there else 60.0, timeout_s=2.0, retries=1) as (judge, server):
        await unscored(judge)
        asked = len(server.questions)
        await unscored(judge)
        assert len(server.questions) == asked + 1
        there.append("7")
        assert (await verdict(judge)).parts["judge"] > 0.6


async def test_giving_up_an_answer_gives_up_its_request() -> None:
    async with judging(lambda *_: 60.0) as (judge, server):
        asking = asyncio.create_task(judge.verify(ROW, said("four")))
        async with asyncio.timeout(LIMIT_S):
            await server.asked.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await server.given_up.wait()
        assert judge._places._value == judge._part.at_once, "its place is free again"


async def test_no_more_are_asked_at_once_than_allowed() -> None:
    async with judging(lambda *_: 0.05, at_once=3) as (judge, server):
        await asyncio.gather(*(verdict(judge, f"answer {n}") for n in range(12)))
    assert len(server.questions) == 12
    assert server.most_at_once <= 3


async def test_a_pace_is_kept_and_who_gives_up_takes_nobodys_turn() -> None:
    loop = asyncio.get_running_loop()
    pace = Pace(per_minute=600)
    began = loop.time()
    await pace.turn()
    waiting = [asyncio.create_task(pace.turn()) for _ in range(50)]
    last = asyncio.create_task(pace.turn())
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.wait_for(last, 3.0)  # 51 turns would take 5.1 s
    assert loop.time() - began >= 0.099


async def test_a_spent_budget_is_an_end_with_a_sentence() -> None:
    async with judging(lambda *_: "7", max_calls=3) as (judge, server):
        await verdict(judge, "a")
        await verdict(judge, "b")
        with pytest.raises(BudgetSpent, match=r"judge 'judge' is spent: max_calls is 3.*\n.*--resume"):
            await verdict(judge, "c")
    assert len(server.questions) == 2, "the trial is one of them"
    async with judging(lambda *_: "7", max_total_tokens=50) as (judge, server):
        await verdict(judge, "a")
        with pytest.raises(BudgetSpent, match="asked 2 times for 60 tokens"):
            await verdict(judge, "b")


async def test_a_spent_budget_is_no_fault_of_an_answer() -> None:
    """Through the whole scoring: it ends the collector, where a failure would leave the answer out."""
    async with serving(lambda *_: "7") as server:
        rewards = [{"type": "judge", "url": server.url, "model": "m", "max_calls": 2}]
        scoring = _scoring(rewards)
        try:
            await asyncio.wait_for(scoring.start(), LIMIT_S)
            first = await scoring.score(Row("f:1", "2+2?", "4"), Answer("4", (1,), "stop"))
            assert (first.failure, first.parts) == ("", {"judge": pytest.approx(6 / 9)})
            with pytest.raises(BudgetSpent):
                await scoring.score(Row("f:1", "2+2?", "4"), Answer("5", (1,), "stop"))
        finally:
            await scoring.close()


def _scoring(rewards: list[dict[str, Any]]) -> Any:
    task = convert({"task": {"type": "single-turn", "data": {"train": "never-read.jsonl"}, "rewards": rewards}}).task
    return scoring_of(task, Collector(), seed=0, max_tokens=20)


async def test_several_judges_have_a_name_each() -> None:
    def says(_: Scripted, asked: dict[str, Any]) -> str:
        return "10" if "kind" in asked["messages"][0]["content"] else "1"

    async with serving(says) as server:
        at = {"type": "judge", "url": server.url, "model": "m"}
        scoring = _scoring(
            [
                {**at, "name": "kind", "prompt": "Is it kind? {answer}"},
                {**at, "name": "right", "prompt": "Is it right? {answer} {expected}", "weight": 2.0},
            ]
        )
        try:
            await asyncio.wait_for(scoring.start(), LIMIT_S)
            score: Score = await scoring.score(Row("f:1", "2+2?", "4"), Answer("4", (1,), "stop"))
        finally:
            await scoring.close()
    assert score.parts == {"kind": 1.0, "right": 0.0}
    assert (score.reward, score.wrong) == (1.0, "judged_poor")


# --- what was asked before ------------------------------------------------------------------------------------------


async def test_a_reply_is_kept_for_the_next_process_and_read_anew(tmp_path: Path) -> None:
    cache = str(tmp_path / "replies")
    async with serving(lambda *_: "7") as server:
        at = {"url": server.url, "model": "m", "cache": cache}
        for keys, asked in (({}, 1), ({}, 1), ({"temperature": 0.5}, 2), ({"prompt": "Nice? {answer}"}, 3)):
            judge = JudgePart(Judge(**{**at, **keys}))
            await asyncio.wait_for(judge.start(), LIMIT_S)
            assert (await verdict(judge)).parts["judge"] == pytest.approx(6 / 9)
            await judge.close()
            assert len(server.questions) == asked, "another setting is another question"


async def test_several_processes_may_keep_replies_and_one_that_is_killed_leaves_no_half_of_one(
    tmp_path: Path, start: Callable[..., Any]
) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from asyncrl.rewards.judge_cache import ReplyCache\n"
        "cache = ReplyCache(Path(sys.argv[1]))\n"
        "for n in range(10**6 if sys.argv[2] == 'killed' else 300):\n"
        "    cache.put(b'%d' % n, f'{n} ' * 500)\n"
        "    if n == 50: print('writes', flush=True)\n"
    )
    killed, *others = (start("-c", program, str(tmp_path), name) for name in ("killed", "a", "b"))
    assert await asyncio.to_thread(killed.stdout.readline) == "writes\n"
    killed.kill()
    for process in others:
        said, errors = await asyncio.to_thread(process.communicate, timeout=LIMIT_S)
        assert process.returncode == 0, said + errors
    cache = ReplyCache(tmp_path)
    assert all(cache.get(b"%d" % n) == f"{n} " * 500 for n in range(300))
    cache.close()


async def test_what_was_unreadable_is_not_kept(tmp_path: Path) -> None:
    replies = iter(("?", "?", "7"))
    async with judging(lambda *_: next(replies), cache=str(tmp_path)) as (judge, server):
        await unscored(judge)
        assert (await verdict(judge)).parts["judge"] == pytest.approx(6 / 9)
        assert len(server.questions) == 3
        await verdict(judge)
        assert len(server.questions) == 3


async def test_a_folder_that_cannot_be_used_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with serving(lambda *_: "7") as server:
        judge = JudgePart(Judge(url=server.url, model="m", cache=str(tmp_path / "file")))
        with pytest.raises(VerifierError, match="cannot keep replies in"):
            await judge.start()


async def test_a_full_disk_costs_no_score(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with judging(lambda *_: "7", cache=str(tmp_path)) as (judge, _):
        other = sqlite3.connect(tmp_path / "judge.sqlite")
        other.execute("DROP TABLE replies")
        other.close()
        with caplog.at_level(logging.WARNING):
            assert (await verdict(judge)).parts["judge"] == pytest.approx(6 / 9)
    assert "keeps no more replies" in caplog.text


# --- the start ------------------------------------------------------------------------------------------------------


async def test_nobody_there_is_told_at_the_start() -> None:
    async with serving(lambda *_: "7") as server:
        url = server.url
    judge = JudgePart(Judge(url=url, model="m", retries=0))
    with pytest.raises(VerifierError, match=rf"judge 'judge', m at {url}, cannot be asked: Connection error") as caught:
        await asyncio.wait_for(judge.start(), LIMIT_S)
    assert len(str(caught.value).splitlines()) <= 3


async def test_a_key_that_is_not_set_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    judge = JudgePart(Judge(url="http://127.0.0.1:1/v1", model="m", api_key_env="JUDGE_KEY"))
    with pytest.raises(VerifierError, match="JUDGE_KEY, which is not set here; export JUDGE_KEY="):
        await judge.start()


async def test_a_key_is_sent_and_never_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret-1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-somebody-else")
    tells = failure(401, "wrong key: sk-secret-1")
    with caplog.at_level(logging.DEBUG, logger="asyncrl"):
        async with judging(lambda *_: tells, api_key_env="JUDGE_KEY") as (judge, server):
            error = await unscored(judge)
    assert server.headers[0]["Authorization"] == "Bearer sk-secret-1"
    assert "wrong key: ***" in error.detail
    assert "sk-secret-1" not in caplog.text
    async with judging(lambda *_: "7") as (judge, server):
        assert "sk-of-somebody-else" not in str(server.headers), "this server is not who that key is for"


async def test_a_budget_of_tokens_needs_a_server_that_counts_them() -> None:
    async def uncounted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"best).")
        body = completion("10", tokens=None).body
        assert isinstance(body, bytes)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body))
        writer.write(body)
        writer.close()

    server = await asyncio.start_server(uncounted, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    judge = JudgePart(Judge(url=url, model="m", max_total_tokens=1000))
    try:
        with pytest.raises(VerifierError, match="does not say how many tokens it used"):
            await asyncio.wait_for(judge.start(), LIMIT_S)
    finally:
        await judge.close()
        server.close()
