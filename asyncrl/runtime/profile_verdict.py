"""What a profile says to do next, and why. Pure: from a report (`profile_report.py`), and a person's marks if there are
any.

A verdict is JSON: {"verdict", "text", "reasons": [{"name", "text", "value", "limit", "decides", "see"}]}. The verdict
is the first of these whose reasons hold:

    verifier first   answers have no score, or a person disagrees with the scores
    not yet          the model does not succeed, or so seldom that groups teach nothing
    too easy         it nearly always succeeds
    train            none of these; what else is odd is named

A reason that `decides` makes the verdict, another one is a warning. `see`: a section of docs/when-rl.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

VERIFIER_FIRST, NOT_YET, TOO_EASY, TRAIN = "verifier first", "not yet", "too easy", "train"

TEXTS = {
    VERIFIER_FIRST: "make the score right before anything is trained by it",
    NOT_YET: "use easier prompts, or supervised training on solved ones first",
    TOO_EASY: "use harder prompts: on these there is next to nothing to gain",
    TRAIN: "the model sometimes succeeds, and the score tells when",
}

PAGE = "docs/when-rl.md"

MOST_UNSCORED = 0.05
"""Share of answers without a score. At one in twenty every third group of 8 lacks a member, and those that lack are
seldom a fair sample: what breaks a verifier is a kind of answer."""

LEAST_KAPPA = 0.6
"""Agreement beyond chance with a person. Below it Landis and Koch (Biometrics 33, 1977) call it at most moderate; a
model finds what the two disagree on."""

MOST_FALSE_PASSES = 0.1
"""Of the answers that the verifier lets pass, those that a person calls wrong. What is paid without being right is
learned first where it is easier, so this may be far lower than errors the other way."""

ENOUGH_MARKS = 30
"""Marks below which one more disagreement moves the numbers above by several hundredths."""

LEAST_GRADIENT = 0.1
"""Expected share of groups with different rewards. Below it, nine of ten sampled answers are for nothing."""

MOST_PASSES = 0.95
"""Pass rate from which on less is left to gain than an evaluation on some hundred rows can show; where there is partial
credit, also of the highest reward."""

GOOD_PASSES = (0.05, 0.8)
"""Pass rates to start from: at the lower one a third of the groups of 8 have an answer that passes, and above the upper
one a fifth is left to gain."""

MOST_EQUAL = 0.5
"""Share of prompts whose answers all score the same: half of what is sampled teaches nothing."""

MOST_TRUNCATED = 0.1
"""Share of answers that ran out of tokens: they are scored on what is not their end, and length is trained instead."""

MOST_ASIDE = 0.5
"""Share of the reward's variance made by a part that says nothing of right or wrong: more than all others together, so
it is what the step mostly follows."""

MOST_REPEATED = 0.3
"""Of an answer's grams of four words, those that it had before. Ordinary text has few; a loop reaches it soon."""

MOST_SCORING = 0.5
"""Time of the verifier processes against that of sampling: above it, scores begin to hold sampling up."""

WIDEST = 0.4
"""Width of the pass rate's 95 % interval: from seldom to mostly, which call for opposite things."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One number and what it means. limit: what it was compared with."""

    name: str
    text: str
    value: float | None
    limit: float | None
    decides: bool
    see: str


