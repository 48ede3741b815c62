"""The verifier pool with real processes: scores, every kind of failure, limits, cancelling, starting and closing."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from asyncrl.rewards.pool import VerifierError, VerifierPool
from asyncrl.rewards.scoring import Score, Scoring

MakePool = Callable[..., AbstractAsyncContextManager[Scoring]]
STUCK = "5**5**5**5"
EVAL = "def score(self, row, answer): return eval(answer['text'])"


@dataclass(frozen=True, slots=True)
class Row:
    id: str = "1"
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    token_ids: tuple[int, ...] = (1, 2)
    finish_reason: str = "stop"


async def score(pool: Scoring, text: str) -> Score:
    return await asyncio.wait_for(pool.score(Row(), Answer(text)), 60)


@pytest.mark.asyncio
async def test_parts_are_weighted_into_the_reward(make_pool: MakePool) -> None:
    body = (
        "def __init__(self, factor): self.factor = factor\n"
        "def part_weights(self): return {'a': self.factor}\n"
        "def score(self, row, answer): return {'a': len(answer['token_ids']), 'b': row['info']['b'], 'c': True}"
    )
    async with make_pool(body, arguments={"factor": 10}) as pool:
        result = await pool.score(Row(info={"b": 0.5}), Answer("x"))
        assert result == Score(parts={"a": 2.0, "b": 0.5, "c": 1.0}, reward=21.5, failure="")
        assert pool.counts["scored"] == 1


@pytest.mark.asyncio
async def test_other_parts_than_the_first_answers_are_counted_and_said_once(
    make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_pool(EVAL, workers=2) as pool:
        assert (await score(pool, "{'a': 1.0, 'b': None}")).failure == "verifier_none"
        assert (await score(pool, "{'a': 1.0, 'b': 0.5}")).reward == 1.5
        for _ in range(2):
            odd = await score(pool, "{'a': 1.0}")
            assert (odd.failure, odd.parts) == ("verifier_invalid", {"a": 1.0})
            assert math.isnan(odd.reward)
        assert pool.counts["verifier_invalid"] == 2
        assert caplog.text.count("for the first answer 'a', 'b'") == 1
        assert (await score(pool, "{'b': 0, 'a': 0}")).reward == 0.0


@pytest.mark.asyncio
async def test_a_weight_without_a_part_is_counted(make_pool: MakePool, caplog: pytest.LogCaptureFixture) -> None:
    async with make_pool(
        "def part_weights(self): return {'corect': 2.0}\ndef score(self, row, answer): return 1.0"
    ) as pool:
        assert (await score(pool, "")).failure == "verifier_invalid"
        assert "part_weights() has 'corect', and score returned 'reward'" in caplog.text


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("expression", "failure"),
    [
        ("1/0", "verifier_raised"),
        ("sys.exit(3)", "verifier_raised"),
        ("int('\\ud800')", "verifier_raised"),
        ("[].append(1)", "verifier_none"),
        ("{'a': float('nan')}", "verifier_nan"),
        ("float('inf')", "verifier_invalid"),
        ("'good'", "verifier_invalid"),
        ("[1.0, 0.0]", "verifier_invalid"),
        ("os._exit(0)", "verifier_died"),
        ("os.kill(os.getpid(), 9)", "verifier_died"),
        ("os.kill(os.getpid(), 11)", "verifier_died"),
        ("os.closerange(0, 100)", "verifier_died"),
    ],
)
async def test_each_failure_is_unscored_under_its_own_name_and_the_next_call_is_scored(
    make_pool: MakePool, expression: str, failure: str
) -> None:
    async with make_pool(EVAL) as pool:
        for _ in range(2):
            failed = await score(pool, expression)
            assert math.isnan(failed.reward)
            assert failed.failure == failure
            assert (await score(pool, "0.25")).reward == 0.25
        assert {name: n for name, n in pool.counts.items() if n} == {failure: 2, "scored": 2}


@pytest.mark.asyncio
@pytest.mark.parametrize("value", [10**100, object(), "\ud800"])
async def test_a_row_that_cannot_be_sent_is_a_failure_too(make_pool: MakePool, value: Any) -> None:
    async with make_pool(EVAL) as pool:
        assert (await pool.score(Row(info={"x": value}), Answer("1"))).failure == "verifier_invalid"
        assert (await score(pool, "1")).reward == 1.0


@pytest.mark.asyncio
async def test_what_the_task_prints_or_reads_does_not_touch_the_protocol(
    make_pool: MakePool, capfd: pytest.CaptureFixture[str]
) -> None:
    body = (
        "def score(self, row, answer):\n"
        "    print('from print', flush=True)\n"
        "    os.write(1, b'from write\\n')\n"
        "    subprocess.run(['echo', 'from child'], check=True)\n"
        "    return float(sys.stdin.read() == '' and os.read(0, 10) == b'')"
    )
    async with make_pool(body) as pool:
        for _ in range(3):
            assert (await score(pool, "")).reward == 1.0
    captured = capfd.readouterr()
    assert captured.out == ""
    assert [captured.err.count(f"from {source}") for source in ("print", "write", "child")] == [3, 3, 3]


@pytest.mark.asyncio
async def test_a_large_answer_arrives_whole(make_pool: MakePool) -> None:
    async with make_pool("def score(self, row, answer): return len(answer['text'])") as pool:
        assert (await score(pool, "x" * 5_000_000)).reward == 5e6


@pytest.mark.asyncio
async def test_a_stuck_score_is_killed_and_others_go_on(make_pool: MakePool) -> None:
    async with make_pool(EVAL, workers=2, timeout_s=2.0) as pool:
        results = await asyncio.gather(score(pool, STUCK), *(score(pool, f"{n}") for n in range(20)))
        assert results[0].failure == "verifier_timeout"
        assert [result.reward for result in results[1:]] == list(range(20))
        assert (await asyncio.gather(score(pool, "1"), score(pool, "2")))[0].reward == 1.0


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fault", "failure"), [(STUCK, "verifier_timeout"), ("os._exit(1)", "verifier_died"), ("1/0", "verifier_raised")]
)
async def test_in_a_batch_only_the_call_at_fault_fails_and_each_other_is_scored_once(
    make_pool: MakePool, tmp_path: Path, fault: str, failure: str
) -> None:
    begun = tmp_path / "begun"
    body = (
        "def score(self, row, answer):\n"
        f"    with open({str(begun)!r}, 'a') as file: file.write(row['id'] + '\\n')\n"
        "    return eval(answer['text'])"
    )
    async with make_pool(body, timeout_s=2.0) as pool:
        pool._pool._slots[0].most = 10  # as after as many quick scores
        texts = [str(n) for n in range(10)]
        texts[4] = fault
        calls = (pool.score(Row(id=f"call-{n}"), Answer(text)) for n, text in enumerate(texts))
        results = await asyncio.wait_for(asyncio.gather(*calls), 60)
        assert [result.failure for result in results] == [""] * 4 + [failure] + [""] * 5
        assert [result.reward for n, result in enumerate(results) if n != 4] == [n for n in range(10) if n != 4]
    assert begun.read_text().split() == [f"call-{n}" for n in range(10)]


@pytest.mark.asyncio
async def test_cancelling_one_call_of_a_batch_leaves_the_others_their_scores(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    stuck = f"open({str(pipe)!r}, 'w').close() or {STUCK}"
    async with make_pool(EVAL) as pool:
        pool._pool._slots[0].most = 10
        calls = [asyncio.create_task(score(pool, text)) for text in ("0", stuck, "2", "3")]
        await asyncio.wait_for(asyncio.to_thread(pipe.read_bytes), 30)  # returns when the second one runs
        calls[1].cancel()
        calls[3].cancel()
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
        assert [isinstance(result, asyncio.CancelledError) for result in results] == [False, True, False, True]
        assert [result.reward for result in results if isinstance(result, Score)] == [0.0, 2.0]
        assert {name: n for name, n in pool.counts.items() if n} == {"scored": 2}


@pytest.mark.asyncio
async def test_slow_scores_go_one_by_one_and_quick_ones_together(make_pool: MakePool) -> None:
    async with make_pool("def score(self, row, answer): return time.sleep(float(answer['text'])) or 1.0") as pool:
        for _ in range(50):  # how many are quick enough depends on the machine; slow ones are slow everywhere
            await asyncio.gather(*(score(pool, "0") for _ in range(8)))
            if pool._pool._slots[0].most > 1:
                break
        assert pool._pool._slots[0].most > 1
        await asyncio.gather(*(score(pool, "0.01") for _ in range(3)))
        assert pool._pool._slots[0].most == 1


@pytest.mark.asyncio
async def test_the_processes_that_a_killed_score_started_are_killed_with_it(
    make_pool: MakePool, tmp_path: Path, process_ends_within: Callable[[int, float], bool]
) -> None:
    note = tmp_path / "pid"
    body = (
        "def score(self, row, answer):\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        f"    open({str(note)!r}, 'w').write(str(child.pid))\n"
        f"    return {STUCK}"
    )
    async with make_pool(body, timeout_s=2.0) as pool:
        assert (await score(pool, "")).failure == "verifier_timeout"
        assert process_ends_within(int(note.read_text()), 10)


@pytest.mark.asyncio
async def test_a_reply_that_came_in_time_counts_though_this_process_was_busy(make_pool: MakePool) -> None:
    async with make_pool(EVAL, timeout_s=1.0) as pool:
        call = asyncio.create_task(score(pool, "1"))
        for _ in range(10):  # the request is written within a few turns of the loop
            await asyncio.sleep(0)
        time.sleep(2.5)  # noqa: ASYNC251  # the loop stands still beyond the limit: this is what is tested
        assert (await call).failure == ""


@pytest.mark.asyncio
async def test_the_wait_for_a_free_worker_is_not_part_of_the_limit(make_pool: MakePool) -> None:
    async with make_pool("def score(self, row, answer): time.sleep(0.4); return 1.0", timeout_s=1.2) as pool:
        results = await asyncio.gather(*(score(pool, "") for _ in range(4)))
        assert [result.failure for result in results] == [""] * 4


@pytest.mark.asyncio
async def test_a_worker_that_ended_between_calls_is_replaced_without_a_failure(make_pool: MakePool) -> None:
    async with make_pool(EVAL) as pool:
        worker = pool._pool._slots[0].worker  # nothing public tells that the event loop has noticed
        assert worker is not None
        worker.process.kill()
        await asyncio.wait_for(worker.process.wait(), 30)
        assert (await score(pool, "1")).failure == ""


@pytest.mark.asyncio
async def test_calls_are_served_in_their_order(make_pool: MakePool) -> None:
    body = "n = 0\ndef score(self, row, answer):\n    self.n += 1\n    return self.n"
    async with make_pool(body) as pool:
        results = await asyncio.gather(*(score(pool, "") for _ in range(20)))
        assert [result.reward for result in results] == list(range(1, 21))


@pytest.mark.asyncio
async def test_workers_score_at_the_same_time(make_pool: MakePool, tmp_path: Path) -> None:
    """Each opens one end of a named pipe, which blocks until another process opens the other end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    body = f"def score(self, row, answer):\n    open({str(pipe)!r}, answer['text']).close()\n    return 1.0"
    async with make_pool(body, workers=2) as pool:
        assert [r.reward for r in await asyncio.gather(score(pool, "rb"), score(pool, "wb"))] == [1.0, 1.0]
    async with make_pool(body, workers=1, timeout_s=1.0) as pool:
        assert (await asyncio.gather(score(pool, "rb"), score(pool, "wb")))[0].failure == "verifier_timeout"


