"""From the answers of a profile to its numbers. Pure: `answers` are the entries of `heldout.evaluate`.

A report is JSON, without NaN; a number that nothing was known of is None:

    {"prompts", "answers", "group_size", "pass_above",
     "pass":        {"value", "low", "high", "prompts"}: mean of the prompts' pass rates, 95 % interval
     "pass_rate":   11 counts of prompts by pass rate, rounded down to tenths, as the metric of that name
     "reward":      {"mean", "std", "best"}, over scored answers; the outcome, without shaping. best: share that has the
                    highest one seen
     "zero_variance": share of prompts whose scored answers all have the same reward
     "gradient":    expected share of groups of `group_size` with two different rewards: those that teach something
     "parts":       {name: {"mean", "std", "weight", "role", "share"}}; share: of the variance of the weighted sum;
                    of a mixture by `task/part`
     "passed", "wrong": {class: answers}
     "unscored", "failures": {class: answers}, "details": {failure: that of the first}
     "tokens":      {"mean", "p50", "p95", "max"} of an answer; "truncated": share that ran out of tokens
     "repetition":  mean share of an answer's grams of four words that it had before
     "verifier_s":  {"mean", "p95", "max"} of one answer, seconds; without those whose verifier was killed
     "speed":       {"seconds", "tokens_per_s", "scoring_share", "steps_per_hour", "assumed"}}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.collectors.evaluation.heldout import wrong_of
from asyncrl.collectors.evaluation.report import Answers, by_prompt
from asyncrl.collectors.evaluation.statistics import rate_with_interval
from asyncrl.config.rewards import Declared
from asyncrl.learners.repetition import repeated

ROUNDING = 1e-9
"""Relative; rewards that differ by less are equal sums that were rounded differently."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What of the recipe the numbers are about.

    parts: weight and role of those that are not plain outcomes of weight 1; of a mixture by `task/part` (mixed).
    fresh_only: groups of equal rewards are left out and others take their place (`buffer.dynamic_sampling`).
    score_workers: verifier processes.
    """

    group_size: int
    groups_per_step: int
    pass_above: float
    seed: int
    parts: Mapping[str, Declared]
    mixed: bool = False
    score_workers: int = 1
    fresh_only: bool = False


def report(answers: Answers, setting: Setting, *, seconds: float) -> dict[str, Any]:
    """The numbers of a profile. seconds: from the first request to the last score."""
    scored = [answer for answer in answers if answer["reward"] is not None]
    unscored = [answer for answer in answers if answer["reward"] is None]
    rewards = np.array([answer["reward"] for answer in scored], np.float64)
    raw = [[answer["reward"] for answer in members] for members in by_prompt(scored).values()]
    passes = [float(np.mean(np.array(group) > setting.pass_above)) for group in raw]
    groups = [[_leveled(reward) for reward in group] for group in raw]
    played = [answer for answer in answers if answer["tokens"]]
    tokens = np.array([answer["tokens"] for answer in played], np.float64)
    verified = np.array([answer["verifier_s"] for answer in played if answer["verifier_s"] is not None], np.float64)
    gradient = _mean([different(group, setting.group_size) for group in groups])
    return {
        "prompts": len(by_prompt(answers)),
        "answers": len(answers),
        "group_size": setting.group_size,
        "pass_above": setting.pass_above,
        "pass": asdict(rate_with_interval(passes)),
        "pass_rate": _tenths(passes),
        "reward": {
            "mean": _mean(rewards),
            "std": _over(np.std, rewards),
            "best": _over(_best, [_leveled(reward) for reward in rewards.tolist()]),
        },
        "zero_variance": _mean([float(min(group) == max(group)) for group in groups]),
        "gradient": gradient,
        "parts": _parts_by_task(scored, setting),
        "passed": int((rewards > setting.pass_above).sum()),
        "wrong": _counts(filter(None, map(wrong_of, scored))),
        "unscored": len(unscored),
        "failures": _counts(answer["failure"] for answer in unscored),
        "details": {answer["failure"]: answer["detail"] for answer in reversed(unscored)},
        "tokens": _spread(tokens, ("mean", "p50", "p95", "max")),
        "truncated": _mean([float(answer["finish_reason"] == "length") for answer in played]),
        "repetition": _mean([share for answer in played if (share := repetition(answer["answer"])) is not None]),
        "verifier_s": _spread(verified, ("mean", "p95", "max")),
        "speed": _speed(played, setting, seconds=seconds, scoring=float(verified.sum()), gradient=gradient),
    }


def different(rewards: Sequence[float], size: int) -> float:
    """Probability that a group of `size` answers to this prompt has two different rewards; of passed and failed ones
    with pass rate p that is 1 - p^size - (1 - p)^size.

    With at least `size` rewards it is estimated without bias, as the share of their subsets of that size; with fewer by
    the formula from the rates seen, which is too low: a prompt solved by none of 4 answers may be by one of 8.

    >>> different([1.0, 0.0, 0.0, 0.0], 4), different([1.0, 0.0], 2), different([1.0, 0.0], 3)
    (1.0, 1.0, 0.75)
    """
    n, seen = len(rewards), Counter(rewards).values()
    same = sum(comb(count, size) / comb(n, size) if n >= size else (count / n) ** size for count in seen)
    return 1.0 - min(1.0, same)


def repetition(answer: str) -> float | None:
    """Share of the grams of four words that the answer had before (`learners.repetition`, there of tokens); None of an
    answer too short to have two.

    >>> repetition("yes"), repetition("one two three four " * 25)
    (None, 0.9587628865979382)
    """
    ids: dict[str, int] = {}
    words = [ids.setdefault(word, len(ids)) for word in answer.split()]
    return repeated(np.array(words, np.int32))


def _tenths(rates: Sequence[float]) -> list[int]:
    counts = [0] * 11
    for rate in rates:
        counts[int(10 * rate + 1e-9)] += 1  # 0.3 is a little less than three tenths
    return counts


def _parts_by_task(scored: Answers, setting: Setting) -> dict[str, dict[str, Any]]:
    """The parts of each task's score, which are told apart by the task's name where there are several."""
    if not setting.mixed:
        return _parts(scored, setting.parts)
    return {
        name: part
        for task in sorted({answer["task"] for answer in scored})
        for name, part in _parts([one for one in scored if one["task"] == task], setting.parts, f"{task}/").items()
    }


def _parts(scored: Answers, declared: Mapping[str, Declared], prefix: str = "") -> dict[str, dict[str, Any]]:
    """Of each part its spread, and its share of the variance of the weighted sum: cov(weight x part, sum) / var(sum).
    The shares add up to 1; one is below 0 where a part goes against the others. All scored answers have all parts."""
    if not scored:
        return {}
    names = list(scored[0]["parts"])
    values = np.array([[answer["parts"][name] for name in names] for answer in scored], np.float64)
    number = [declared.get(prefix + name, Declared(1.0, "outcome")) for name in names]
    weighed = values * [one.weight for one in number]
    total = weighed.sum(axis=1)
    equal = not names or np.ptp(total) <= ROUNDING * np.abs(total).max()
    return {
        prefix + name: {
            "mean": float(values[:, n].mean()),
            "std": float(values[:, n].std()),
            "weight": number[n].weight,
            "role": number[n].role,
            "share": None if equal else float(np.mean(weighed[:, n] * (total - total.mean())) / total.var()),
        }
        for n, name in enumerate(names)
    }


def _speed(
    played: Answers, setting: Setting, *, seconds: float, scoring: float, gradient: float | None
) -> dict[str, Any]:
    """Tokens a second as they were sampled here, and what that gives of steps if nothing else takes time. scoring:
    seconds of all verifiers."""
    tokens = sum(answer["tokens"] for answer in played)
    per_s = tokens / seconds if seconds > 0 and tokens else None
    groups: float | None = setting.groups_per_step
    assumed = f"a step takes {setting.groups_per_step} groups of {setting.group_size} answers as long as these"
    if setting.fresh_only:
        groups = setting.groups_per_step / gradient if gradient else None
        assumed += ", and as many more are sampled as are left out for equal rewards"
    steps = None
    if per_s and groups:
        steps = 3600 * per_s / (groups * setting.group_size * tokens / len(played))
    return {
        "seconds": seconds,
        "tokens_per_s": per_s,
        "scoring_share": scoring / setting.score_workers / seconds if seconds > 0 else None,
        "steps_per_hour": steps,
        "assumed": f"{assumed}, sampled by one collector at this speed, and the learner is never waited for",
    }


def _best(values: Sequence[float]) -> float:
    return values.count(max(values)) / len(values)


def _leveled(reward: float) -> float:
    """Without what is only rounding: 0.1 + 0.2 and 0.3 are the same reward, and teach nothing.

    >>> _leveled(0.1 + 0.2) == _leveled(0.3), _leveled(0.3) == _leveled(0.3001)
    (True, False)
    """
    return float(f"{reward:.9g}")


def _counts(names: Any) -> dict[str, int]:
    return dict(Counter(names).most_common())


def _mean(values: Sequence[float] | NDArray[np.float64]) -> float | None:
    return _over(np.mean, values)


def _over(of: Callable[..., Any], values: Sequence[float] | NDArray[np.float64]) -> float | None:
    return float(of(values)) if len(values) else None


_SPREAD: dict[str, Callable[..., Any]] = {
    "mean": np.mean,
    "p50": np.median,
    "p95": lambda values: np.quantile(values, 0.95),
    "max": np.max,
}


def _spread(values: NDArray[np.float64], names: Sequence[str]) -> dict[str, float | None]:
    return {name: _over(_SPREAD[name], values) for name in names}
