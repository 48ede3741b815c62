"""What a step tells about itself. Pure NumPy over what the step saw; names as in `docs/metrics.md`.

Everything is measured over the tokens of the step, each with the weights that its update started from. None stands
where there is nothing to average: NaN is not JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from asyncrl.learners.advantages import Advantages
from asyncrl.learners.batch import Batch, cut_answers, first_of_each, outcomes_of
from asyncrl.learners.buckets import Apart, mean
from asyncrl.learners.mismatch import age_zero
from asyncrl.learners.objectives.masks import NAMES
from asyncrl.learners.objectives.ratio import LOG_RATIO_LIMIT
from asyncrl.learners.repetition import repetition
from asyncrl.learners.step import Seen
from asyncrl.schema import Packed

STEP_NAMES = {
    "ratio_mean": "ratio/mean",
    "ess": "ess",
    "ess_sequence": "ess/sequence",
    "kl": "kl",
    "log_ratio_max": "log_ratio/max",
    "log_ratio_p999": "log_ratio/p999",
    "clip_fraction": "clip_fraction",
    "clip_fraction_positive": "clip_fraction/positive",
    "clip_fraction_negative": "clip_fraction/negative",
    "mask_fraction": "mask_fraction",
    "mask_fraction_positive": "mask_fraction/positive",
    "mask_fraction_negative": "mask_fraction/negative",
    "token_grad": "token_grad",
    "mismatch_mean": "mismatch/mean",
    "mismatch_max": "mismatch/max",
    "staleness_mean": "staleness/mean",
    "staleness_kl": "staleness/kl",
}
"""Keys of a bucket, and under which names a step has them of all its tokens."""


def step_metrics(
    packed: Packed,
    batch: Batch,
    advantages: Advantages,
    seen: Seen,
    *,
    first: NDArray[np.int64],
    update: str,
    violations: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """All metrics of a step that follow from its data. first: where the tokens of its first update lie in the batch.
    update: `weights.update` of the recipe. violations: names of its reward parts of that role."""
    after_change = continued(packed) if update == "keep" else None
    return {
        **reward_metrics(packed, violations),
        **length_metrics(packed),
        **group_metrics(batch, advantages),
        **age_metrics(batch, seen),
        **divergence_metrics(packed, batch, advantages, seen),
        **age_zero(batch, seen, first, after_change),
        **objective_metrics(batch, seen),
        **proximal_metrics(seen, continued=after_change),
        "loss": seen.loss,
        "tokens": seen.tokens,
        "tokens_masked": sum(batch.masked.values()),
        "age/masked": {str(age): tokens for age, tokens in batch.masked.items()},
        "nonfinite": batch.nonfinite + seen.nonfinite,
    }


def reward_metrics(packed: Packed, violations: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Rewards and their parts over scored members, what is wrong with those, and why the others were not scored."""
    begins = first_of_each(packed.answers)
    rewards = packed.rewards[begins]
    scored = rewards[~np.isnan(rewards)]
    outcomes = outcomes_of(packed)[begins]
    told = packed.table.column("reward_parts").filter(begins).to_pylist()
    violated = sum(any(name in violations and (value or 0.0) < 0 for name, value in row) for row in told)
    named = list(zip(packed.table.column("failure").filter(begins).to_pylist(), np.isnan(rewards), strict=True))
    failures = Counter(failure for failure, unscored in named if unscored)
    wrong = Counter(failure for failure, unscored in named if failure and not unscored)
    return {
        "reward/mean": mean(scored),
        "reward/std": float(scored.std()) if len(scored) else None,
        "outcome/mean": mean(outcomes[~np.isnan(rewards)]),
        "violations": violated / max(1, len(scored)),
        **{f"reward_part/{name}": value for name, value in means_of_parts(told).items()},
        "unscored": len(rewards) - len(scored),
        "failures": dict(sorted(failures.items())),
        "wrong": dict(sorted(wrong.items())),
    }


def task_metrics(packed: Packed, tasks: Iterable[str]) -> dict[str, Any]:
    """Rewards, their parts and outcomes of each of several tasks, by name; None, and no parts, of one that no scored
    member of the step is of."""
    begins = first_of_each(packed.answers) & ~np.isnan(packed.rewards)
    named = np.array(packed.table.column("task").filter(begins).to_pylist())
    told = packed.table.column("reward_parts").filter(begins).to_pylist()
    rewards, outcomes = packed.rewards[begins], outcomes_of(packed)[begins]
    found: dict[str, Any] = {}
    for task in tasks:
        own = named == task
        found[f"reward/mean/{task}"] = mean(rewards[own])
        found[f"reward/std/{task}"] = float(rewards[own].std()) if own.any() else None
        found[f"outcome/mean/{task}"] = mean(outcomes[own])
        parts = means_of_parts(told[n] for n in np.flatnonzero(own))
        found.update({f"reward_part/{task}/{name}": value for name, value in parts.items()})
    return found


def means_of_parts(told: Iterable[Sequence[tuple[str, float | None]]]) -> dict[str, float]:
    """The mean of each part, by name, over those of `told` that have a finite number of it."""
    parts: dict[str, list[float]] = {}
    for row in told:
        for name, value in row:
            if value is not None and np.isfinite(value):
                parts.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in sorted(parts.items())}


