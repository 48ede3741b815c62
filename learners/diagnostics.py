"""What a step tells about itself. Pure NumPy over what the step saw; names as in `docs/metrics.md`.

Everything is measured over the tokens that the step trained, each with the weights that its update started from. None
stands where there is nothing to average: NaN is not JSON.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.learners.advantages import Advantages
from asyncrl.learners.batch import Batch
from asyncrl.learners.objectives.masks import NAMES
from asyncrl.learners.objectives.ratio import LOG_RATIO_LIMIT
from asyncrl.learners.step import Seen
from asyncrl.schema import Packed


def step_metrics(
    packed: Packed,
    batch: Batch,
    advantages: Advantages,
    seen: Seen,
    *,
    first: NDArray[np.int64],
    update: str,
) -> dict[str, Any]:
    """All metrics of a step that follow from its data. first: where the tokens of its first update lie in the batch.
    update: `weights.update` of the recipe."""
    return {
        **reward_metrics(packed),
        **length_metrics(packed),
        **group_metrics(batch, advantages),
        **age_metrics(batch, seen, first),
        **objective_metrics(batch, advantages, seen),
        **proximal_metrics(batch, seen, continued=continued(packed) if update == "keep" else None),
        "loss": seen.loss,
        "tokens": seen.tokens,
        "tokens_masked": sum(batch.masked.values()),
        "age/masked": {str(age): tokens for age, tokens in batch.masked.items()},
        "nonfinite": batch.nonfinite + seen.nonfinite,
    }


def reward_metrics(packed: Packed) -> dict[str, Any]:
    """Rewards and their parts over scored rows, and why the others were not scored."""
    scored = packed.rewards[~np.isnan(packed.rewards)]
    parts: dict[str, list[float]] = {}
    for row in packed.table.column("reward_parts").to_pylist():
        for name, value in row:
            if value is not None and np.isfinite(value):
                parts.setdefault(name, []).append(value)
    failures = Counter(failure for failure in packed.table.column("failure").to_pylist() if failure)
    return {
        "reward/mean": _mean(scored),
        "reward/std": float(scored.std()) if len(scored) else None,
        **{f"reward_part/{name}": float(np.mean(values)) for name, values in sorted(parts.items())},
        "unscored": len(packed.rewards) - len(scored),
        "failures": dict(sorted(failures.items())),
    }


def length_metrics(packed: Packed) -> dict[str, Any]:
    """Sampled tokens per row, scored or not, and the share of rows cut at the limit."""
    starts = packed.cu_seqlens[:-1]
    sampled = np.add.reduceat(packed.loss_mask.astype(np.int64), starts)
    finish = packed.table.column("finish_reason").to_pylist()
    return {
        "length/mean": float(sampled.mean()),
        "length/max": int(sampled.max()),
        "truncated": sum(reason == "length" for reason in finish) / len(finish),
    }


def group_metrics(batch: Batch, advantages: Advantages) -> dict[str, Any]:
    """pass_rate: 11 counts of groups by the share of scored members with a reward above 0, rounded down to tenths.
    zero_variance: share of groups without two different rewards."""
    groups = np.unique(batch.groups)
    counts = [0] * 11
    for group in groups:
        rewards = batch.rewards[batch.groups == group]
        rewards = rewards[~np.isnan(rewards)]
        if len(rewards):
            counts[int(10 * int((rewards > 0).sum()) // len(rewards))] += 1
    flat = advantages.alone + advantages.unscored + advantages.equal
    return {"groups": len(groups), "pass_rate": counts, "zero_variance": flat / max(1, len(groups))}


def age_metrics(batch: Batch, seen: Seen, first: NDArray[np.int64]) -> dict[str, Any]:
    """How far current and behaviour policy are apart, over all and by the tokens' age.

    ess: (sum w)^2 / (n sum w^2) of the token ratios w, 1 = every token counts. kl: mean of behaviour - current log-prob
    (k1). mismatch/age0: largest |current - behaviour| at age 0 in the first update, where both are the same weights:
    what engine and learner compute differently.
    """
    keep = seen.included
    ages, ratio, clipped = batch.ages.numpy()[keep], seen.ratio[keep], seen.clipped[keep]
    log_ratio = seen.logprobs[keep].astype(np.float64) - batch.behaviour.numpy()[keep]
    by_age: dict[str, dict[str, Any]] = {}
    for age in np.unique(ages):
        at = ages == age
        by_age[str(age)] = {
            "tokens": int(at.sum()),
            **_divergence(ratio[at], log_ratio[at], clipped[at]),
            **_split(seen, batch, np.flatnonzero(keep)[at]),
        }
    overall = _divergence(ratio, log_ratio, clipped)
    of_first = np.zeros(len(keep), np.bool_)
    of_first[first] = True
    fresh = np.abs(log_ratio[(ages == 0) & of_first[keep]])
    return {
        "age/tokens": {age: bucket["tokens"] for age, bucket in by_age.items()},
        "age/mean": _mean(ages),
        "age/max": int(ages.max()) if len(ages) else None,
        "ess": overall["ess"],
        "kl": overall["kl"],
        "clip_fraction": overall["clip_fraction"],
        "ratio/mean": overall["ratio_mean"],
        "ratio/max": float(ratio.max()) if len(ratio) else None,
        "by_age": by_age,
        "mismatch/age0": float(fresh.max()) if len(fresh) else None,
    }


def objective_metrics(batch: Batch, advantages: Advantages, seen: Seen) -> dict[str, Any]:
    """What the parts of the objective did: tokens that each mask took, the share of trained tokens whose importance
    weight was cut, and the clip's share of tokens with an advantage above and below 0."""
    worth = np.repeat(advantages.values, batch.lengths)
    better, worse = seen.included & (worth > 0), seen.included & (worth < 0)
    taken = np.bincount(seen.masked, minlength=len(NAMES) + 1)[1:]
    return {
        "mask/tokens": {name: int(tokens) for name, tokens in zip(NAMES, taken, strict=True) if tokens},
        "weight/cut": _mean(seen.cut[seen.included]),
        "clip_fraction/positive": _mean(seen.clipped[better]),
        "clip_fraction/negative": _mean(seen.clipped[worse]),
    }


