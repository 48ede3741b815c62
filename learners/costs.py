"""What the age bound and the filters cost: from the buffer's sums before and after, pure.

The buffer counts from the beginning of the run; a step's own share is the difference of two of its snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.buffers.base import Lease, State, Stats

OVER_AGE = ("stale/over_age", "stale/straggler", "returned/over_age")
"""What was lost for its age alone; whatever else is lost says nothing about the policy's taste for short answers."""

TRAINED = f"{State.TRAINED}/trained"

HARD, EASY = 0.05, 0.95
"""Mean rewards (of tasks that reward from 0 to 1) beyond which all filtered groups were of one kind."""


def lost_groups(stats: Stats) -> dict[str, int]:
    """Groups so far by `state/reason`; those thrown away to be generated again under `returned/reason`."""
    return {**stats.lost, **{f"{State.RETURNED}/{why}": n for why, n in stats.returns.items() if n}}


def lost_seconds(stats: Stats) -> dict[str, float]:
    """Collector-seconds so far by reason; under `cancelled` those of work that was taken away in progress, whatever
    for: only its collector knows them, and adds them up."""
    cancelled = sum(member.progress.get("cancelled_s", 0.0) for member in stats.members)
    return {**stats.lost_seconds, **({"cancelled": cancelled} if cancelled else {})}


def step_costs(before: Stats, now: Stats) -> dict[str, Any]:
    """What was lost between two snapshots of one learner, by reason, and how it compares with what was trained."""
    return {
        "lost": now.lost,
        "lost_tokens": dict(now.lost_tokens),
        "lost_seconds": lost_seconds(now),
        "lost_reward": dict(now.lost_reward),
        "lost_length": dict(now.lost_length),
        "returns": dict(now.returns),
        "step_lost": grown(lost_groups(before), lost_groups(now)),
        "step_lost_tokens": grown(before.lost_tokens, now.lost_tokens),
        "step_lost_seconds": grown(lost_seconds(before), lost_seconds(now)),
    }


def grown(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """By how much each sum grew. One that shrank is no cost: a new lineage took groups back, a collector left.

    >>> grown({"a": 2, "b": 1, "c": 3}, {"a": 5, "b": 1, "d": 4, "c": 1})
    {'a': 3, 'd': 4}
    """
    return {key: value - before.get(key, 0) for key, value in now.items() if value > before.get(key, 0)}


def weights_costs(before: Stats, now: Stats) -> dict[str, float]:
    """What all collectors together spent on weights between two snapshots, seconds: fetching and checking them, and
    pausing for the exchange."""
    return {
        f"weights/{what}": sum(grown(_told(before, f"weights_{what}"), _told(now, f"weights_{what}")).values())
        for what in ("staged_s", "paused_s")
    }


def _told(stats: Stats, what: str) -> dict[str, float]:
    """A sum that each process tells of itself, in its beats."""
    return {member.incarnation: member.progress.get(what, 0.0) for member in stats.members}


def use_metrics(lease: Lease) -> dict[str, Any]:
    """How often the groups of a batch were trained before it, the share of those that never were, and in which attempt
    the groups came, mean."""
    counts: dict[str, int] = {}
    for uses in sorted(lease.uses):
        counts[str(uses)] = counts.get(str(uses), 0) + 1
    return {
        "uses": counts,
        "fresh": counts.get("0", 0) / len(lease.uses) if lease.uses else None,
        "attempts": sum(header.attempt + 1 for header in lease.headers) / len(lease.headers) if lease.headers else None,
    }


def lost_length_ratio(stats: Stats) -> float | None:
    """Length of the answers lost for their age over that of trained ones. None: none was lost so, or none is known.

    Of work that was cancelled only the tokens so far are known: a lower bound.
    """
    counts = lost_groups(stats)
    known = {key: n for key in OVER_AGE if (n := counts.get(key, 0)) and key in stats.lost_length}
    trained = stats.lost_length.get(TRAINED)
    if not known or not trained:
        return None
    return sum(stats.lost_length[key] * n for key, n in known.items()) / sum(known.values()) / trained


def empty_fills(before: Stats, now: Stats, *, limit: int) -> str:
    """Why a batch will not be filled, "" while there is hope. before: at the last step. limit: groups that may be left
    out in a row (`buffer.max_empty_fills`)."""
    row, at_first = now.filtered_in_row, before.filtered_in_row
    if row >= at_first:
        row -= at_first  # what went before this learner is another one's, perhaps of a task that was since repaired
    if row < limit:
        return ""
    reason = f"{State.FILTERED}/zero_variance"
    reward = mean_since(reason, before, now)
    if reward is None or HARD < reward < EASY:
        cause = "some prompts are solved by every answer and the others by none"
        fix = "take prompts in between (the `pass_rate` of the steps shows which), or a larger collector.group_size"
    elif reward <= HARD:
        cause = "no answer is rewarded"
        fix = "check what the verifier accepts, take easier prompts, or a model that solves some (`asyncrl sft`)"
    else:
        cause = "every answer is right"
        fix = "take harder prompts: these have nothing left to teach"
    said = "" if reward is None else f" of {reward:.3g} on average"
    return (
        f"the last {row} groups were all left out (buffer.dynamic_sampling): their members have equal rewards{said}, "
        f"{cause}.\nTo go on, {fix}. Or raise buffer.max_empty_fills"
    )


def mean_since(reason: str, before: Stats, now: Stats) -> float | None:
    """Mean reward of the groups that ended as `reason` between two snapshots."""
    n0, n1 = before.reasons.get(reason, 0), now.reasons.get(reason, 0)
    if n1 <= n0:
        return None
    return (now.lost_reward.get(reason, 0.0) * n1 - before.lost_reward.get(reason, 0.0) * n0) / (n1 - n0)