def tokens_of_answers(packed: Packed) -> NDArray[np.int64]:
    """[answers] how many of each were sampled, over all of its segments."""
    begins = packed.cu_seqlens[:-1][first_of_each(packed.answers)]
    found: NDArray[np.int64] = np.add.reduceat(packed.loss_mask.astype(np.int64), begins)
    return found


def length_metrics(packed: Packed) -> dict[str, Any]:
    """Sampled tokens, turns and segments of a member, scored or not, and the share of members cut at the limit."""
    sampled = tokens_of_answers(packed)
    return {
        "length/mean": float(sampled.mean()),
        "length/max": int(sampled.max()),
        "length/repetition": repetition(packed),
        "truncated": float(cut_answers(packed).mean()),
        "turns/mean": pc.sum(pc.list_value_length(packed.table.column("turn_offsets"))).as_py() / len(sampled),
        "segments/mean": len(packed.answers) / len(sampled),
    }


def group_metrics(batch: Batch, advantages: Advantages) -> dict[str, Any]:
    """pass_rate: 11 counts of groups by the share of scored members with an outcome above 0, rounded down to tenths.
    zero_variance: share of groups without two different rewards."""
    groups = np.unique(batch.groups)
    counts = [0] * 11
    for group in groups:
        outcomes = batch.outcomes[batch.begins & (batch.groups == group)]
        outcomes = outcomes[~np.isnan(outcomes)]
        if len(outcomes):
            counts[int(10 * int((outcomes > 0).sum()) // len(outcomes))] += 1
    flat = advantages.alone + advantages.unscored + advantages.equal
    return {"groups": len(groups), "pass_rate": counts, "zero_variance": flat / max(1, len(groups))}


def age_metrics(batch: Batch, seen: Seen) -> dict[str, Any]:
    """Which versions the trained tokens are from."""
    ages, tokens = np.unique(batch.ages.numpy()[seen.included], return_counts=True)
    return {
        "age/tokens": {str(age): int(n) for age, n in zip(ages, tokens, strict=True)},
        "age/mean": float(ages @ tokens / tokens.sum()) if len(ages) else None,
        "age/max": int(ages.max()) if len(ages) else None,
    }


def divergence_metrics(packed: Packed, batch: Batch, advantages: Advantages, seen: Seen) -> dict[str, Any]:
    """How far the weights of the step were from those that sampled: over all, by age, and by length of the answer."""
    apart = Apart(batch, advantages.values, seen)
    whole = apart.whole()
    return {
        **{name: whole[key] for key, name in STEP_NAMES.items()},
        "ratio/max": float(seen.ratio[seen.included].max()) if seen.tokens else None,
        "by_age": apart.by_age(),
        "by_length": apart.by_length(tokens_of_answers(packed)),
    }


def objective_metrics(batch: Batch, seen: Seen) -> dict[str, Any]:
    """What the parts of the objective did: tokens that each mask took, the share of trained tokens whose importance
    weight was cut; how sure the policy is, and how far from the reference."""
    taken = np.bincount(seen.masked, minlength=len(NAMES) + 1)[1:]
    return {
        "mask/tokens": {name: int(tokens) for name, tokens in zip(NAMES, taken, strict=True) if tokens},
        "weight/cut": mean(seen.cut[seen.included]),
        "entropy": mean(seen.entropy[seen.included]),
        "kl_reference": mean(_to_reference(batch, seen)),
    }


def _to_reference(batch: Batch, seen: Seen) -> NDArray[np.float64]:
    """Of each trained token with a reference, an estimate of KL(current || reference) without a bias: the k1 of
    `objectives/anchors.py`, ratio x log(current / reference). Where the policy is much surer than the reference, a k3
    is made of the few tokens that the policy hardly chooses any more, with exponentials of how far it has left them."""
    asked = seen.included & ~np.isnan(seen.reference)
    logprobs = seen.logprobs[asked].astype(np.float64)
    log_ratio, x = (
        np.clip(logprobs - other[asked], -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        for other in (batch.behaviour.numpy(), seen.reference)
    )
    found: NDArray[np.float64] = np.exp(log_ratio) * x
    return found


def proximal_metrics(seen: Seen, *, continued: NDArray[np.bool_] | None) -> dict[str, int]:
    """Trained tokens whose version the learner had not, or did not ask, and those whose pi_v is an approximation.

    continued: which ones are that, None if none is."""
    asked = seen.included & ~np.isnan(seen.proximal)
    return {
        "proximal/behaviour_tokens": int(seen.included.sum() - asked.sum()),
        "proximal/approximate_tokens": 0 if continued is None else int((asked & continued).sum()),
    }


def continued(packed: Packed) -> NDArray[np.bool_]:
    """[N]: sampled by newer weights than the first of its row, so that the prefix was seen by older ones as well."""
    sampled = packed.loss_mask != 0
    newest = np.iinfo(np.int32).max
    first = np.minimum.reduceat(np.where(sampled, packed.versions, newest), packed.cu_seqlens[:-1])
    found: NDArray[np.bool_] = sampled & (packed.versions > np.repeat(first, np.diff(packed.cu_seqlens)))
    return found
