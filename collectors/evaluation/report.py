"""From the answers of an evaluation to its numbers.

A report is JSON, without NaN:

    {"prompts", "samples", "pass_above", "seed",
     "metrics": {name: {"value", "low", "high", "prompts"}},
     "answers", "unscored", "failures": {name: answers}, "truncated": answers that ran out of tokens,
     "wrong": {class: answers}, "solved": {"never" | "sometimes" | "always": prompts},
     "latency_s", "verifier_s": {"p50", "p95"}, or None,
     "by": {"task" | "difficulty": {group: {"prompts", "metrics"}}}}

Metrics, each with its 95 % interval over prompts:

| name                   | per prompt                                                                                |
|------------------------|-------------------------------------------------------------------------------------------|
| reward                 | mean over its scored answers                                                              |
| pass@K                 | unbiased, of its scored answers                                                           |
| majority@N             | of all N answers, where there are three and all are scored                                |
| reward/PART            | mean of a part                                                                            |
| wrong/CLASS            | share of its scored answers                                                               |
| unscored, truncated    | share of its answers                                                                      |
| tokens                 | mean over its answers                                                                     |
| tokens_per_success     | of all prompts together: tokens of all scored answers / answers that pass                 |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from asyncrl.collectors.evaluation.heldout import wrong_of
from asyncrl.collectors.evaluation.levels import levels
from asyncrl.collectors.evaluation.statistics import (
    Estimate,
    majority,
    mean_with_interval,
    pass_at_k,
    rate_with_interval,
    ratio_with_interval,
)
from asyncrl.config.evaluation import FEWEST_VOTES, REWARD

TOKENS = "tokens"
TOKENS_PER_SUCCESS = "tokens_per_success"

RATE = (0.0, 1.0)
"""The bounds of a share."""

SOLVED = ("never", "sometimes", "always")

Answers = Sequence[Mapping[str, Any]]
Key = tuple[str, str]
"""Task and row id."""

Metrics = dict[str, dict[Key, float]]
"""Name -> prompt -> its value. A prompt is left out where it has too few scored answers."""


def less_is_better(metric: str) -> bool:
    """
    >>> less_is_better("wrong/unsafe"), less_is_better("tokens_per_success"), less_is_better("reward/exact")
    (True, True, False)
    """
    return metric.startswith(("wrong/", "unscored", "truncated", "tokens"))


def key_of(answer: Mapping[str, Any]) -> Key:
    """Whose answer it is."""
    return answer.get("task", ""), answer["row_id"]


def by_prompt(answers: Answers) -> dict[Key, list[Mapping[str, Any]]]:
    """The answers to each prompt, in their order."""
    found: dict[Key, list[Mapping[str, Any]]] = {}
    for answer in answers:
        found.setdefault(key_of(answer), []).append(answer)
    return found


def classes(answers: Answers) -> set[str]:
    """Of what is wrong with scored answers."""
    return {wrong for answer in answers if (wrong := wrong_of(answer))}


def prompt_metrics(
    answers: Answers, *, ks: Sequence[int], pass_above: float, wrong: Iterable[str] | None = None
) -> Metrics:
    """The value of each metric for each prompt; an unscored answer is unknown, not wrong. wrong: the classes that are
    counted; None: those that occur.

    `answers`: as `heldout.evaluate` returns them. An answer passes if its reward is above `pass_above`.
    """
    prompts = by_prompt(answers)
    scored = {key: [one for one in all_of if one["reward"] is not None] for key, all_of in prompts.items()}
    scored = {key: known for key, known in scored.items() if known}
    passes = {key: [one["reward"] > pass_above for one in known] for key, known in scored.items()}
    samples = max((len(all_of) for all_of in prompts.values()), default=0)
    metrics: Metrics = {REWARD: {key: _mean(one["reward"] for one in known) for key, known in scored.items()}}
    for k in ks:
        metrics[f"pass@{k}"] = {
            key: pass_at_k(len(passed), sum(passed), k) for key, passed in passes.items() if len(passed) >= k
        }
    if samples >= FEWEST_VOTES:
        metrics[f"majority@{samples}"] = {
            key: majority([_reading(one) for one in known], passes[key])
            for key, known in scored.items()
            if len(known) == samples
        }
    for part in sorted({name for known in scored.values() for one in known for name in one.get("parts", {})}):
        values = {key: [_part(one, part) for one in known] for key, known in scored.items()}
        numbers = {key: [value for value in of if value is not None] for key, of in values.items()}
        metrics[f"{REWARD}/{part}"] = {key: _mean(of) for key, of in numbers.items() if of}
    for name in sorted(classes(answers) if wrong is None else wrong):
        metrics[f"wrong/{name}"] = {key: _mean(wrong_of(one) == name for one in known) for key, known in scored.items()}
    metrics["unscored"] = {key: _mean(one["reward"] is None for one in all_of) for key, all_of in prompts.items()}
    metrics["truncated"] = {
        key: _mean(one["finish_reason"] == "length" for one in all_of) for key, all_of in prompts.items()
    }
    tokens = {key: [one["tokens"] for one in all_of if one.get("tokens")] for key, all_of in prompts.items()}
    metrics[TOKENS] = {key: _mean(of) for key, of in tokens.items() if of}
    return metrics


def bounds_of(*sides: Answers) -> dict[str, tuple[float, float] | None]:
    """Between what the metrics lie that are not shares of something (`RATE`): rewards and parts from 0 to 1, or as far
    beyond as one was seen; None: nobody knows, as of tokens."""
    bounds: dict[str, tuple[float, float] | None] = {TOKENS: None}
    for answer in (one for side in sides for one in side if one["reward"] is not None):
        numbers = {REWARD: answer["reward"], **{f"{REWARD}/{name}": of for name, of in answer.get("parts", {}).items()}}
        for name, value in numbers.items():
            if value is not None:
                low, high = bounds.get(name) or RATE
                bounds[name] = min(low, value), max(high, value)
    return bounds


def costs(answers: Answers, *, pass_above: float) -> dict[Key, tuple[int, int]]:
    """Of each prompt with scored answers: their tokens, and how many of them pass."""
    found = {}
    for key, all_of in by_prompt(answers).items():
        scored = [one for one in all_of if one["reward"] is not None and one.get("tokens")]
        if scored:
            found[key] = (sum(one["tokens"] for one in scored), sum(one["reward"] > pass_above for one in scored))
    return found


def solved(answers: Answers, *, pass_above: float) -> dict[str, set[Key]]:
    """Prompts by whether no answer passed, some did, or all."""
    found: dict[str, set[Key]] = {name: set() for name in SOLVED}
    for key, rate in prompt_metrics(answers, ks=[1], pass_above=pass_above)["pass@1"].items():
        found["never" if rate == 0 else "always" if rate == 1 else "sometimes"].add(key)
    return found


def report(
    answers: Answers,
    *,
    ks: Sequence[int],
    samples: int,
    pass_above: float,
    seed: int,
    wrong: Iterable[str] | None = None,
) -> dict[str, Any]:
    """The numbers of one evaluation. `seed`: of the bootstrap. wrong: classes that are counted, also where no answer is
    of them, as another side's; None: those that occur."""
    counted = classes(answers) if wrong is None else set(wrong)
    unscored = [answer for answer in answers if answer["reward"] is None]
    found = Counter(name for answer in answers if (name := wrong_of(answer)))
    return {
        "prompts": len(by_prompt(answers)),
        "samples": samples,
        "pass_above": pass_above,
        "seed": seed,
        "metrics": _estimates(answers, ks=ks, pass_above=pass_above, seed=seed, wrong=counted),
        "answers": len(answers),
        "unscored": len(unscored),
        "failures": dict(Counter(answer["failure"] for answer in unscored).most_common()),
        "truncated": sum(answer["finish_reason"] == "length" for answer in answers),
        "wrong": dict(found.most_common()),
        "solved": {name: len(keys) for name, keys in solved(answers, pass_above=pass_above).items()},
        "latency_s": _spread(answer.get("latency_s") for answer in answers),
        "verifier_s": _spread(answer.get("verifier_s") for answer in answers),
        "by": {
            name: {
                group: {
                    "prompts": len(by_prompt(members)),
                    "metrics": _estimates(members, ks=ks, pass_above=pass_above, seed=seed, wrong=counted),
                }
                for group, members in groups.items()
            }
            for name, groups in grouped(answers).items()
        },
    }


