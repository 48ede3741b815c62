"""Part of `verifiers`: what the sandbox of the reward part `code` costs, against a plain subprocess that runs the same
program with the same tests: the time of one check, medians, in turns.

Control: a sandbox that is started anew for each check. What is measured has to tell it from one that is kept.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.config.rewards import Code
from asyncrl.rewards.code import CodeTests

ADDED_S = 0.1
ANEW = 3.0
"""It starts an interpreter and puts up walls, of which a kept one only forks."""

TURNS = 30
LIMIT_S = 60.0

PROGRAM = """
def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
"""
TESTS = "assert fibonacci(0) == 0\nassert fibonacci(10) == 55\nassert fibonacci(90) == 2880067194370816120\n"
PART = Code(tests="tests")
ROW = {"id": "1", "answer": None, "info": {"tests": TESTS}}
ANSWER = {"text": f"```python\n{PROGRAM}\n```\n", "finish_reason": "stop", "token_ids": []}


def measure(*, quick: bool, say: Say) -> Measured:
    """Rows: `plain`, `sandbox`, and `new sandbox`, the control. quick: a third of the turns."""
    verifier = CodeTests(PART)
    sides: dict[str, Callable[[], None]] = {"plain": plain, "sandbox": lambda: check(verifier), "new sandbox": anew}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    try:
        for side in sides.values():  # what is loaded once is not part of a check
            side()
        for _ in range(TURNS // 3 if quick else TURNS):
            for name, side in sides.items():
                began = time.perf_counter()
                side()
                seconds[name].append(time.perf_counter() - began)
    finally:
        verifier.close()
    medians = {name: median(taken) for name, taken in seconds.items()}
    rows: list[Row] = [
        {"part": "code", "side": name, "checks": len(seconds[name]), "ms": round(1000 * taken, 2)}
        for name, taken in medians.items()
    ]
    say("code: " + ", ".join(f"{name} {1000 * taken:.1f} ms" for name, taken in medians.items()))
    added = medians["sandbox"] - medians["plain"]
    control = medians["new sandbox"] / medians["sandbox"]
    return Measured(
        rows,
        [
            Target("code: seconds that the sandbox adds to a check", added, ADDED_S, "lower"),
            Target("code: control, a sandbox started for each check, over one that is kept", control, ANEW, "higher"),
        ],
    )


def plain() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM + TESTS], timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0


def check(verifier: CodeTests) -> None:
    found = verifier.verify(ROW, ANSWER)
    assert found.parts == {"code": 1.0}, found


def anew() -> None:
    verifier = CodeTests(PART)
    try:
        check(verifier)
    finally:
        verifier.close()
