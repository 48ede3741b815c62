"""Part of `verifiers`: what an answer that hangs in C, where nothing but killing helps, costs the others.

WORKERS of them at once, so that every process is stuck, among others that are scored in a known time. None of those may
wait longer than its own turn and the limit: seconds until all are scored, over the seconds that they take one after the
other, in one process, and the limit.

Control: no limit. Each process is stuck for good, and at the time by which all were scored with a limit some are not.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.rewards.pool import VerifierPool

LIMIT_S = 3.0
NO_LIMIT_S = 3600.0
WORKERS = 2
WORK_S = 0.02  # of CPU, of each of the others
OTHERS = 300
STUCK = "stuck"


class Scorer:
    """Takes WORK_S for an answer, and for ever for STUCK."""

    def score(self, row: dict[str, Any], answer: dict[str, Any]) -> float:
        if answer["text"] == STUCK:
            return float(5**5**5**5 > 0)  # one multiplication after the other, in C
        end = time.process_time() + WORK_S
        while time.process_time() < end:
            pass
        return 1.0

    def verify(self, part: str, row: dict[str, Any], answer: dict[str, Any]) -> float:
        return self.score(row, answer)

    def part_weights(self) -> dict[str, float]:
        return {}


def measure(*, quick: bool, say: Say) -> Measured:
    """Rows: `one after the other`, `hanging`, and `no limit`. quick: half of the others."""
    others = OTHERS // 2 if quick else OTHERS
    serial_s, _, _ = asyncio.run(scored(others, workers=1))
    hung_s, done, late = asyncio.run(scored(others, stuck=WORKERS))
    bound_s = serial_s + LIMIT_S
    _, unlimited, _ = asyncio.run(scored(others, stuck=WORKERS, limit_s=NO_LIMIT_S, wait_s=bound_s))
    rows: list[Row] = [
        {"part": "hang", "side": "one after the other", "others": others, "seconds": round(serial_s, 3)},
        {"part": "hang", "side": "hanging", "others": done, "seconds": round(hung_s, 3), "timeouts": late},
        {"part": "hang", "side": "no limit", "others": unlimited, "seconds": round(bound_s, 3)},
    ]
    say(
        f"hang: {others} answers in {serial_s:.2f} s one after the other, in {hung_s:.2f} s beside {WORKERS} that hang "
        f"with a limit of {LIMIT_S:g} s; without a limit {unlimited} of them in {bound_s:.2f} s"
    )
    return Measured(
        rows=rows,
        targets=[
            Target("hang: others that are scored", done / others, 1.0, "higher"),
            Target("hang: seconds over those of one after the other and the limit", hung_s / bound_s, 1.0, "lower"),
            Target("hang: what hangs ends as a timeout", late / WORKERS, 1.0, "higher"),
            Target("hang: control, others not scored without a limit", 1 - unlimited / others, 0.01, "higher"),
        ],
    )


async def scored(
    others: int, *, stuck: int = 0, workers: int = WORKERS, limit_s: float = LIMIT_S, wait_s: float = NO_LIMIT_S
) -> tuple[float, int, int]:
    """Seconds until all others were scored, `wait_s` at most; how many were; and how many of `stuck` were given up."""
    pool = VerifierPool("asyncrl.benchmarks.verifiers_hang:Scorer", {}, workers=workers)
    await pool.start()
    try:
        texts = [STUCK] * stuck + ["x"] * others
        began = time.perf_counter()
        calls = [asyncio.ensure_future(pool.verdict({}, {"text": text}, timeout_s=limit_s)) for text in texts]
        await asyncio.wait(calls[stuck:], timeout=wait_s)
        seconds = time.perf_counter() - began
        done = sum(call.done() for call in calls[stuck:])
        if limit_s < wait_s and stuck:
            await asyncio.wait(calls[:stuck], timeout=10 * limit_s)
        late = sum(call.done() and call.result().verdict.failure == "verifier_timeout" for call in calls[:stuck])
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        return seconds, done, late
    finally:
        await pool.close()