@pytest.mark.asyncio
async def test_a_cancelled_call_does_not_leave_its_reply_to_the_next(make_pool: MakePool, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    body = (
        "def score(self, row, answer):\n"
        f"    if answer['text'] == 'slow': open({str(pipe)!r}, 'w').close(); time.sleep(0.2); return 1.0\n"
        "    return 2.0"
    )
    async with make_pool(body) as pool:
        slow = asyncio.create_task(score(pool, "slow"))
        waiting = asyncio.create_task(score(pool, "waiting"))
        await asyncio.wait_for(asyncio.to_thread(pipe.read_bytes), 30)  # returns when the score runs
        slow.cancel()
        waiting.cancel()
        assert all(
            isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(slow, waiting, return_exceptions=True)
        )
        assert [(await score(pool, "quick")).reward for _ in range(3)] == [2.0] * 3
        assert pool.counts["scored"] == 3


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "import no_such_library",
            r"cannot build the task: ModuleNotFoundError: No module named 'no_such_library' \(.*:\d",
        ),
        ("def __init__(self): raise RuntimeError('no licence')", r"cannot build the task: RuntimeError: no licence"),
        ("def __init__(self): sys.exit('bye')", r"cannot build the task: SystemExit: bye"),
        (
            "def part_weights(self): return {'a': 'heavy'}",
            r"cannot build the task: ValueError: part_weights\(\): part 'a'",
        ),
        ("os._exit(7)", r"ended with exit code 7 before it was ready"),
        ("os.kill(os.getpid(), 9)", r"ended with exit code -9 before it was ready"),
    ],
)
async def test_a_task_that_cannot_be_built_is_an_error_at_the_start_and_not_a_hang(
    write_scorer: Callable[[str], str], body: str, message: str
) -> None:
    pool = Scoring(VerifierPool(write_scorer(body), {}, workers=2), timeout_s=1.0)
    with pytest.raises(VerifierError, match=message) as caught:
        await asyncio.wait_for(pool.start(), 30)
    assert len(str(caught.value).splitlines()) == 1
    await pool.close()