def verdict(report: Mapping[str, Any], agreement: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """report: of `profile_report.report`; agreement: of `profile_agreement.agreement`, where a person has judged."""
    found = {
        VERIFIER_FIRST: [*_unscored(report), *_disagreement(agreement)],
        NOT_YET: list(_too_hard(report)),
        TOO_EASY: list(_too_easy(report)),
    }
    said = next((name for name, reasons in found.items() if any(reason.decides for reason in reasons)), TRAIN)
    reasons = [reason for name, each in found.items() for reason in each if name == said or not reason.decides]
    if said == TRAIN:
        reasons.append(_good(report))
    reasons += _warnings(report)
    reasons.sort(key=lambda reason: not reason.decides)
    return {"verdict": said, "text": TEXTS[said], "reasons": [asdict(reason) for reason in reasons]}


def _unscored(report: Mapping[str, Any]) -> Iterator[Reason]:
    share = report["unscored"] / report["answers"]
    if not report["unscored"]:
        return
    classes = ", ".join(f"{name} {count}" for name, count in report["failures"].items())
    first = next(iter(report["failures"]))
    text = f"{share:.0%} of the answers have no score ({classes}); {first}: {report['details'][first] or '-'}"
    yield Reason("unscored", text, share, MOST_UNSCORED, share > MOST_UNSCORED, f"{PAGE}#first-the-score")


def _disagreement(agreement: Mapping[str, Any] | None) -> Iterator[Reason]:
    if agreement is None:
        return
    see = f"{PAGE}#first-the-score"
    judged, kappa, false = agreement["judged"], agreement["kappa"], agreement["false_passes"]
    enough = judged >= ENOUGH_MARKS
    if kappa["value"] is not None and kappa["value"] < LEAST_KAPPA:
        text = f"kappa {kappa['value']:.2f} between the verifier and a person, over {judged} answers"
        decides = enough or (kappa["high"] is not None and kappa["high"] < LEAST_KAPPA)
        yield Reason("kappa", text, kappa["value"], LEAST_KAPPA, decides, see)
    if false["share"] is not None and false["share"] > MOST_FALSE_PASSES:
        text = f"a person calls {false['count']} of {false['of']} answers wrong that the verifier lets pass"
        yield Reason("false_passes", text, false["share"], MOST_FALSE_PASSES, enough, see)
    if not enough:
        text = f"only {judged} scored answers were judged; it takes {ENOUGH_MARKS} to tell"
        yield Reason("marks", text, judged, ENOUGH_MARKS, False, see)


def _too_hard(report: Mapping[str, Any]) -> Iterator[Reason]:
    rate, gradient = report["pass"]["value"], report["gradient"]
    see = f"{PAGE}#it-does-not-succeed-yet"
    if rate is None:
        return
    scored = report["answers"] - report["unscored"]
    if not report["passed"]:
        # The rule of three: with a higher rate, none of so many would have been less likely than 5 %.
        most = min(1.0, 3 / scored)
        text = f"none of {scored} scored answers passes, so on these prompts likely fewer than {most:.0%} do"
        if report["wrong"]:
            name, count = next(iter(report["wrong"].items()))
            text += f"; most often they are {name} ({count})"
        yield Reason("pass", text, rate, 0.0, True, see)
    elif gradient < LEAST_GRADIENT and rate < 0.5:
        yield Reason("gradient", _teaching(report), gradient, LEAST_GRADIENT, True, see)
    elif rate < GOOD_PASSES[0]:
        yield Reason("pass", f"only {rate:.1%} of the answers pass", rate, GOOD_PASSES[0], False, see)


def _too_easy(report: Mapping[str, Any]) -> Iterator[Reason]:
    rate, gradient, best = report["pass"]["value"], report["gradient"], report["reward"]["best"]
    see = f"{PAGE}#it-succeeds-already"
    if rate is None:
        return
    if rate >= MOST_PASSES and best >= MOST_PASSES:
        yield Reason("pass", f"{rate:.1%} of the answers pass", rate, MOST_PASSES, True, see)
    elif gradient < LEAST_GRADIENT and rate >= 0.5:
        yield Reason("gradient", _teaching(report), gradient, LEAST_GRADIENT, True, see)
    elif rate > GOOD_PASSES[1]:
        text = f"{rate:.0%} of the answers pass already, {best:.0%} with the highest reward"
        yield Reason("pass", text, rate, GOOD_PASSES[1], False, see)


def _good(report: Mapping[str, Any]) -> Reason:
    text = f"{report['pass']['value']:.0%} of the answers pass, and {_teaching(report)}"
    return Reason("gradient", text, report["gradient"], LEAST_GRADIENT, True, f"{PAGE}#rl-works-if")


def _teaching(report: Mapping[str, Any]) -> str:
    return f"{report['gradient']:.0%} of the groups of {report['group_size']} would teach something"


def _warnings(report: Mapping[str, Any]) -> Iterator[Reason]:
    """What is odd whatever the verdict."""
    rate = report["pass"]
    if rate["value"] is not None and (width := rate["high"] - rate["low"]) > WIDEST:
        text = f"the pass rate is between {rate['low']:.0%} and {rate['high']:.0%}: more --outputs would tell"
        yield Reason("interval", text, width, WIDEST, False, f"{PAGE}#how-sure-that-is")
    watched = (
        (
            "zero_variance",
            report["zero_variance"],
            MOST_EQUAL,
            "of the prompts score the same with all answers",
            "all-answers-score-the-same",
        ),
        (
            "truncated",
            report["truncated"],
            MOST_TRUNCATED,
            "of the answers are cut off at max_tokens",
            "answers-are-cut-off",
        ),
        (
            "repetition",
            report["repetition"],
            MOST_REPEATED,
            "of what an answer says it has said before",
            "answers-repeat-themselves",
        ),
        (
            "scoring",
            report["speed"]["scoring_share"],
            MOST_SCORING,
            "of the sampling time is what the verifiers take",
            "the-score-is-slow",
        ),
    )
    for name, value, limit, text, section in watched:
        if value is not None and value > limit:
            yield Reason(name, f"{value:.0%} {text}", value, limit, False, f"{PAGE}#{section}")
    for name, part in report["parts"].items():
        if part["role"] != "outcome" and part["share"] is not None and part["share"] > MOST_ASIDE:
            text = f"{part['share']:.0%} of the reward's variance is of {name}, a {part['role']} and no outcome"
            yield Reason("part", text, part["share"], MOST_ASIDE, False, f"{PAGE}#one-part-decides")
