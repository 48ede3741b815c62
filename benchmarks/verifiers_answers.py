"""Mathematical answers as models write them, with what is true of each by construction.

A row has a group of answers, as in training: some right in another form, some wrong. A form that
math-verify reads otherwise has a name.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

GROUP = 16

KNOWN = {
    "space-between-thousands": "math-verify reads 1 234 as a product",
    "mixed-number": "math-verify reads 2 2/3 as 4/3",
    "percent-of-a-decimal": "math-verify takes 28 for 28 %, and not 28.5 for 28.5 %",
    "inequality": "math-verify compares an interval with an inequality only if the row has the inequality",
    "earlier-box": "math-verify takes several boxes for a set of answers; here the last one decides",
    "en-dash": "math-verify does not know a minus that is typed as a dash",
}
"""Forms, of right answers, in which the plain loop may be wrong; and why."""


@dataclass(frozen=True, slots=True)
class Case:
    """gold: as in a row. right: whether the answer is. form: how it is written, "" if in no way worth a name."""

    gold: str
    text: str
    right: bool
    form: str = ""


def cases(count: int, seed: int) -> list[Case]:
    """`count` answers, in groups of GROUP."""
    random_ = random.Random(seed)
    found: list[Case] = []
    while len(found) < count:
        gold, right, wrong = random_.choice(KINDS)(random_)
        for _ in range(GROUP):
            is_right = random_.random() < 0.5
            form, answer = random_.choice(right) if is_right else ("", random_.choice(wrong))
            guess = (
                rf"A guess is \boxed{{{random_.randint(10_000, 99_999)}}}, which is too much."
                if random_.random() < 0.1
                else ""
            )
            form = form or ("earlier-box" if guess else "")
            found.append(Case(gold, _reasoned(random_, guess, answer), is_right, form))
    return found[:count]


Written = tuple[str, list[tuple[str, str]], list[str]]
"""A gold, right answers with the names of their forms, and wrong ones."""


def _reasoned(random_: random.Random, guess: str, answer: str) -> str:
    """An answer behind 3 to 12 lines of working, which has other formulas, and a guess, if there is one."""
    lines = [
        f"Step {n}: from $x_{n} = \\frac{{{random_.randint(1, 99)}}}{{{random_.randint(2, 9)}}}$ we get "
        f"{random_.randint(1, 999)} + {random_.randint(1, 999)} = {random_.randint(2, 1998)}, which is more."
        for n in range(random_.randint(3, 12))
    ]
    return "\n".join([*lines, *[guess] * bool(guess), rf"Therefore the answer is \boxed{{{answer}}}."])


def _integer(random_: random.Random) -> Written:
    value = random_.randint(1_000, 9_999_999)
    grouped = f"{value:,}"
    right = [("", f"{value}"), ("", grouped), ("", f"{value}.0"), ("", rf"{value}\text{{ cm}}")]
    right.append(("space-between-thousands", grouped.replace(",", r"\,")))
    return f"{value}", right, [f"{value + 1}", f"-{value}", f"{value}0", f"{value / 1000}", f"{value - 10:,}"]


def _negative(random_: random.Random) -> Written:
    value = random_.randint(1, 500)
    return f"-{value}", [("", f"-{value}"), ("en-dash", f"–{value}")], [f"{value}", f"-{value + 1}"]


def _large(random_: random.Random) -> Written:
    value = random_.randrange(10**30, 10**31)
    return f"{value}", [("", f"{value}"), ("", f"{value:,}")], [f"{value + 1}", f"{value - 1}"]


def _fraction(random_: random.Random) -> Written:
    value = Fraction(random_.randint(1, 60), random_.choice([3, 7, 9, 11, 13]))
    top, bottom = value.numerator, value.denominator
    gold = rf"\frac{{{top}}}{{{bottom}}}" if bottom > 1 else f"{top}"
    right = [
        ("", f"{top}/{bottom}"),
        ("", rf"\dfrac{{{top}}}{{{bottom}}}"),
        ("", rf"\frac{{{2 * top}}}{{{2 * bottom}}}"),
    ]
    right.append(("", f"{float(value):.8f}"))
    if top > bottom > 1:
        right.append(("mixed-number", f"{top // bottom} {top % bottom}/{bottom}"))
    wrong = [rf"\frac{{{top + 1}}}{{{bottom}}}", rf"\frac{{{bottom}}}{{{top + bottom}}}", f"{float(value) + 0.01:.2f}"]
    return gold, right, wrong


def _percent(random_: random.Random) -> Written:
    tenths = random_.randint(101, 899)
    tenths += tenths % 10 == 0
    value = f"{tenths // 10}.{tenths % 10}"
    return rf"{value}\%", [("", rf"{value}\%"), ("percent-of-a-decimal", value)], [rf"{value}1\%", f"{tenths}"]


def _radical(random_: random.Random) -> Written:
    a, b = random_.randint(2, 9), random_.choice([2, 3, 5, 7])
    right = [("", rf"{a}\sqrt{{{b}}}"), ("", rf"\sqrt{{{a * a * b}}}"), ("", rf"\sqrt{{{b}}} \cdot {a}")]
    return rf"{a}\sqrt{{{b}}}", right, [rf"{a + 1}\sqrt{{{b}}}", rf"{a}\sqrt{{{b + 1}}}", rf"\sqrt{{{a * b}}}"]


def _square(random_: random.Random) -> Written:
    a = random_.randint(1, 9)
    right = [("", rf"(x+{a})^2"), ("", rf"x^2+{2 * a}x+{a * a}"), ("", rf"x(x+{2 * a}) + {a * a}")]
    return rf"x^2+{2 * a}x+{a * a}", right, [rf"(x+{a + 1})^2", rf"x^2+{2 * a}x-{a * a}", rf"(x-{a})^2"]


def _multiple_of_pi(random_: random.Random) -> Written:
    a, b = random_.randint(2, 30), random_.choice([3, 7, 11])
    right = [("", rf"\frac{{{a}\pi}}{{{b}}}"), ("", rf"\frac{{{a}}}{{{b}}}\pi"), ("", rf"{a}\pi/{b}")]
    return rf"\frac{{{a}\pi}}{{{b}}}", right, [rf"{a}\pi", rf"\frac{{{a + 1}\pi}}{{{b}}}", rf"\frac{{{a}}}{{{b}}}"]


def _interval(random_: random.Random) -> Written:
    a = random_.randint(-20, 20)
    right = [("", rf"(-\infty, {a})"), ("", rf"\left(-\infty,{a}\right)"), ("inequality", f"x < {a}")]
    return rf"(-\infty,{a})", right, [rf"(-\infty,{a}]", rf"(-\infty,{a + 1})", rf"x \leq {a}", rf"({a},\infty)"]


def _set(random_: random.Random) -> Written:
    a, b, c = random_.sample(range(-30, 30), 3)
    right = [("", rf"\{{{b}, {a}, {c}\}}"), ("", f"{a}, {b}, {c}"), ("", rf"\{{{a},{b},{c}\}}")]
    return rf"\{{{a},{b},{c}\}}", right, [rf"\{{{a},{b}\}}", rf"\{{{a},{b},{c + 31}\}}"]


def _point(random_: random.Random) -> Written:
    a, b = random_.randint(1, 20), random_.randint(21, 40)
    return f"({a},{b})", [("", f"({a}, {b})"), ("", rf"\left({a},{b}\right)")], [f"({b},{a})", f"({a},{b + 1})"]


def _equation(random_: random.Random) -> Written:
    a = random_.randint(2, 40)
    return f"x={a}", [("", f"x = {a}"), ("", f"{a}")], [f"x={a + 1}", f"{a - 1}"]


KINDS: list[Callable[[random.Random], Written]] = [
    *(_integer, _integer, _integer, _integer, _negative, _large, _fraction, _fraction, _percent),
    *(_radical, _square, _multiple_of_pi, _interval, _set, _point, _equation),
]
"""As often as data sets have them: more than half of MATH's and all of GSM8K's answers are plain numbers."""
