"""What changed from one evaluation to another of the same prompts and seeds: paired by prompt, so that most of what
makes prompts differ drops out of the difference.

A comparison is JSON, without NaN:

    {"metrics": {name: {"value", "low", "high", "prompts", "better", "equal", "worse", "p"}},
     "changes": [{"from", "to", "answers"}]: answers by what was wrong with them, RIGHT where nothing was,
     "better", "worse": [{"task", "row_id", "prompt", "expected", "difference", "answers", "against"}],
     "by": {"task" | "difficulty" | "before": {group: {"prompts", "metrics"}}}}

Differences are those of the report's metrics, ours - against; `better` and `worse` are prompts, and lists of them by
their mean reward, the largest difference first. `before`: by whether the other side solved a prompt never, sometimes or
always.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from asyncrl.collectors.evaluation.heldout import wrong_of
from asyncrl.collectors.evaluation.report import (
    RATE,
    TOKENS_PER_SUCCESS,
    Answers,
    Key,
    bounds_of,
    by_prompt,
    classes,
    costs,
    grouped,
    key_of,
    less_is_better,
    prompt_metrics,
    solved,
)
from asyncrl.collectors.evaluation.statistics import (
    mean_with_interval,
    rate_difference,
    ratio_difference,
    sign_flip_p,
)
from asyncrl.config.evaluation import REWARD

RIGHT = "right"


def comparison(
    answers: Answers, against: Answers, *, ks: Sequence[int], pass_above: float, seed: int
) -> dict[str, Any]:
    """`answers` minus `against`. `seed`: of bootstrap and permutations."""
    settings: dict[str, Any] = {"ks": ks, "pass_above": pass_above, "seed": seed}
    wrong = classes(answers) | classes(against)  # one that only one side has, the other has none of
    groups = {
        name: {group: set(by_prompt(of)) for group, of in parts.items()} for name, parts in grouped(answers).items()
    }
    groups["before"] = {name: keys for name, keys in solved(against, pass_above=pass_above).items() if keys}
    better, worse = _moved(answers, against)
    return {
        "metrics": _differences(answers, against, wrong=wrong, **settings),
        "changes": _changes(answers, against, pass_above=pass_above),
        "better": better,
        "worse": worse,
        "by": {
            name: {
                group: {
                    "prompts": len(keys),
                    "metrics": _differences(_only(answers, keys), _only(against, keys), wrong=wrong, **settings),
                }
                for group, keys in parts.items()
            }
            for name, parts in groups.items()
        },
    }


def _differences(
    answers: Answers, against: Answers, *, ks: Sequence[int], pass_above: float, wrong: Iterable[str], seed: int
) -> dict[str, dict[str, Any]]:
    ours = prompt_metrics(answers, ks=ks, pass_above=pass_above, wrong=wrong)
    theirs = prompt_metrics(against, ks=ks, pass_above=pass_above, wrong=wrong)
    bounds = bounds_of(answers, against)
    metrics: dict[str, dict[str, Any]] = {}
    for name, values in ours.items():
        other = theirs.get(name, {})
        differences = [value - other[key] for key, value in values.items() if key in other]
        limits = bounds.get(name, RATE)
        sign = -1 if less_is_better(name) else 1
        metrics[name] = {
            **asdict(
                mean_with_interval(differences, seed=seed)
                if limits is None
                else rate_difference(differences, width=limits[1] - limits[0])
            ),
            "better": sum(sign * difference > 0 for difference in differences),
            "equal": sum(difference == 0 for difference in differences),
            "worse": sum(sign * difference < 0 for difference in differences),
            "p": sign_flip_p(differences, seed=seed),
        }
    our_costs, their_costs = costs(answers, pass_above=pass_above), costs(against, pass_above=pass_above)
    if both := [key for key in our_costs if key in their_costs]:
        sides = [[cost[key] for key in both] for cost in (our_costs, their_costs)]
        metrics[TOKENS_PER_SUCCESS] = {
            **asdict(ratio_difference(*sides, seed=seed)),
            # A prompt that is never solved has no number of its own, so neither counts nor a permutation can be had.
            **dict.fromkeys(("better", "equal", "worse", "p")),
        }
    return metrics


def _changes(answers: Answers, against: Answers, *, pass_above: float) -> list[dict[str, Any]]:
    """From what an answer was to what the one with the same prompt and sample number is, the commonest first."""
    theirs = by_prompt(against)
    pairs: Counter[tuple[str, str]] = Counter()
    for key, ours in by_prompt(answers).items():
        for old, new in zip(theirs.get(key, ()), ours, strict=False):
            pairs[_state(old, pass_above), _state(new, pass_above)] += 1
    return [{"from": old, "to": new, "answers": count} for (old, new), count in pairs.most_common()]


def _state(answer: Mapping[str, Any], pass_above: float) -> str:
    if answer["reward"] is None:
        return str(answer["failure"])
    return wrong_of(answer) or (RIGHT if answer["reward"] > pass_above else "not_passed")


def _moved(answers: Answers, against: Answers) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The prompts that are answered better, and those that are answered worse."""
    ours, theirs = by_prompt(answers), by_prompt(against)
    mine, other = (prompt_metrics(side, ks=[], pass_above=0.0)[REWARD] for side in (answers, against))
    rows = [
        {
            "task": key[0],
            "row_id": key[1],
            "prompt": ours[key][0].get("prompt", ""),
            "expected": ours[key][0].get("expected"),
            "difference": mine[key] - other[key],
            "answers": [_said(answer) for answer in ours[key]],
            "against": [_said(answer) for answer in theirs[key]],
        }
        for key in mine
        if key in other and mine[key] != other[key]
    ]
    rows.sort(key=lambda row: -abs(row["difference"]))
    return [row for row in rows if row["difference"] > 0], [row for row in rows if row["difference"] < 0]


def _said(answer: Mapping[str, Any]) -> dict[str, Any]:
    said = {name: answer.get(name, "") for name in ("answer", "reward", "failure")}
    return {**said, "wrong": wrong_of(answer)}


def _only(answers: Answers, keys: set[Key]) -> Answers:
    return [answer for answer in answers if key_of(answer) in keys]
