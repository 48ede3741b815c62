"""What old data cost in learning, as `asyncrl bench staleness --full --json docs/staleness.json` measured it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.benchmarks.staleness import ARMS, PARTS, RATES

MEASURED = Path(__file__).parent / "staleness.json"
Row = Mapping[str, Any]

MEANINGS = {
    "none": "no correction: `surrogate: reinforce`, `importance_weight: {type: none}`",
    "ppo": "`grpo`: PPO's clip",
    "tis": "`surrogate: reinforce`, which brings token TIS up to 2",
    "decoupled": "`grpo` with `proximal: behaviour-version`; engine and learner compute alike here",
    "cispo": "`cispo`",
    "dppo": "`surrogate: reinforce`, `mask: {type: dppo-tv}`",
    "async": "**`async`**",
}
"""Arm -> how a recipe says it."""


def means() -> list[Row]:
    """The rows of MEASURED that are means over seeds."""
    return [row for row in json.loads(MEASURED.read_bytes())["rows"] if row["kind"] == "mean"]


def reward(row: Row) -> str:
    return f"{row['reward_end']:.2f}"


def reward_and_steps(row: Row) -> str:
    """`0.91, 28`: reward, and steps to 0.8; `0.76, 38 (4 of 5)`, `0.48, never` where not all seeds got there."""
    if not row["reached"]:
        return f"{reward(row)}, never"
    some = "" if row["reached"] == row["seeds"] else f" ({row['reached']} of {row['seeds']})"
    return f"{reward(row)}, {row['steps_to_reward']:.0f}{some}"


def costs(rate: float, cell: Callable[[Row], str], *, rows: Sequence[Row]) -> str:
    """A line for each arm and a column for each lag that were measured at this rate."""
    at = {(row["arm"], row["lag"]): row for row in rows if row["learning_rate"] == rate}
    lags = sorted({lag for arm, lag in at if arm in ARMS})
    lines = ["| | " + " | ".join(f"lag {lag}" for lag in lags) + " |", "|---" * (len(lags) + 1) + "|"]
    for arm in ARMS:
        if found := {lag: at[arm, lag] for lag in lags if (arm, lag) in at}:
            cells = [cell(found[lag]) if lag in found else "" for lag in lags]
            lines.append(f"| {MEANINGS[arm]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def rewards() -> str:
    return costs(RATES[0], reward, rows=means())


def both_rates() -> str:
    rows = means()
    return "\n".join(f"Learning rate {rate:g}:\n\n{costs(rate, reward_and_steps, rows=rows)}" for rate in RATES)


def without_parts() -> str:
    """What `async` ends with as a whole and without each of its parts."""
    rows = {(row["arm"], row["lag"]): row for row in means() if row["learning_rate"] == RATES[0]}
    lag = max(lag for _, lag in rows)
    lines = [f"| lag {lag}, learning rate {RATES[0]:g} | reward | worst seed | ESS of answers |", "|---|---|---|---|"]
    for arm in ("async", *PARTS):
        if row := rows.get((arm, lag)):
            numbers = (row["reward_end"], row["reward_end_least"], row["ess_sequence"])
            lines.append(f"| {arm} | " + " | ".join(f"{number:.2f}" for number in numbers) + " |")
    return "\n".join(lines) + "\n"


PARTS_OF_PAGES = {
    "staleness_rewards": rewards,
    "staleness_both_rates": both_rates,
    "staleness_without_parts": without_parts,
}
"""Name of a generated part -> what writes it."""
