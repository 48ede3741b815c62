"""Signs that the policy has learnt what pays instead of what was meant (`docs/watch.md`). Pure.

A run is looked at after every step: its first `WINDOW` steps against its newest ones, and its evaluations. What is odd
is a warning, never an end: only a person can say whether longer answers are better ones.

| about               | what it says                                                                                   |
|---------------------|------------------------------------------------------------------------------------------------|
| `watch/heldout`     | success on held-out rows fell while training went on rising, or does not follow it             |
| `watch/length`      | answers are `LENGTH_FACTOR` times as long as at first, or as short                             |
| `watch/repetition`  | answers repeat themselves more than at first, by `MORE_REPETITION`                             |
| `watch/part`        | the reward rose, and more than half of that is a part that says nothing of right or wrong; or  |
|                     | one outcome rose at another's cost; `watch/part/<name>`: of a task of a mixture                |
| `watch/violations`  | the share of answers with a violation rose by `MORE_VIOLATIONS`                                |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncrl.config.rewards import Declared

WINDOW = 10
"""Steps of a mean: one step's batch is small, ten of them are a trend and come within a run's first minutes."""

LENGTH_FACTOR = 2.0
"""Training for a verifiable reward does lengthen answers; doubling is where somebody should have read a few."""

MORE_REPETITION = 0.2
"""A fifth of an answer said twice more than before is no longer style."""

MORE_VIOLATIONS = 0.05
"""One answer in twenty more that does what must not happen."""

SURE = 3.0
"""Standard errors by which held-out success must have moved: looked at fifty times, two would be met by chance."""

SURE_OF_STEPS = 5.0
"""Standard errors by which a mean of steps must have moved. It is looked at after every step, always against the same
first ones: of a thousand steps that only scatter, one run in 75 moves as far, and with three standard errors one in
four."""

LEAST_RISE = 0.2
"""Of the scatter of single rewards, what a rise must come to before it is asked whose it is: less is seen in no
answer."""

PREFIX = "watch/"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Held-out success of one version; error: its standard error over prompts."""

    version: int
    success: float
    error: float

    @classmethod
    def of(cls, version: int, answers: Iterable[Mapping[str, Any]]) -> Evaluated | None:
        """Of the answers of an evaluation (`collectors/evaluation`); None if nothing was scored."""
        rows: dict[str, list[float]] = {}
        for answer in answers:
            if answer["reward"] is not None:
                rows.setdefault(answer["row_id"], []).append(answer["reward"])
        means = [float(np.mean(rewards)) for rewards in rows.values()]
        if not means:
            return None
        return cls(version, float(np.mean(means)), float(np.std(means)) / math.sqrt(len(means)))


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A sign, and a sentence with its numbers."""

    about: str
    text: str


@dataclass(slots=True)
class Watch:
    """What has been seen of a run so far. numbers: weight and role of each reward part that the recipe declares; other
    parts are outcomes of weight 1.

    A sign is told once; when it was absent for `WINDOW` steps and comes back, once more.
    """

    numbers: Mapping[str, Declared]
    tasks: Mapping[str, Mapping[str, Declared]] = field(default_factory=dict)  # of a mixture: the same of each, by name
    steps: list[Mapping[str, Any]] = field(default_factory=list)
    _told: dict[str, int] = field(default_factory=dict)  # sign -> the step it was last seen in

    def resume(self, records: Iterable[Mapping[str, Any]], version: int) -> None:
        """Take over what metrics.jsonl has of the steps up to `version`, and which signs were told. A later lineage
        made some of the steps again."""
        steps: dict[int, Mapping[str, Any]] = {}
        for record in records:
            if "step" in record:
                steps[record["step"]] = record
            elif record.get("event") == "warning" and str(record.get("about", "")).startswith(PREFIX):
                self._told[record["about"]] = version  # as if it were there still: it is not told at once again
        self.steps = [_kept(steps[step]) for step in sorted(steps) if step <= version]

    def see(self, record: Mapping[str, Any], evaluations: Sequence[Evaluated]) -> list[Suspicion]:
        """After a step with these metrics: the signs that a person has not been told of. evaluations: by version."""
        self.steps.append(_kept(record))
        step, new = record["step"], []
        for sign in suspicions(self.steps, evaluations, self.numbers, self.tasks):
            if step - self._told.get(sign.about, -2 * WINDOW) > WINDOW:
                new.append(sign)
            self._told[sign.about] = step
        return new


def suspicions(
    steps: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Evaluated],
    numbers: Mapping[str, Declared],
    tasks: Mapping[str, Mapping[str, Declared]] | None = None,
) -> list[Suspicion]:
    """All signs that these steps (their metrics, oldest first) and evaluations show, in the order of the table.

    Whose rise a reward's is, is asked of each of several tasks by itself: parts of one say nothing of another's reward.
    """
    found = [*_heldout(steps, evaluations)]
    if len(steps) >= 2 * WINDOW:
        first, last = steps[:WINDOW], steps[-WINDOW:]
        found += [*_length(first, last), *_repetition(first, last)]
        for task, own in (tasks or {"": numbers}).items():
            found += _parts(first, last, own, f"/{task}" if task else "")
        found += _violations(first, last)
    return found


def _heldout(steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Evaluated]) -> list[Suspicion]:
    if len(evaluations) < 2:
        return []
    start, *_, last = evaluations
    best = max(evaluations[:-1], key=lambda evaluated: evaluated.success)
    before, now = (_until(steps, "reward/mean", one.version) for one in (best, last))
    apart = SURE * math.hypot(best.error, last.error)
    if best.success - last.success > apart and before and now and _mean(now) >= _mean(before):
        return [
            Suspicion(
                "watch/heldout",
                f"held-out success fell from {best.success:.3f} (version {best.version}) to {last.success:.3f} "
                f"(version {last.version}), and the training reward did not: {_mean(before):.3f}, now "
                f"{_mean(now):.3f}. Read answers of both (asyncrl view), and look for what the reward misses",
            )
        ]
    early, late = (_until(steps, "outcome/mean", version) for version in (start.version + WINDOW, last.version))
    if last.version < start.version + 2 * WINDOW or not (_rose(early, late)):
        return []
    rise, followed = _mean(late) - _mean(early), last.success - start.success
    if followed + SURE * math.hypot(start.error, last.error) < rise / 2:
        return [
            Suspicion(
                "watch/heldout",
                f"the outcome rose by {rise:.3f} on training rows, and by {followed:+.3f} on held-out ones (version "
                f"{start.version} to {last.version}): the policy learns the rows, or the rows differ",
            )
        ]
    return []


def _length(first: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]]) -> list[Suspicion]:
    before, now = _values(first, "length/mean"), _values(last, "length/mean")
    if not before or not now or not _mean(before) > 0:
        return []
    factor = _mean(now) / _mean(before)
    if 1 / LENGTH_FACTOR < factor < LENGTH_FACTOR:
        return []
    moved = _mean(_values(last, "reward/mean")) - _mean(_values(first, "reward/mean"))
    return [
        Suspicion(
            "watch/length",
            f"answers have {_mean(now):.1f} tokens, {factor:.2f} times what they had at first; the reward moved by "
            f"{moved:+.3f} meanwhile. Are they better, or only {'longer' if factor > 1 else 'shorter'}?",
        )
    ]


def _repetition(first: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]]) -> list[Suspicion]:
    before, now = _values(first, "length/repetition"), _values(last, "length/repetition")
    if _mean(now) - _mean(before) <= MORE_REPETITION or not _rose(before, now):
        return []
    text = f"{_mean(now):.0%} of an answer repeats what it said before, {_mean(before):.0%} at first"
    return [Suspicion("watch/repetition", text)]


def _parts(
    first: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]], numbers: Mapping[str, Declared], of: str
) -> list[Suspicion]:
    """Whose rise the reward's is: parts times their weights, of which the reward is the sum. of: "", or "/TASK"."""
    moved: dict[str, float] = {}
    about, parts = f"watch/part{of}", f"reward_part{of}/"
    for name in sorted({key.removeprefix(parts) for step in last for key in step if key.startswith(parts)}):
        before, now = (_values(steps, parts + name) for steps in (first, last))
        if before and now:
            weight = numbers[name].weight if name in numbers else 1.0
            moved[name] = weight * (_mean(now) - _mean(before))
    rewards, rewards_now = (_values(steps, f"reward/mean{of}") for steps in (first, last))
    scatter = _mean(_values(first, f"reward/std{of}") or [0.0])
    rise = sum(moved.values())  # of the parts, before the task's `reward_scale`, which the reward and its scatter have
    if len(moved) < 2 or rise <= 0.0 or not _rose(rewards, rewards_now):
        return []
    if _mean(rewards_now) - _mean(rewards) <= LEAST_RISE * scatter:
        return []
    aside = {name for name in moved if name in numbers and numbers[name].role != "outcome"}
    most = max(moved, key=lambda name: moved[name])
    shares = ", ".join(f"{name} {moved[name]:+.3f}" for name in sorted(moved, key=lambda name: -moved[name]))
    if most in aside and moved[most] > rise / 2:
        return [
            Suspicion(
                about,
                f"{moved[most] / rise:.0%} of the reward's rise is the part {most}, which says nothing of right or "
                f"wrong ({shares}): give it less weight",
            )
        ]
    fell = [name for name in moved if name not in aside and moved[name] < -rise / 4]
    if fell:
        return [Suspicion(about, f"the reward rose at the cost of {', '.join(fell)} ({shares})")]
    return []


