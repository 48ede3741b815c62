"""Answers of a run as a person reads them: what one looks like, which are looked for, and in which order. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from rich.text import Text

from asyncrl.telemetry import text
from asyncrl.telemetry.table import visible

Order = Literal["trained", "worst", "best", "longest"]
ORDERS: tuple[Order, ...] = get_args(Order)

NAMES = 10  # columns of what stands before a text


@dataclass(frozen=True, slots=True)
class Shown:
    """One answer. reward None: unscored. label: the class of what is wrong with it, or why it is unscored; "" if
    neither. versions: sampled tokens by the version that sampled them. expected: None where there is nothing to be
    expected, or it is not known: then `unknown` says why."""

    row_id: str
    member: str
    prompt: str
    answer: str
    reward: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    label: str = ""
    detail: str = ""
    finish_reason: str = ""
    tokens: int | None = None
    expected: Any = None
    unknown: str = ""
    versions: Mapping[str, int] = field(default_factory=dict)
    task: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which answers are looked for: all that is given must be so. wrong: a class, or why it is unscored."""

    wrong: str | None = None
    unscored: bool = False
    row: str | None = None
    containing: str | None = None

    def __call__(self, shown: Shown) -> bool:
        """
        >>> Wanted(wrong="cut_off")(Shown("f:1", "0", "2+2?", "4", 1.0))
        False
        """
        return (
            (self.wrong is None or shown.label == self.wrong)
            and (not self.unscored or shown.reward is None)
            and (self.row is None or shown.row_id == self.row)
            and (self.containing is None or self.containing in shown.answer)
        )


def chosen(answers: Sequence[Shown], wanted: Callable[[Shown], bool], order: Order) -> list[Shown]:
    """Those that are wanted, in that order; unscored ones come last, as nobody knows what they are worth."""
    found = [shown for shown in answers if wanted(shown)]
    if order == "longest":
        return sorted(found, key=lambda shown: -(len(shown.answer) if shown.tokens is None else shown.tokens))
    if order == "trained":
        return found
    sign = 1.0 if order == "worst" else -1.0
    return sorted(found, key=lambda shown: math.inf if shown.reward is None else sign * shown.reward)


def classes(answers: Sequence[Shown]) -> dict[str, int]:
    """Answers by label, the most frequent first; those without one are right, as far as their verifiers can tell."""
    return dict(Counter(shown.label for shown in answers if shown.label).most_common())


def answer_text(shown: Shown, *, title: str) -> list[Text]:
    """The lines of one answer: title, numbers, prompt, answer, what was expected."""
    good = "red" if shown.reward is None or shown.label else "green"
    reward = "unscored" if shown.reward is None else f"reward {text.number(shown.reward)}"
    lines = [Text.assemble((title, "bold"), "  ", visible(shown.row_id), "  ", visible(shown.member))]
    said = [(reward, good), *([(visible(shown.label), "red")] if shown.label else [])]
    said += [(f"{visible(name)} {text.number(part)}", "") for name, part in shown.parts.items()]
    facts = [f"{shown.tokens} tokens"] if shown.tokens is not None else []
    facts += [f"ends by {shown.finish_reason}"] if shown.finish_reason else []
    facts += ["version " + " ".join(f"{version}:{n}" for version, n in shown.versions.items())] * bool(shown.versions)
    line = Text()
    for n, (words, style) in enumerate([*said, *((fact, "dim") for fact in facts)]):
        line.append("  " if n else "").append(words, style)
    lines.append(line)
    if shown.detail:
        lines += _block("detail", shown.detail, "dim")
    lines += _block("prompt", shown.prompt, "dim")
    lines += _block("answer", shown.answer, "")
    if shown.expected is not None:
        expected = shown.expected if isinstance(shown.expected, str) else json.dumps(shown.expected, default=str)
        lines += _block("expected", expected, "cyan")
    elif shown.unknown:
        lines += _block("expected", f"not known here: {shown.unknown}", "dim")
    return lines


def _block(name: str, content: str, style: str) -> list[Text]:
    """A name and its text, each line of which begins in the same column."""
    first, *rest = visible(content, lines=True).split("\n")
    lines = [Text.assemble((f"{name:<{NAMES}}", "dim"), (first, style))]
    return [*lines, *(Text.assemble(" " * NAMES, (line, style)) for line in rest)]


def summary_line(title: str, answers: Sequence[Shown], shown: int) -> str:
    """What is looked at: how many answers, their mean reward, their classes.

    >>> one, two = Shown("a", "0", "p", "x", 1.0), Shown("a", "1", "p", "y", 0.0, label="cut_off")
    >>> summary_line("step 3", [one, two], 1)
    'step 3: 2 answers, 1 shown, mean reward 0.500, cut_off 1'
    """
    known = [answer.reward for answer in answers if answer.reward is not None]
    said = [f"{title}: {len(answers)} answers"]
    if shown != len(answers):
        said.append(f"{shown} shown")
    said.append(f"mean reward {text.number(sum(known) / len(known) if known else None)}")
    return ", ".join([*said, *(f"{name} {n}" for name, n in classes(answers).items())])


def as_json(shown: Shown) -> str:
    """One line of strict JSON: NaN and infinity, which JSON does not have, are null."""
    document = asdict(shown)
    document["parts"] = {name: _finite(part) for name, part in shown.parts.items()}
    return json.dumps(document, ensure_ascii=True, allow_nan=False, default=str)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
