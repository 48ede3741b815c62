"""`bench verifiers`, in small: what is known of an answer is true, and what is wrong or lost would be told."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.benchmarks import verifiers_code, verifiers_hang, verifiers_math
from asyncrl.benchmarks.verifiers_answers import GROUP, KNOWN, Case, cases
from asyncrl.config.rewards import Math
from asyncrl.rewards.math import MathAnswer


def test_what_is_known_of_each_answer_is_what_the_part_says_and_every_form_occurs() -> None:
    given = cases(40 * GROUP, seed=1)
    verifier = MathAnswer(Math())
    for case in given:
        finding = verifier.verify({"id": "1", "answer": case.gold}, {"text": case.text, "finish_reason": "stop"})
        assert finding.parts == {"math": float(case.right)}, (case, finding)
    assert {case.form for case in given} == {"", *KNOWN}
    assert given == cases(40 * GROUP, seed=1)
    assert given != cases(40 * GROUP, seed=2)


@pytest.mark.slow
def test_both_sides_agree_but_where_it_is_known_and_two_processes_score_them() -> None:
    given = cases(5 * GROUP, seed=0)
    expected, seconds, cpu_seconds = verifiers_math.plain_loop(given)
    ours = asyncio.run(verifiers_math.scored(given, [Math()], workers=2))
    assert ours.verdicts == [case.right for case in given]
    assert not any(map(verifiers_math._unexplained, given, ours.verdicts, expected))
    assert min(seconds, cpu_seconds, ours.seconds, ours.cpu_seconds, *ours.rss) > 0
    assert len(ours.rss) == verifiers_math.FIFTHS


def test_a_verdict_that_is_wrong_or_apart_without_a_known_form_would_be_told() -> None:
    plain, known = Case("1", "", right=True), Case("1", "", right=True, form="en-dash")
    assert verifiers_math._unexplained(plain, True, False)
    assert verifiers_math._unexplained(known, False, True)
    assert verifiers_math._unexplained(known, None, False)
    assert not verifiers_math._unexplained(known, True, False)
    assert not verifiers_math._unexplained(plain, False, False)


@pytest.mark.slow
def test_all_others_are_scored_beside_what_hangs_and_without_a_limit_they_are_not() -> None:
    _, done, late = asyncio.run(verifiers_hang.scored(12, stuck=2, limit_s=0.5))
    assert (done, late) == (12, 2)
    _, done, late = asyncio.run(verifiers_hang.scored(4, stuck=2, limit_s=verifiers_hang.NO_LIMIT_S, wait_s=1.0))
    assert (done, late) == (0, 0)


def test_the_sides_of_the_code_part_run_the_same_program() -> None:
    verifiers_code.plain()
    verifiers_code.anew()
