"""How a profile reads: named lines, and the answers on which a person and the verifier disagree."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from asyncrl.telemetry import text
from asyncrl.telemetry.evaluation import how_sampled
from asyncrl.telemetry.summary import shorten
from asyncrl.telemetry.table import visible, write_facts

SHOWN = 5
"""Answers shown of those that a person calls wrong and the verifier right; the document has their numbers all."""

Facts = list[tuple[str, str]]


def render(document: Mapping[str, Any], *, terminal: bool, file: TextIO = sys.stdout) -> None:
    """Print what `runtime.profile.profile` returned."""
    write_facts([*fact_rows(document), *verdict_rows(document["verdict"])], terminal=terminal, file=file)


def render_agreement(document: Mapping[str, Any], *, terminal: bool, file: TextIO = sys.stdout) -> None:
    """Print how a profile's answers were judged: `document` with `agreement`, and the verdict that it led to."""
    write_facts([*agreement_rows(document), *verdict_rows(document["verdict"])], terminal=terminal, file=file)


def fact_rows(document: Mapping[str, Any]) -> Facts:
    """What was profiled, and every number of the report."""
    report = document["report"]
    passed, reward, tokens = report["pass"], report["reward"], report["tokens"]
    facts = [
        ("profiled", document["target"]),
        (
            "on",
            f"{report['prompts']} train prompts of {document['task']}, "
            f"{how_sampled(document['sampling'], report['answers'] // report['prompts'])}, seed {document['seed']}; "
            f"an answer passes if its reward is above {report['pass_above']:g}",
        ),
    ]
    if passed["value"] is not None:
        facts += [
            ("passes", f"{_interval(passed)} of the answers to a prompt; prompts by pass rate: {histogram(report)}"),
            ("reward", f"mean {text.number(reward['mean'])}, standard deviation {text.number(reward['std'])}"),
            (
                "groups",
                f"of {report['group_size']}: {text.percent(report['gradient'])} with different rewards are expected; "
                f"{text.percent(report['zero_variance'])} of the prompts score the same with all answers",
            ),
        ]
    facts += [("part", _part(name, part)) for name, part in report["parts"].items()]
    unscored = (
        f"{report['unscored']} unscored ({text.reasons(report['failures'])})" if report["unscored"] else "all scored"
    )
    wrong = f", wrong: {text.reasons(report['wrong'])}" if report["wrong"] else ""
    facts.append(("answers", f"{report['answers']}, {unscored}; {report['passed']} pass{wrong}"))
    facts.append(
        (
            "tokens",
            f"mean {text.number(tokens['mean'], 1)}, median {text.number(tokens['p50'], 0)}, 95 % up to "
            f"{text.number(tokens['p95'], 0)}, at most {text.number(tokens['max'], 0)}; "
            f"{text.percent(report['truncated'])} cut at the limit"
            + ("" if report["repetition"] is None else f"; {text.percent(report['repetition'])} said before"),
        )
    )
    return [*facts, *speed_rows(report)]


def speed_rows(report: Mapping[str, Any]) -> Facts:
    """How long verifiers and engine took, and what it gives of steps."""
    verifier, speed = report["verifier_s"], report["speed"]
    return [
        (
            "verifiers",
            f"mean {seconds(verifier['mean'])}, 95 % up to {seconds(verifier['p95'])}, at most "
            f"{seconds(verifier['max'])} an answer; {text.percent(speed['scoring_share'])} of the sampling time",
        ),
        (
            "speed",
            f"{text.count(speed['tokens_per_s'])} tokens/s over {speed['seconds']:.1f} s: at most "
            f"{text.count(speed['steps_per_hour'])} steps an hour, if {speed['assumed']}",
        ),
    ]


def verdict_rows(verdict: Mapping[str, Any]) -> Facts:
    """The verdict, and a line for each of its reasons and warnings."""
    return [
        ("verdict", f"{verdict['verdict']}: {verdict['text']}"),
        *(
            ("because" if reason["decides"] else "warning", f"{visible(reason['text'])} ({reason['see']})")
            for reason in verdict["reasons"]
        ),
    ]


def agreement_rows(document: Mapping[str, Any]) -> Facts:
    """How far verifier and person agree, and the answers that it lets pass and the person does not."""
    agreement, answers = document["agreement"], document["answers"]
    confusion, false = agreement["confusion"], agreement["false_passes"]
    unscored = f", and {agreement['unscored']} without a score" if agreement["unscored"] else ""
    facts = [
        ("judged", f"{agreement['judged']} of {len(answers)} answers{unscored}"),
        ("accuracy", _interval(agreement["accuracy"])),
        ("kappa", _interval(agreement["kappa"])),
        ("passes", "{passes_right} judged right, {passes_wrong} judged wrong: false passes".format(**confusion)),
        ("fails", "{fails_wrong} judged wrong, {fails_right} judged right: false failures".format(**confusion)),
    ]
    for number in false["outputs"][:SHOWN]:
        answer = answers[number - 1]
        facts.append(
            (
                "false pass",
                f"{document['id']}-{number}: prompt {shorten(answer['prompt'])}, answer {shorten(answer['answer'])}, "
                f"expected {shorten(answer['expected'])}",
            )
        )
    if false["count"] > SHOWN:
        facts.append(("", f"and {false['count'] - SHOWN} more"))
    return facts


def histogram(report: Mapping[str, Any]) -> str:
    """Prompts by tenths of their pass rate, those that have any.

    >>> histogram({"pass_rate": [6, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2]})
    '6 at 0, 1 at 0.2, 2 at 1'
    """
    return ", ".join(f"{count} at {tenth / 10:g}" for tenth, count in enumerate(report["pass_rate"]) if count) or "-"


def seconds(value: float | None) -> str:
    """
    >>> seconds(0.00012), seconds(0.05), seconds(1.5), seconds(None)
    ('0.12 ms', '50 ms', '1.5 s', '-')
    """
    if value is None:
        return "-"
    return f"{1000 * value:.2g} ms" if value < 0.0995 else f"{value:.3g} s"


def _part(name: str, part: Mapping[str, Any]) -> str:
    share = "" if part["share"] is None else f", {text.percent(part['share'])} of the variance"
    return (
        f"{visible(name)}: mean {text.number(part['mean'])}, standard deviation {text.number(part['std'])}, weight "
        f"{part['weight']:g}{share}" + ("" if part["role"] == "outcome" else f"; a {part['role']}")
    )


def _interval(estimate: Mapping[str, float | None]) -> str:
    if estimate["value"] is None:
        return "-"
    if estimate["low"] is None:
        return text.number(estimate["value"])
    return f"{text.number(estimate['value'])} [{text.number(estimate['low'])}, {text.number(estimate['high'])}]"