def proximal_metrics(batch: Batch, seen: Seen, *, continued: NDArray[np.bool_] | None) -> dict[str, Any]:
    """Over the tokens whose version the learner had: the two factors of the ratio pi / mu, mismatch pi_v / mu of the
    engine and staleness pi / pi_v, in numbers as above.

    behaviour_tokens: those whose version it had not, or did not ask. continued: tokens whose pi_v is an approximation,
    None if none is.
    """
    asked = seen.included & ~np.isnan(seen.proximal)
    split = _split(seen, batch, np.flatnonzero(asked))
    return {
        "mismatch/mean": split["mismatch_mean"],
        "mismatch/max": split["mismatch_max"],
        "staleness/mean": split["staleness_mean"],
        "staleness/kl": split["staleness_kl"],
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


def _split(seen: Seen, batch: Batch, at: NDArray[np.int64]) -> dict[str, float | None]:
    """Both factors over those of the tokens at `at` whose version was asked; ratios as `ratio_of` cuts them."""
    at = at[~np.isnan(seen.proximal[at])]
    proximal = seen.proximal[at].astype(np.float64)
    engine, moved = proximal - batch.behaviour.numpy()[at], seen.logprobs[at] - proximal
    mismatch, staleness = (np.exp(np.clip(log, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) for log in (engine, moved))
    return {
        "mismatch_mean": _mean(mismatch),
        "mismatch_max": float(np.abs(engine).max()) if len(at) else None,
        "staleness_mean": _mean(staleness),
        "staleness_kl": -float(moved.mean()) if len(at) else None,
    }


def _divergence(
    ratio: NDArray[np.float32], log_ratio: NDArray[np.float64], clipped: NDArray[np.bool_]
) -> dict[str, float | None]:
    return {
        "ratio_mean": _mean(ratio),
        "ess": effective_sample_size(ratio),
        "kl": None if not len(log_ratio) else -float(log_ratio.mean()),
        "clip_fraction": _mean(clipped),
    }


def effective_sample_size(weights: NDArray[Any]) -> float | None:
    """Kish's effective sample size as a share of n: 1 for equal weights, 1/n if one carries all. None without any.

    >>> effective_sample_size(np.array([1.0, 1.0, 0.0, 0.0]))
    0.5
    """
    w = weights.astype(np.float64)
    return float(w.sum() ** 2 / (len(w) * (w**2).sum())) if w.any() else None


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.astype(np.float64).mean()) if len(values) else None
