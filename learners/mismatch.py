"""What engine and learner compute differently under the same weights: no training explains it, no objective cures it.

Measured at age 0 in a step's first update, where the weights are those that sampled. Beyond a healthy range the ratio
of every token, whatever its age, is off by as much, and what looks like staleness is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.learners.batch import Batch
from asyncrl.learners.buckets import k3, mean
from asyncrl.learners.objectives.ratio import LOG_RATIO_LIMIT
from asyncrl.learners.step import Seen

HEALTHY_ERROR = 1.05
HEALTHY_KL = 1e-3
"""Ends of the healthy range, those that NeMo RL gives for `token_mult_prob_error` and `gen_kl_error`."""


def age_zero(
    batch: Batch, seen: Seen, first: NDArray[np.int64], continued: NDArray[np.bool_] | None
) -> dict[str, float | None]:
    """first: where the tokens of the first update lie in the batch. continued bool [N]: sampled by weights that went on
    with what older ones had computed of the prefix; None: none was. They were not sampled by one policy, and the
    learner knows only the newer weights, so that they have a number of their own.

    mismatch/age0: largest |log pi - log mu|, nats. mismatch/age0_error: mean of exp |log pi - log mu|, the factor by
    which probabilities differ. mismatch/age0_kl: KL(mu || pi) by k3, nats. mismatch/age0_continued: the mean factor of
    continued tokens.
    """
    of_first = np.zeros(len(seen.measured), np.bool_)
    of_first[first] = True
    fresh = seen.measured & of_first & (batch.ages.numpy() == 0)
    later = np.zeros_like(fresh) if continued is None else fresh & continued
    log_ratio = seen.logprobs.astype(np.float64) - batch.behaviour.numpy()
    apart = np.abs(log_ratio)
    of_one = fresh & ~later
    return {
        "mismatch/age0": float(apart[of_one].max()) if of_one.any() else None,
        "mismatch/age0_error": mean(np.exp(np.minimum(apart[of_one], LOG_RATIO_LIMIT))),
        "mismatch/age0_kl": mean(k3(log_ratio[of_one])),
        "mismatch/age0_continued": mean(np.exp(np.minimum(apart[later], LOG_RATIO_LIMIT))),
    }


def unhealthy(metrics: Mapping[str, Any]) -> str:
    """Empty, or the numbers that are out of their range and what to look at.

    >>> unhealthy({"mismatch/age0": 0.01, "mismatch/age0_error": 1.0001, "mismatch/age0_kl": 2e-9})
    ''
    """
    error, kl = metrics["mismatch/age0_error"], metrics["mismatch/age0_kl"]
    if error is None or (error < HEALTHY_ERROR and kl < HEALTHY_KL):
        return ""
    return (
        f"engine and learner disagree under the same weights: mismatch/age0_error {error:.4g} (healthy: below "
        f"{HEALTHY_ERROR}), mismatch/age0_kl {kl:.3g} (below {HEALTHY_KL:g}), largest difference "
        f"{metrics['mismatch/age0']:.3g} nats.\n"
        "Look at the engine's precision and kernels (model.dtype: float32 rules them out), and at what it does to "
        "logits before it samples."
    )
