"""What a run came to, from the files of its folder: `summary.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.buffers.base import Stats
from asyncrl.learners.costs import lost_length_ratio
from asyncrl.learners.evaluation import stored_evaluations
from asyncrl.staleness import Lineages, Weights
from asyncrl.telemetry.metrics import read_metrics, surviving_steps
from asyncrl.telemetry.text import Price, wait_share

WINDOW = 20
"""Steps, at most, over which the reward at the beginning and at the end is averaged: no step is in both."""

SHOWN = 3


def summarise(
    run_dir: Path, *, weights: Weights, lineages: Lineages, seconds: float, stats: Stats, stopped: bool
) -> dict[str, Any]:
    """The summary of a run that ends with `weights`. Steps and evaluations of rewound branches do not count; those
    before a resume do. seconds: of this learner, as are `steps_now` and `tokens_now`. stats: the buffer's last."""
    records = read_metrics(run_dir / "metrics.jsonl")
    steps = surviving_steps(records)
    evaluations = {
        name: result
        for name, result in stored_evaluations(run_dir / "eval").items()
        if lineages.is_ancestor(name, weights.lineage)
    }
    before, after = None, None
    if evaluations:
        first, last = min(evaluations, key=lambda w: w.version), max(evaluations, key=lambda w: w.version)
        before = evaluations[first] if first.version < weights.version else None
        after = evaluations[last] if last.version == weights.version else None
    now = [step for step in steps if step["lineage"] == weights.lineage]
    waited = wait_share(steps)
    price = Price(
        waited=waited,
        groups=sum(stats.lost.values()),
        again=sum(stats.returns.values()),
        tokens=sum(stats.lost_tokens.values()),
        seconds=sum(seconds for step in steps for seconds in step["step_lost_seconds"].values()),
        masked=sum(step["tokens_masked"] for step in steps),
    )
    checkpoint = run_dir / "checkpoints" / f"version-{weights.version:06d}"
    return {
        "steps": weights.version,
        "seconds": seconds,
        "steps_now": len(now),
        "tokens": steps[-1]["tokens_total"] if steps else 0,
        "tokens_now": sum(step["tokens"] for step in now),
        **reward_ends([step["reward/mean"] for step in steps]),
        "success_before": before["success"] if before else None,
        "success_after": after["success"] if after else None,
        "eval_n": _rows(after or before or {}),
        "prompts": _side_by_side(before, after),
        "lost": stats.lost,
        "lost_length_ratio": lost_length_ratio(stats),
        "price": price._asdict(),
        "age_max": max((step["age/max"] for step in steps if step["age/max"] is not None), default=None),
        "age_mean": _mean_age(steps),
        "learner_wait_share": waited,
        "restarts": sum(record.get("event") == "restart" for record in records),
        "checkpoint": str(checkpoint),
        "archive": str(run_dir / "archive"),
        "metrics": str(run_dir / "metrics.jsonl"),
        "resolved_recipe": str(run_dir / "recipe.yaml"),
        "logs": str(logs) if (logs := run_dir / "logs").is_dir() else None,  # of processes started by hand: elsewhere
        "stopped": stopped,
    }


def reward_ends(rewards: Sequence[float | None]) -> dict[str, Any]:
    """Mean reward of a run's first and last steps. Of one with fewer than 2 x WINDOW, each half, so that a short run
    does not look as if nothing had changed in it. rewards: of every step; None: nothing was scored."""
    window = min(WINDOW, max(len(rewards) // 2, 1))
    return {"reward_first": _mean(rewards[:window]), "reward_last": _mean(rewards[-window:]), "reward_window": window}


def _rows(evaluation: Mapping[str, Any]) -> int | None:
    """How many were answered, each once or more often."""
    return len({(answer.get("task", ""), answer["row_id"]) for answer in evaluation.get("answers", ())}) or None


def _side_by_side(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The first rows that both evaluations have: not chosen by how they came out."""
    if before is None or after is None:
        return []
    later = {answer["row_id"]: answer for answer in after["answers"]}
    pairs = [(answer, later[answer["row_id"]]) for answer in before["answers"] if answer["row_id"] in later]
    return [
        {"prompt": old["prompt"], "before": old["answer"], "after": new["answer"], "expected": old["expected"]}
        for old, new in pairs[:SHOWN]
    ]


def _mean_age(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Over all trained tokens of the run, not over steps."""
    counts: dict[int, int] = {}
    for step in steps:
        for age, tokens in step["age/tokens"].items():
            counts[int(age)] = counts.get(int(age), 0) + tokens
    total = sum(counts.values())
    return sum(age * tokens for age, tokens in counts.items()) / total if total else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