def grouped(answers: Answers) -> dict[str, dict[str, Answers]]:
    """The answers by task, where there are several, and by difficulty, where entries have one."""
    found: dict[str, dict[str, Answers]] = {}
    if len(tasks := {answer.get("task", "") for answer in answers}) > 1:
        found["task"] = {name: [one for one in answers if one.get("task", "") == name] for name in sorted(tasks)}
    if any("difficulty" in answer for answer in answers):
        level = levels({key: all_of[0].get("difficulty") for key, all_of in by_prompt(answers).items()})
        members: dict[str, list[Mapping[str, Any]]] = {name: [] for name in dict.fromkeys(level.values())}
        for key, all_of in by_prompt(answers).items():
            members[level[key]] += all_of
        found["difficulty"] = dict(members)
    return found


def _estimates(
    answers: Answers, *, ks: Sequence[int], pass_above: float, seed: int, wrong: Iterable[str]
) -> dict[str, dict[str, Any]]:
    bounds = bounds_of(answers)
    found: dict[str, Estimate] = {}
    for name, per_prompt in prompt_metrics(answers, ks=ks, pass_above=pass_above, wrong=wrong).items():
        values = list(per_prompt.values())
        limits = bounds.get(name, RATE)
        found[name] = (
            mean_with_interval(values, seed=seed) if limits is None else rate_with_interval(values, bounds=limits)
        )
    if cost := list(costs(answers, pass_above=pass_above).values()):
        found[TOKENS_PER_SUCCESS] = ratio_with_interval(cost, seed=seed)
    return {name: asdict(estimate) for name, estimate in found.items()}


def _spread(seconds: Iterable[float | None]) -> dict[str, float] | None:
    known = [value for value in seconds if value is not None]
    if not known:
        return None
    p50, p95 = np.quantile(known, [0.5, 0.95])
    return {"p50": float(p50), "p95": float(p95)}


def _reading(answer: Mapping[str, Any]) -> str:
    reading: str = answer.get("read") or answer.get("answer", "").strip()
    return reading


def _part(answer: Mapping[str, Any], name: str) -> float | None:
    value: float | None = answer.get("parts", {}).get(name)
    return value


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)