@pytest.mark.asyncio
async def test_a_replacement_that_cannot_start_is_an_error_and_not_a_hang(make_pool: MakePool, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    body = f"if os.path.exists({str(broken)!r}): raise ValueError('edited during the run')\n{EVAL}"
    async with make_pool(body) as pool:
        broken.touch()
        assert (await score(pool, "os._exit(1)")).failure == "verifier_died"
        with pytest.raises(VerifierError, match="edited during the run"):
            await score(pool, "1")
        broken.unlink()
        assert (await score(pool, "1")).reward == 1.0


@pytest.mark.asyncio
async def test_a_worker_that_is_killed_while_it_starts_is_started_once_more(
    make_pool: MakePool, tmp_path: Path
) -> None:
    """At the start of a run and within it: as where memory is short for a moment. (Of a task that always ends so, see
    above.)"""
    started = tmp_path / "started"
    body = f"try: os.mkdir({str(started)!r})\nexcept FileExistsError: pass\nelse: os.kill(os.getpid(), 9)\n{EVAL}"
    async with make_pool(body) as pool:
        assert (await score(pool, "1")).reward == 1.0
        started.rmdir()
        assert (await score(pool, "os._exit(1)")).failure == "verifier_died"
        assert (await score(pool, "1")).reward == 1.0
        assert started.exists()


@pytest.mark.asyncio
async def test_closing_ends_calls_in_flight_and_leaves_no_process(
    make_pool: MakePool, tmp_path: Path, process_ends_within: Callable[[int, float], bool]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    body = f"def score(self, row, answer):\n    open({str(pipe)!r}, 'w').write(str(os.getpid()))\n    return {STUCK}"
    async with make_pool(body) as pool:
        calls = [asyncio.create_task(score(pool, "")) for _ in range(2)]
        worker = int(await asyncio.wait_for(asyncio.to_thread(pipe.read_text), 30))
        await pool.close()
        assert process_ends_within(worker, 10)
        assert worker not in map(int, filter(str.isdigit, os.listdir("/proc")))  # reaped: no zombie is left
        errors = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
        assert all(isinstance(error, VerifierError) and "closed" in str(error) for error in errors)
        with pytest.raises(VerifierError, match="closed"):
            await score(pool, "")
