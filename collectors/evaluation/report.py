"""From the answers of an evaluation to its numbers, and from two evaluations to their difference.

A report is JSON, without NaN:

    {"prompts", "samples", "pass_above", "seed",
     "metrics": {"reward" | "pass@<k>": {"value", "low", "high", "prompts"}},
     "answers", "unscored", "failures": {name: answers}, "truncated": answers that ran out of tokens}

A comparison has the same metrics, of the differences, and for each how many prompts are `better`, `equal` and `worse`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from asyncrl.collectors.evaluation.statistics import mean_with_interval, pass_at_k

REWARD = "reward"

Answers = Sequence[Mapping[str, Any]]
Metrics = dict[str, dict[str, float]]
"""Name -> row id -> the prompt's value. A prompt is left out where it has too few scored answers."""


def prompt_metrics(answers: Answers, *, ks: Sequence[int], pass_above: float) -> Metrics:
    """Mean reward and pass@k of each prompt, over its scored answers: an unscored one is unknown, not wrong.

    `answers`: as `heldout.evaluate` returns them. An answer passes if its reward is above `pass_above`.
    """
    rewards: dict[str, list[float]] = {}
    for answer in answers:
        if answer["reward"] is not None:
            rewards.setdefault(answer["row_id"], []).append(answer["reward"])
    metrics: Metrics = {REWARD: {row: sum(scored) / len(scored) for row, scored in rewards.items()}}
    for k in ks:
        metrics[f"pass@{k}"] = {
            row: pass_at_k(len(scored), sum(reward > pass_above for reward in scored), k)
            for row, scored in rewards.items()
            if len(scored) >= k
        }
    return metrics


def report(answers: Answers, *, ks: Sequence[int], samples: int, pass_above: float, seed: int) -> dict[str, Any]:
    """The numbers of one evaluation. `seed`: of the bootstrap."""
    metrics = prompt_metrics(answers, ks=ks, pass_above=pass_above)
    unscored = [answer for answer in answers if answer["reward"] is None]
    return {
        "prompts": len({answer["row_id"] for answer in answers}),
        "samples": samples,
        "pass_above": pass_above,
        "seed": seed,
        "metrics": {
            name: asdict(mean_with_interval(list(values.values()), seed=seed)) for name, values in metrics.items()
        },
        "answers": len(answers),
        "unscored": len(unscored),
        "failures": dict(Counter(answer["failure"] for answer in unscored).most_common()),
        "truncated": sum(answer["finish_reason"] == "length" for answer in answers),
    }


def comparison(
    answers: Answers, against: Answers, *, ks: Sequence[int], pass_above: float, seed: int
) -> dict[str, Any]:
    """`answers` minus `against`, paired by prompt: most of what makes prompts differ drops out of the difference."""
    ours = prompt_metrics(answers, ks=ks, pass_above=pass_above)
    theirs = prompt_metrics(against, ks=ks, pass_above=pass_above)
    metrics = {}
    for name, values in ours.items():
        differences = [value - theirs[name][row] for row, value in values.items() if row in theirs[name]]
        metrics[name] = {
            **asdict(mean_with_interval(differences, seed=seed)),
            "better": sum(difference > 0 for difference in differences),
            "equal": sum(difference == 0 for difference in differences),
            "worse": sum(difference < 0 for difference in differences),
        }
    return {"metrics": metrics}