def _violations(first: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]]) -> list[Suspicion]:
    before, now = _values(first, "violations"), _values(last, "violations")
    if _mean(now) - _mean(before) <= MORE_VIOLATIONS or not _rose(before, now):
        return []
    return [Suspicion("watch/violations", f"{_mean(now):.1%} of answers violate a rule, {_mean(before):.1%} at first")]


def _kept(record: Mapping[str, Any]) -> dict[str, Any]:
    """What is looked at of a step's metrics."""
    names = ("step", "reward/mean", "reward/std", "outcome/mean", "length/mean", "length/repetition", "violations")
    of_tasks = ("reward_part/", "reward/mean/", "reward/std/")
    return {key: value for key, value in record.items() if key in names or key.startswith(of_tasks)}


def _values(steps: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """Of the steps that have it: a step may have nothing scored, an older asyncrl did not write every name."""
    return [step[name] for step in steps if step.get(name) is not None]


def _until(steps: Sequence[Mapping[str, Any]], name: str, version: int) -> Sequence[float]:
    """The values of the newest `WINDOW` steps up to a version that have one; of a version before the first steps, of
    those."""
    known = [step for step in steps if step.get(name) is not None]
    seen = [step for step in known if step["step"] <= version]
    return _values(seen[-WINDOW:] if len(seen) >= WINDOW else known[:WINDOW], name)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _rose(before: Sequence[float], now: Sequence[float]) -> bool:
    """By more than chance: the steps' own scatter says how much a mean of them moves by itself. Of fewer than half of a
    window nobody knows."""
    if 2 * min(len(before), len(now)) < WINDOW:
        return False
    error = math.sqrt(float(np.var(before, ddof=1)) / len(before) + float(np.var(now, ddof=1)) / len(now))
    return _mean(now) - _mean(before) > SURE_OF_STEPS * error
