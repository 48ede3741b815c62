"""Part of `verifiers`: mathematical answers, scored as a collector scores them, by WORKERS processes; against a plain
loop of math-verify in one process, which parses a row's answer once for all answers to it.

What is true of each answer is known (`verifiers_answers.py`). Both have to agree, but where the plain loop is wrong in
a form that is known; asyncrl may never be wrong.

Control: a part that keeps every answer, by which memory has to be seen to grow.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.verifiers_answers import KNOWN, Case, cases
from asyncrl.config.recipe import Collector, DataSource, SingleTurnTask
from asyncrl.config.rewards import Function, Math, RewardPart
from asyncrl.tasks.base import Answer
from asyncrl.tasks.base import Row as TaskRow
from asyncrl.tasks.verify import scoring_of

ANSWERS = 10_000
WORKERS = 2
SPEEDUP = 1.5
GROWTH = 1.1  # memory after the last fifth of the answers over that after the second
FIFTHS = 5
LIMIT_S = 1200.0  # of a side, on a machine that is busy
FEW = 400  # answers of the control
KEPT_BYTES = 500_000  # of each answer, by the control
SEED = 0


@dataclass(frozen=True, slots=True)
class Scored:
    """What became of the answers: whether each was found right, None if it is unscored; seconds without the start, and
    CPU seconds of whoever verifies; memory of all workers after each fifth, bytes."""

    verdicts: list[bool | None]
    seconds: float
    cpu_seconds: float
    rss: list[int]

    @property
    def growth(self) -> float:
        return self.rss[-1] / self.rss[1]


def measure(*, quick: bool, say: Say) -> Measured:
    """Rows: `plain`, `asyncrl`, `one worker`, `keeps all`. quick: a tenth of the answers."""
    given = cases(ANSWERS // 10 if quick else ANSWERS, SEED)
    few = given[:FEW]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        expected, plain_s, plain_cpu_s = pool.submit(plain_loop, given).result(LIMIT_S)
    ours = asyncio.run(scored(given, [Math()], workers=WORKERS))
    one = asyncio.run(scored(given, [Math()], workers=1))
    hoard = asyncio.run(scored(few, [Math(), HOARD], workers=WORKERS))
    rows = [
        _row("plain", given, Scored(list(expected), plain_s, plain_cpu_s, [0, 0])),
        _row("asyncrl", given, ours),
        _row("one worker", given, one),
        _row("keeps all", few, hoard),
    ]
    for row in rows:
        say(f"math, {row['side']}: {row['answers']:,} answers in {row['seconds']:.2f} s, wrong about {row['wrong']}")
    sides = zip(given, ours.verdicts, expected, strict=True)
    unexplained = [case for case, one, other in sides if _unexplained(case, one, other)]
    for case in unexplained[:5]:
        say(f"math, not explained: {case.gold!r} against {case.text[-60:]!r}")
    rows[1] |= {f"apart in {form}": n for form, n in sorted(_apart(given, ours.verdicts, expected).items())}
    return Measured(
        rows=rows,
        targets=[
            Target("math: speed over a plain loop's", plain_s / ours.seconds, SPEEDUP, "higher"),
            Target("math: answers of which asyncrl is wrong", float(rows[1]["wrong"]), 0.0, "lower"),
            Target("math: verdicts apart that are not explained", float(len(unexplained)), 0.0, "lower"),
            Target("math: memory of the workers, last fifth over the second", ours.growth, GROWTH, "lower"),
            Target("math: control, the same where all answers are kept", hoard.growth, GROWTH, "higher"),
        ],
    )


def _row(side: str, given: Sequence[Case], found: Scored) -> Row:
    wrong = sum(verdict is not case.right for case, verdict in zip(given, found.verdicts, strict=True))
    memory = {} if not found.rss[-1] else {"mib": round(found.rss[-1] / 2**20, 1), "growth": round(found.growth, 3)}
    per_s = round(len(given) / found.seconds, 1)
    return {
        **{"part": "math", "side": side, "answers": len(given), "seconds": round(found.seconds, 3), "per_s": per_s},
        **{
            "cpu_seconds": round(found.cpu_seconds, 3),
            "wrong": wrong,
            "unscored": found.verdicts.count(None),
            **memory,
        },
    }


def _unexplained(case: Case, ours: bool | None, plain: bool) -> bool:
    return ours is not plain and (case.form not in KNOWN or ours is not case.right)


def _apart(given: Sequence[Case], ours: Sequence[bool | None], plain: Sequence[bool]) -> Counter[str]:
    """How many verdicts are apart, by form."""
    sides = zip(given, ours, plain, strict=True)
    return Counter(case.form or "no form" for case, one, other in sides if one is not other)


def plain_loop(given: Sequence[Case]) -> tuple[list[bool], float, float]:
    """Verdicts, seconds and CPU seconds of math-verify as its documentation has it."""
    from math_verify import parse, verify

    verify(parse("$1$"), parse(r"\boxed{1}"))  # imports and compiles what it needs before the clock is started
    began, began_cpu = time.perf_counter(), time.process_time()
    verdicts, source, gold = [], "", []
    for case in given:
        if case.gold != source:
            source, gold = case.gold, parse(f"${case.gold}$")
        verdicts.append(bool(verify(gold, parse(case.text))))
    return verdicts, time.perf_counter() - began, time.process_time() - began_cpu


async def scored(given: Sequence[Case], parts: list[RewardPart], *, workers: int) -> Scored:
    """The answers, as many at once as a collector may have them: all."""
    task = SingleTurnTask(type="single-turn", data=DataSource(train="nowhere.jsonl"), rewards=parts)
    scoring = scoring_of(task, Collector(score_workers=workers), seed=0, max_tokens=1024)
    await scoring.start()
    try:
        first = await scoring.score(TaskRow("0", "p", "1"), Answer(r"\boxed{x}", (), "stop"))  # imports
        assert first.reward == 0.0, first
        verdicts: list[bool | None] = []
        rss, seconds, began_cpu = [], 0.0, _cpu_seconds()
        size = -(-len(given) // FIFTHS)
        for start in range(0, len(given), size):
            began = time.perf_counter()
            scores = await asyncio.wait_for(
                asyncio.gather(
                    *(
                        scoring.score(TaskRow(f"{n}", "p", case.gold), Answer(case.text, (), "stop"))
                        for n, case in enumerate(given[start : start + size])
                    )
                ),
                LIMIT_S,
            )
            seconds += time.perf_counter() - began
            verdicts += [None if score.failure else score.parts["math"] == 1.0 for score in scores]
            rss.append(_memory())
        return Scored(verdicts, seconds, _cpu_seconds() - began_cpu, rss)
    finally:
        await scoring.close()


def _workers() -> list[psutil.Process]:
    """This process's verifier processes."""
    children = psutil.Process().children()  # type: ignore[no-untyped-call]
    return [child for child in children if "asyncrl.rewards.worker" in child.cmdline()]


def _memory() -> int:
    return sum(worker.memory_info().rss for worker in _workers())


def _cpu_seconds() -> float:
    return sum(sum(worker.cpu_times()[:2]) for worker in _workers())


HOARD = Function(function="asyncrl.benchmarks.verifiers_math:keep", name="keeps", role="constraint")
_kept: list[bytearray] = []


def keep(row: Any, answer: Any) -> float:
    """The control's part."""
    _kept.append(bytearray(answer.text.encode()) + bytearray(KEPT_BYTES))
    return 0.0
