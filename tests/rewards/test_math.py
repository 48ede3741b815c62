"""The part `math`: the frozen verdicts, which text is the answer, what is refused, and that nothing of it raises."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.recipe import Collector, DataSource, SingleTurnTask
from asyncrl.config.rewards import Math
from asyncrl.rewards.base import BadRow, Finding
from asyncrl.rewards.math import MathAnswer
from asyncrl.rewards.math_box import Unclosed, boxed, content
from asyncrl.rewards.math_guard import too_complex
from asyncrl.rewards.math_number import read
from asyncrl.rewards.math_text import plain
from asyncrl.rewards.scoring import Score
from asyncrl.rewards.time_limit import Late, limit
from asyncrl.tasks.base import Answer, Row
from asyncrl.tasks.verify import scoring_of

GOLDEN = [json.loads(line) for line in (Path(__file__).parent / "math_golden.jsonl").read_text().splitlines()]
STRICT, LENIENT = MathAnswer(Math()), MathAnswer(Math(boxed="preferred"))
TOWER, FACTORIAL = r"9^{9^{9^{9}}}", "100000000!"


def row(answer: object) -> dict[str, Any]:
    return {"id": "rows.jsonl:1", "answer": answer}


def found(expected: object, text: str, by: MathAnswer = STRICT, finish_reason: str = "stop") -> Finding:
    return by.verify(row(expected), {"text": text, "finish_reason": finish_reason})


def verdict(expected: object, text: str, by: MathAnswer = STRICT) -> tuple[float | None, str]:
    finding = found(expected, text, by)
    return finding.parts["math"], finding.wrong


@pytest.mark.parametrize("pair", GOLDEN, ids=[f"{n}" for n in range(1, 1 + len(GOLDEN))])
def test_the_frozen_pairs_have_the_verdicts_they_always_had(pair: dict[str, Any]) -> None:
    STRICT.check(row(pair["gold"]))
    finding = found(pair["gold"], rf"Let us see. 41 is too small. \boxed{{{pair['answer']}}}")
    assert finding.parts == {"math": pair["right"]}, finding.detail


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,\{2\}\}}", r"\{1,\{2\}\}"),
        (r"first \boxed{1}, then \boxed{2}.", "2"),
        (r"\boxed{1} and \fbox{2}", "2"),
        (r"\boxed {3}", "3"),
        (r"so $\boxed 4$.", "4"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxedequation{6}", None),
        (r"\boxed{}", ""),
        ("no box", None),
    ],
)
def test_the_last_box_decides_and_its_braces_are_balanced(text: str, held: str | None) -> None:
    assert boxed(text) == held


def test_taking_the_box_off_twice_takes_no_more_off() -> None:
    assert content(content(r"Answer: \boxed{5}")) == "5"


def test_a_box_that_is_not_closed_is_a_class_and_no_exception() -> None:
    with pytest.raises(Unclosed):
        boxed(r"\boxed{5")
    assert verdict("5", r"\boxed{5") == (0.0, "unreadable")
    assert verdict("5", r"\boxed{5" + "{" * 5000) == (0.0, "unreadable")


def test_without_a_box_nothing_counts_unless_the_recipe_says_so() -> None:
    assert verdict("42", "I think 41 or 42 maybe") == (0.0, "no_answer")
    assert verdict("42", "42") == (0.0, "no_answer")
    assert verdict("42", "42", LENIENT) == (1.0, "")
    assert verdict("42", "42, or rather 41", LENIENT) == (0.0, "wrong_answer")
    assert verdict("42", r"\boxed{41}, not 42", LENIENT) == (0.0, "wrong_answer")
    assert verdict("1/2", r"Hence $x = 3$ and then \(\frac{1}{2}\).", LENIENT) == (1.0, "")
    assert verdict("42", "nothing", LENIENT) == (0.0, "no_answer")


def test_a_bold_answer_is_read_where_boxes_are_only_preferred() -> None:
    text = "468 = 2*234, and 234 own three. So all four are owned by **73**.\n\nFinal Answer: **73**"
    assert verdict("73", text, LENIENT) == (1.0, "")
    assert verdict("37", text, LENIENT) == (0.0, "wrong_answer")


def test_a_right_answer_that_was_cut_off_does_not_count() -> None:
    finding = found("5", r"\boxed{5} and then", finish_reason="length")
    assert (finding.parts, finding.wrong) == ({"math": 0.0}, "cut_off")


def test_what_was_read_is_in_one_way_of_writing_so_that_votes_agree() -> None:
    assert found("7", r"\boxed{$1,000$}").read == found("7", r"\fbox{1000}").read == "1000"


def test_any_of_several_expected_answers_is_right() -> None:
    assert verdict([r"\frac{1}{2}", "x"], r"\boxed{x}") == (1.0, "")
    assert verdict([5, 6], r"\boxed{6}") == (1.0, "")


@pytest.mark.parametrize(
    ("gold", "said"),
    [
        ("A", "use {type: choice}"),
        ("listen", "words"),
        ("", "not empty"),
        (None, "not empty"),
        (float("nan"), "not empty"),
        (0.5, "not empty: write '0.5'"),
        (10**20, "more than 64 bits: write it as text"),
        (r"\text{ }", "nothing is left"),
        (True, "not empty"),
        ([], "not empty"),
        (["5", None], "not empty"),
        (r"\frac{1}{2", "no mathematical expression"),
        (r"\frac{1}{0}", "not even equal to itself"),
        (r"the answer is \boxed{5", "not closed"),
        (TOWER, "not computed"),
    ],
)
def test_a_row_that_nothing_can_be_compared_with_is_named(gold: object, said: str) -> None:
    with pytest.raises(BadRow, match=r"row rows\.jsonl:1: ") as error:
        STRICT.check(row(gold))
    assert said in str(error.value)
    with pytest.raises(BadRow):
        found(gold, r"\boxed{x^2+1}")  # unscored, whatever the answer, and never 0


@pytest.mark.parametrize(
    "text",
    [
        *(TOWER, "2^{2^{100}}", "(10^{1000})^{1000}", "9^9^9^9", "10^{99999999999}", "10^{" + "9" * 900 + "}"),
        *("1) 9^{9^{9^{9}}}", "10^-99999999999"),
        *(FACTORIAL, "(100!)!", r"\binom{10000000}{5000000}", "7" * 200_000, "(" * 500 + "7" + ")" * 500),
    ],
)
def test_what_would_hold_the_interpreter_is_refused_before_anything_is_computed(text: str) -> None:
    start = time.process_time()
    assert verdict("x", rf"\boxed{{{text}}}") == (0.0, "too_complex")
    assert time.process_time() - start < 5


@pytest.mark.parametrize("text", ["2^{1000}", "2^{2^{10}}", "x^{10}+x^9+1", "e^{x^2+1}", "20!", "n!", r"\binom{49}{6}"])
def test_what_rows_do_expect_is_computed(text: str) -> None:
    assert too_complex(text) == ""
    assert verdict(text, rf"\boxed{{{text}}}") == (1.0, "")


def test_a_long_answer_is_right_character_for_character_and_else_not_computed() -> None:
    long = "+".join(f"x_{{{n}}}" for n in range(300))
    assert verdict(long, rf"\boxed{{{long}}}") == (1.0, "")


def test_algebra_over_an_answer_ends_at_its_limit_and_the_next_answer_is_scored() -> None:
    hasty = MathAnswer(Math(timeout_s=0.0002))
    before = signal.getsignal(signal.SIGPROF)
    slow = r"\boxed{\sqrt{\sin(x^3)+\cos(x)} + \frac{(x+1)^{50}}{\log(x^2+3)}}"
    assert verdict("y", slow, hasty) == (0.0, "timeout")
    assert signal.getsignal(signal.SIGPROF) is before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert verdict("y", r"\boxed{z}") == (0.0, "wrong_answer")


def test_a_limit_of_computing_does_not_count_what_a_machine_does_beside_it() -> None:
    with limit(0.05, of="computing"):
        time.sleep(0.3)
    with pytest.raises(Late), limit(0.05):
        time.sleep(30)
    with pytest.raises(Late), limit(0.05, of="computing"):
        sum(1 for _ in iter(int, 1))  # for ever


def test_a_limit_holds_although_the_first_interruption_is_swallowed() -> None:
    swallowed = []

    def swallows() -> None:
        with limit(0.05):
            try:
                while True:
                    pass
            except Late:
                swallowed.append(1)
            while True:
                pass

    with pytest.raises(Late):
        swallows()
    assert swallowed


def test_the_same_score_in_any_thread_and_in_the_event_loop() -> None:
    expected, text = "x+1", r"\boxed{1+x}"
    found_there: list[tuple[float | None, str]] = []
    thread = threading.Thread(target=lambda: found_there.append(verdict(expected, text)))
    thread.start()
    thread.join(60)

    async def in_a_loop() -> tuple[Any, Any]:
        return verdict(expected, text), await asyncio.to_thread(verdict, expected, text)

    assert [verdict(expected, text), *found_there, *asyncio.run(in_a_loop())] == [(1.0, "")] * 4


async def scored(*calls: tuple[str, str], workers: int = 2, timeout_s: float = 30) -> list[Score]:
    task = SingleTurnTask(type="single-turn", data=DataSource(train="x.jsonl"), rewards=[Math()])
    collector = Collector(score_workers=workers, score_timeout_s=timeout_s)
    scoring = scoring_of(task, collector, seed=0, max_tokens=20)
    await asyncio.wait_for(scoring.start(), 60)
    try:
        pairs = ((Row(f"{n}", "p", gold), Answer(text, (), "stop")) for n, (gold, text) in enumerate(calls))
        return await asyncio.wait_for(asyncio.gather(*(scoring.score(*pair) for pair in pairs)), 60)
    finally:
        await scoring.close()


@pytest.mark.asyncio
async def test_answers_that_blow_up_cost_no_other_its_score() -> None:
    blown = [rf"\boxed{{{TOWER}}}", rf"\boxed{{{FACTORIAL}}}"] * 2
    scores = await scored(*(("7", text) for text in [*blown, *[r"\boxed{7}"] * 60, r"\boxed{x = 7}"]))
    assert [(score.reward, score.wrong) for score in scores[:4]] == [(0.0, "too_complex")] * 4
    assert [score.reward for score in scores[4:]] == [1.0] * 61


@pytest.mark.asyncio
async def test_a_row_that_cannot_be_read_is_unscored_in_the_pool_too() -> None:
    bad, good = await scored(("A", r"\boxed{A}"), ("5", r"\boxed{5}"))
    assert (bad.failure, good.reward) == ("bad_row", 1.0)


PIECES = [*r"{}()[]^_!,.;:|/+-*=<> $&%#~\'", "1", "23", "x", r"\frac", r"\boxed{", r"\text{", r"\sqrt", r"\left"]
PIECES += [
    r"\infty",
    r"\begin{pmatrix}",
    r"\end{pmatrix}",
    "\ud800",
    "٣",
    "²",
    "\x00",
    "−",
    "½",
    "\n",
    "nan",
    "percent",
]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_no_answer_raises_and_each_scored_one_is_right_or_has_a_class(text: str) -> None:
    for by in (STRICT, LENIENT):
        value, wrong = verdict("x+1", rf"so \boxed{{{text}}}", by)
        assert (value == 1.0) == (wrong == "")
        assert verdict("x+1", text, by)[0] in (0.0, 1.0)
    plain(text), read(text), too_complex(text)


@given(st.fractions(), st.fractions())
def test_numbers_are_equal_as_fractions_iff_they_are_equal(one: Any, other: Any) -> None:
    def written(number: Any) -> str:
        return f"{'-' if number < 0 else ''}\\frac{{{abs(number.numerator)}}}{{{number.denominator}}}"

    first, second = read(written(one)), read(written(other))
    assert first is not None
    assert second is not None
    assert first.equals(second) == (one == other)


DEGENERATE = [
    r"\infty ",
    r"\frac{1}{0}",
    r"\frac{0}{0}",
    "0",
    "e",
    "i",
    r"\pi ",
    "x",
    "^2",
    "^{-1}",
    "-",
    "=",
    r"\ln 0",
]
DEGENERATE += [r"\emptyset ", r"\tan\frac{\pi}{2}", r"\pm ", "%", "<"]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from(DEGENERATE), min_size=1, max_size=4).map("".join),
    st.sampled_from(["7919", r"13\sqrt{7}", "w+7919", r"\{13,7919\}", "(13,7919)", "w=7919", "[13,7919)"]),
)
def test_no_degenerate_answer_is_right_for_any_row(text: str, expected: str) -> None:
    assert verdict(expected, rf"\boxed{{{text}}}")[0] == 0.0


SMALL = st.integers(-9, 9)


@settings(max_examples=60, deadline=None)
@given(st.lists(SMALL, min_size=2, max_size=2), st.lists(SMALL, min_size=2, max_size=2), st.booleans())
def test_vectors_are_equal_iff_their_elements_are_however_their_lines_are_broken(
    one: list[int], other: list[int], spaced: bool
) -> None:
    def column(elements: list[int], line: str) -> str:
        return rf"\begin{{pmatrix}}{line.join(map(str, elements))}\end{{pmatrix}}"

    lines = r" \\ ", r"\\" if spaced else "\\\\[2pt]\n"
    right = verdict(column(one, lines[0]), rf"\boxed{{{column(other, lines[1])}}}")[0]
    assert right == (one == other)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 50), st.integers(2, 50), st.integers(0, 40))
def test_roots_are_equal_iff_their_values_are_however_small(one: int, other: int, tens: int) -> None:
    def root(number: int) -> str:
        return rf"\frac{{\sqrt{{{number}}}}}{{10^{{{tens}}}}}"

    assert verdict(root(one), rf"\boxed{{{root(other)}}}")[0] == (one == other)


@settings(max_examples=60, deadline=None)
@given(SMALL, SMALL, st.sampled_from(["()", "[]", "(]", "[)"]), st.sampled_from(["()", "[]", "(]", "[)", r"\{\}", ""]))
def test_what_has_other_brackets_is_something_else(one: int, more: int, expected: str, given_: str) -> None:
    low, high = one, one + abs(more) + 1

    def written(brackets: str) -> str:
        half = len(brackets) // 2
        return f"{brackets[:half]}{low}, {high}{brackets[half:]}"

    right = verdict(written(expected), rf"\boxed{{{written(given_)}}}")[0]
    assert right == (expected == given_)


@given(st.integers())
def test_a_whole_number_is_read_exactly_with_and_without_separators(number: int) -> None:
    for text in (f"{number}", f"{number:,}", f"{number:,}".replace(",", r"\,"), f"{number:,}".replace(",", "\u202f")):
        value = read(plain(text))
        assert value is not None
        assert value.value == number
