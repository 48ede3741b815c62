"""Whether an evaluation lets a model pass: rules against the numbers of a document of `runtime.evaluation`. Pure.

What is compared is judged by the 95 % interval of the paired difference and by its permutation test, which both have to
lie on one side. What so many prompts cannot tell from chance is neither better nor worse: `better` then does not hold,
`not worse` does, `not worse by` does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from asyncrl.collectors.evaluation.report import less_is_better
from asyncrl.collectors.evaluation.statistics import FEWEST_PROMPTS, LEVEL, rate_difference, rate_with_interval
from asyncrl.config.evaluation import REWARD
from asyncrl.runtime.gate_rules import GateError, Rule, Rules

Verdict = Literal["holds", "fails", "cannot tell"]

Numbers = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Judged:
    """A rule and what came of it; `said`: the numbers it was judged by, for a person."""

    rule: str
    verdict: Verdict
    said: str


def gated(rules: Rules, document: Mapping[str, Any]) -> dict[str, Any]:
    """What a document says of its gate, which holds if all rules do: {"holds", "rules": [{"rule", "verdict", "said"}]}.
    Raises what `judge` raises."""
    judged = judge(rules, document)
    return {"holds": all(one.verdict == "holds" for one in judged), "rules": [asdict(one) for one in judged]}


def judge(rules: Rules, document: Mapping[str, Any]) -> list[Judged]:
    """Each rule against what `runtime.evaluation.evaluate` returned. Raises GateError for a part or a task that is not
    there."""
    found: list[Judged] = []
    for rule in rules:
        several = [rule] if isinstance(rule, Rule) else default_rules(document)
        found += [_judge(one, document) for one in several]
    return found


def default_rules(document: Mapping[str, Any]) -> list[Rule]:
    """Better on the whole, and nothing regressed: no k, part, class or task."""
    difference = document["difference"]
    whole = [name for name in difference["metrics"] if not name.startswith("tokens")]
    rules = [_compared(REWARD, "better"), *(_compared(name, "not worse") for name in whole if name != REWARD)]
    return [*rules, *(_compared(REWARD, "not worse", task) for task in difference["by"].get("task", {}))]


def _compared(metric: str, condition: Literal["better", "not worse"], task: str = "") -> Rule:
    text = f"{metric.removeprefix('wrong/')}{f' in {task}' if task else ''} {condition}"
    return Rule(text, metric, condition, task)


def _judge(rule: Rule, document: Mapping[str, Any]) -> Judged:
    if not rule.compares:
        return _threshold(rule, _numbers(rule, document, document["report"]))
    difference = _numbers(rule, document, document["difference"])
    if difference["value"] is None:
        return Judged(rule.text, "cannot tell", "nothing was scored on both sides, or nothing passed")
    said = _said(difference, sign="+")
    if difference["prompts"] < FEWEST_PROMPTS:
        few = f"{said}, of which nothing can be told from chance: it takes {FEWEST_PROMPTS} prompts"
        return Judged(rule.text, "cannot tell", few)
    if difference["low"] is None:
        return Judged(rule.text, "cannot tell", f"{said}, without an interval: too few answers pass")
    gain = [-1 * difference[end] if less_is_better(rule.metric) else difference[end] for end in ("low", "high")]
    low, high = sorted(gain)
    if rule.condition == "not worse by":
        base = _numbers(rule, document, document["against"]["report"])["value"] if rule.relative else 1.0
        most = rule.bound * abs(base)
        verdict: Verdict = "holds" if low >= -most else "fails" if high < -most else "cannot tell"
        hint = "" if most or not rule.relative else ", a share of nothing: write `not worse by 0.01`"
        return Judged(rule.text, verdict, f"{said}; at most {most:.4g} worse{hint}")
    certain = difference["p"] is None or difference["p"] < 1 - LEVEL
    if rule.condition == "better":
        better = low > 0 and certain
        return Judged(rule.text, "holds" if better else "fails" if high <= 0 else "cannot tell", said)
    return Judged(rule.text, "fails" if high < 0 and certain else "holds", said)


def _threshold(rule: Rule, number: Numbers) -> Judged:
    value = number["value"]
    if value is None:
        return Judged(rule.text, "cannot tell", "there is no number: nothing was scored, or nothing passed")
    holds = {
        ">=": value >= rule.bound,
        ">": value > rule.bound,
        "<=": value <= rule.bound,
        "<": value < rule.bound,
    }[rule.condition]
    return Judged(rule.text, "holds" if holds else "fails", _said(number))


def _numbers(rule: Rule, document: Mapping[str, Any], side: Mapping[str, Any]) -> Numbers:
    """The number that a rule is about, of a report or a difference."""
    metrics = side["metrics"]
    tasks = side["by"].get("task", {})
    if rule.task and rule.task in tasks:
        metrics = tasks[rule.task]["metrics"]
    elif rule.task and rule.task not in (there := _tasks(document)):
        raise GateError(
            f"--gate: {rule.text!r}: no held-out prompt is of that task; there are {', '.join(map(repr, there))}"
        )
    if rule.metric in metrics:
        numbers: Numbers = metrics[rule.metric]
        return numbers
    if rule.metric.startswith("wrong/"):  # a class that no answer is of
        none = [0.0] * metrics[REWARD]["prompts"]
        return {
            **asdict(rate_difference(none) if rule.compares else rate_with_interval(none)),
            "p": None,
            "seen": False,
        }
    there = [name for name in metrics if not name.startswith("wrong/")]
    raise GateError(f"--gate: {rule.text!r}: the evaluation has no {rule.metric}; it has {', '.join(there)}")


def _tasks(document: Mapping[str, Any]) -> Sequence[str]:
    return sorted({answer.get("task", "") for answer in document["answers"]})


def _said(number: Numbers, *, sign: str = "") -> str:
    interval = "" if number["low"] is None else f" [{number['low']:{sign}.4g}, {number['high']:{sign}.4g}]"
    chance = f", p {number['p']:.2g}" if number.get("p") is not None else ""
    never = "" if number.get("seen", True) else " (no answer is of this class)"
    return f"{number['value']:{sign}.4g}{interval}{chance} on {number['prompts']} prompts{never}"
