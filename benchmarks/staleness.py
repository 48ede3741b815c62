"""`staleness`: what old data cost in learning, and what each correction gets back.

The tiny model, warm-started, learns by answers of the version a fixed number of updates ago, its *lag* (one process:
`staleness_run.py`). Arms are objectives. All arms of a seed share the warm start, the prompts in their order and the
seeds of all draws, so that they are compared pair by pair; the seeds decide, never one of them.

Control: `none` has no correction. It must lose what `async` keeps.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.journal import Journal

GRPO = {"preset": "grpo"}
ARMS: dict[str, dict[str, Any]] = {
    "none": {**GRPO, "surrogate": "reinforce", "importance_weight": {"type": "none"}},
    "ppo": GRPO,
    "tis": {**GRPO, "surrogate": "reinforce", "importance_weight": {"type": "token-tis"}},
    "decoupled": {**GRPO, "proximal": "behaviour-version"},
    "cispo": {"preset": "cispo"},
    "dppo": {
        **GRPO,
        "surrogate": "reinforce",
        "importance_weight": {"type": "token-tis"},
        "mask": [{"type": "dppo-tv"}],
    },
    "async": {"preset": "async"},
}
"""Arm -> `objective`. All but `async` have the advantage of GRPO, and its mean over tokens. `decoupled` is `ppo` where
engine and learner compute alike, as here: the mismatch it takes out of the clip is 1 but for rounding."""

ASYNC = {"preset": "async"}
PARTS: dict[str, dict[str, Any]] = {
    "async without its masks": {**ASYNC, "mask": []},
    "async without opsm": {**ASYNC, "mask": [{"type": "dppo-tv"}]},
    "async without dppo-tv": {**ASYNC, "mask": [{"type": "opsm"}]},
    "async without its anchor": {**ASYNC, "anchor": {"type": "none"}},
    "async with the advantage of grpo": {**ASYNC, "advantage": "group-mean-std"},
}
"""What each part of `async` is for: the same without it. Measured where it is hardest, at the longest lag."""

LAGS = (0, 1, 2, 4, 8)
RATES = (1e-3, 2e-3)
SEEDS = range(5)
STEPS = 60

LOSS_OF_NONE = 0.2  # of reward, at lag 8 and the high rate, against PPO's clip
OF_ON_POLICY = {4: 0.95, 8: 0.90}
"""Lag -> share of the reward without lag that `async` must keep, at the low rate."""

PROCESSES = 8
"""At most, a core each; a run of the tiny model is no faster with two."""

RUN_LIMIT_S = 600.0
"""Until the next of the runs that are under way is through: a run takes 5 s, a warm start 15 s, once a seed."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One run."""

    arm: str
    lag: int
    learning_rate: float
    seed: int
    steps: int = STEPS

    @property
    def alike(self) -> Setting:
        """The run whose gradients are these: without lag every ratio is 1, and the arms that share the advantage differ
        by rounding only (`tests/benchmarks/test_staleness.py`). One of them is made for all."""
        same = self.lag == 0 and self.arm in ARMS and self.arm != "async"
        return Setting("none", self.lag, self.learning_rate, self.seed, self.steps) if same else self

    def recipe(self) -> dict[str, Any]:
        return {
            "run": {"name": "staleness", "seed": self.seed, "max_steps": self.steps},
            "buffer": {"max_trajectory_age": self.lag},
            "learner": {"learning_rate": self.learning_rate},
            "objective": (ARMS | PARTS)[self.arm],
        }

    def __str__(self) -> str:
        return f"rate {self.learning_rate:g}, lag {self.lag}, {self.arm}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run ended with. reward: mean of the last 20 steps. steps: to a moving average of 0.8, None if never. ess,
    ess_sequence: of tokens and of whole answers, means over the steps."""

    reward: float
    steps: int | None
    ess: float
    ess_sequence: float


def measure(*, quick: bool, say: Say, full: bool = False) -> Measured:
    """Rows: one per run and one per arm, lag and rate, told apart by `kind`. quick: only what the targets need, 30 runs
    instead of 350, of which 300 differ. full: 25 more, `async` without each of its parts."""
    settings = needed() if quick else [*grid(), *(parts() if full else [])]
    journal = Journal(f"staleness-{'quick' if quick else 'grid'}")
    outcomes = run_all(settings, journal, say)
    rows = [run_row(setting, outcomes[setting]) for setting in settings]
    means = mean_rows(rows)
    journal.forget()
    return Measured(rows=[*rows, *means], targets=targets(means))


def grid() -> list[Setting]:
    """Every arm at every lag and rate, seed by seed, so that what is there early is comparable."""
    return [Setting(arm, lag, rate, seed) for seed in SEEDS for rate in RATES for lag in LAGS for arm in ARMS]


def parts() -> list[Setting]:
    return [Setting(arm, LAGS[-1], RATES[0], seed) for seed in SEEDS for arm in PARTS]


def needed() -> list[Setting]:
    """The part of it that the targets look at."""
    wanted = {("none", 8, 1e-3), ("none", 8, 2e-3), ("ppo", 8, 2e-3), *(("async", lag, 1e-3) for lag in (0, 4, 8))}
    return [setting for setting in grid() if (setting.arm, setting.lag, setting.learning_rate) in wanted]


# --- running ----------------------------------------------------------------------------------------------------------


def run_all(settings: Sequence[Setting], journal: Journal, say: Say) -> dict[Setting, Outcome]:
    """The outcome of each, several at a time; those in the journal, and those that are alike, are not run again."""
    outcomes = {Setting(*key): Outcome(*found) for key, found in journal.finished().items()}
    different = list(dict.fromkeys(setting.alike for setting in settings))
    missing = [setting for setting in different if setting not in outcomes]
    if len(missing) < len(different):
        say(f"{len(different) - len(missing)} of {len(different)} runs were finished before an interruption")
    for done, (setting, outcome) in enumerate(_finished(missing), len(different) - len(missing) + 1):
        journal.add(astuple(setting), astuple(outcome))
        outcomes[setting] = outcome
        say(
            f"{done}/{len(different)} {setting}: reward {outcome.reward:.3f}, ESS of answers {outcome.ess_sequence:.2f}"
        )
    return {setting: outcomes[setting.alike] for setting in settings}


def _finished(settings: Sequence[Setting]) -> Iterator[tuple[Setting, Outcome]]:
    """In the order in which they end. Raises RuntimeError after RUN_LIMIT_S without one: a killed process gives no
    answer."""
    if not settings:
        return
    processes = min(PROCESSES, os.cpu_count() or 1, len(settings))
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, initializer=_prepare) as pool:
        results = pool.imap_unordered(run, settings)
        for _ in settings:
            try:
                found = results.next(timeout=RUN_LIMIT_S)
            except multiprocessing.TimeoutError:
                raise RuntimeError(
                    f"no run has ended for {RUN_LIMIT_S:.0f} s: a process was killed, or the machine is busy. What is "
                    "finished is kept; call it again"
                ) from None
            yield found


def _prepare() -> None:
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # two a run say nothing


def run(setting: Setting) -> tuple[Setting, Outcome]:
    """Train it, with the warm start of its seed."""
    from asyncrl.benchmarks.staleness_run import train
    from asyncrl.config.convert import convert
    from asyncrl.learners.tiny import ensure_tiny

    trace = train(convert(setting.recipe()), ensure_tiny(setting.seed))
    return setting, Outcome(trace.reward_end, trace.steps_to_reward, fmean(trace.ess), fmean(trace.ess_sequence))


# --- rows and targets -------------------------------------------------------------------------------------------------


def run_row(setting: Setting, outcome: Outcome) -> Row:
    """`same_as`: the arm whose run it is, where that is another one."""
    return {
        "kind": "run",
        "arm": setting.arm,
        "lag": setting.lag,
        "learning_rate": setting.learning_rate,
        "seed": setting.seed,
        "reward_end": outcome.reward,
        "steps_to_reward": outcome.steps,
        "ess": outcome.ess,
        "ess_sequence": outcome.ess_sequence,
        "same_as": "" if setting.alike == setting else setting.alike.arm,
    }


def mean_rows(rows: Iterable[Row]) -> list[Row]:
    """Over the seeds. steps_to_reward: of the runs that got there, `reached` of them."""
    by_setting: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        by_setting.setdefault((row["arm"], row["lag"], row["learning_rate"]), []).append(row)
    found = []
    for (arm, lag, rate), runs in by_setting.items():
        steps = [row["steps_to_reward"] for row in runs if row["steps_to_reward"] is not None]
        found.append(
            {
                "kind": "mean",
                "arm": arm,
                "lag": lag,
                "learning_rate": rate,
                "seeds": len(runs),
                "reward_end": fmean(row["reward_end"] for row in runs),
                "reward_end_least": min(row["reward_end"] for row in runs),
                "reward_end_most": max(row["reward_end"] for row in runs),
                "steps_to_reward": fmean(steps) if steps else None,
                "reached": len(steps),
                "ess": fmean(row["ess"] for row in runs),
                "ess_sequence": fmean(row["ess_sequence"] for row in runs),
                "same_as": runs[0]["same_as"],
            }
        )
    return found


def targets(means: Sequence[Row]) -> list[Target]:
    """All over the means of five seeds."""
    reward = {(row["arm"], row["lag"], row["learning_rate"]): row["reward_end"] for row in means}
    low, high = RATES
    on_policy = reward["async", 0, low]
    kept = OF_ON_POLICY[8]
    return [
        Target(
            f"rate {high:g}, lag 8: reward of ppo less that of none",
            reward["ppo", 8, high] - reward["none", 8, high],
            LOSS_OF_NONE,
            "higher",
        ),
        *(
            Target(
                f"rate {low:g}, lag {lag}: reward of async, of what it is without lag",
                reward["async", lag, low] / on_policy,
                share,
                "higher",
            )
            for lag, share in OF_ON_POLICY.items()
        ),
        Target(
            f"control: rate {low:g}, lag 8: reward without a correction, of what async has without lag",
            reward["none", 8, low] / on_policy,
            kept,
            "lower",
        ),
    ]


def plot(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Reward and ESS over the lag, a line for each arm, a column for each rate, as PNG."""
    from asyncrl.benchmarks.staleness_plot import draw

    draw([row for row in rows if row["kind"] == "mean"], file)
