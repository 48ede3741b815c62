"""How far the weights of a step were from those that sampled, and what the objective made of it: over all tokens, and
by age and by length of the answer.

Pure NumPy over what a step saw, of all ranks and updates, so that a maximum is one and a quantile too. Distances are
over every token that was measured, whether a mask then took it or not: a mask must not make what it hides look well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.learners.batch import Batch
from asyncrl.learners.ess import Weighed, answer_log_ratios
from asyncrl.learners.objectives.ratio import LOG_RATIO_LIMIT
from asyncrl.learners.step import Seen


class Apart:
    """What a step saw, ready to be asked about any of its tokens. worth float64 [rows]: advantages."""

    def __init__(self, batch: Batch, worth: NDArray[np.float64], seen: Seen) -> None:
        behaviour = batch.behaviour.numpy()
        self._seen = seen
        self._worth = batch.of_tokens(worth)
        self._asked = seen.included | (seen.masked > 0)
        self._log_ratio = seen.logprobs.astype(np.float64) - behaviour
        self._engine = seen.proximal.astype(np.float64) - behaviour
        self._moved = seen.logprobs - seen.proximal.astype(np.float64)
        self._answer = batch.of_tokens(batch.answers)
        self._weights, self._counts = answer_log_ratios(seen.logprobs, behaviour, seen.measured, self._answer)
        self._ages = batch.ages.numpy()

    def whole(self) -> dict[str, Any]:
        """Over the step: the keys `telemetry.names.BUCKET`."""
        return self._of(np.ones(len(self._asked), np.bool_), np.ones(len(self._counts), np.bool_))

    def by_age(self) -> dict[str, dict[str, Any]]:
        """By age in versions: of each token; of an answer it is that of its oldest token that was measured."""
        oldest = np.full(len(self._counts), -1)
        np.maximum.at(oldest, self._answer[self._seen.measured], self._ages[self._seen.measured])
        ages = np.unique(self._ages[self._asked])
        return {str(age): self._of(self._ages == age, oldest == age) for age in ages}

    def by_length(self, sampled: NDArray[np.int64]) -> dict[str, dict[str, Any]]:
        """By the tokens that were sampled of an answer, [answers]: "1", "2-3", "4-7" and so on, doubling."""
        place = np.frexp(sampled)[1]  # of 2^(k - 1) to 2^k - 1 tokens: k
        found = np.unique(place[self._answer[self._asked]])
        return {length_name(int(k)): self._of(place[self._answer] == k, place == k) for k in found}

    def _of(self, tokens: NDArray[np.bool_], answers: NDArray[np.bool_]) -> dict[str, Any]:
        seen = self._seen
        included, asked, measured = tokens & seen.included, tokens & self._asked, tokens & seen.measured
        log_ratio = self._log_ratio[measured]
        weighed = Weighed.of(self._weights[answers & self._counts])
        far = np.abs(log_ratio)
        return {
            "tokens": int(included.sum()),
            "answers": int(weighed.n),
            "ratio_mean": mean(seen.ratio[included]),
            "ess": Weighed.of(log_ratio).ess,
            "ess_sequence": weighed.ess,
            "kl": mean(k3(log_ratio)),
            "log_ratio_max": float(far.max()) if len(far) else None,
            "log_ratio_p999": float(np.quantile(far, 0.999, method="inverted_cdf")) if len(far) else None,
            "clip_fraction": mean(seen.clipped[included]),
            "clip_fraction_positive": mean(seen.clipped[included & (self._worth > 0)]),
            "clip_fraction_negative": mean(seen.clipped[included & (self._worth < 0)]),
            "mask_fraction": mean(seen.masked[asked] > 0),
            "mask_fraction_positive": mean(seen.masked[asked & (self._worth > 0)] > 0),
            "mask_fraction_negative": mean(seen.masked[asked & (self._worth < 0)] > 0),
            **self._pulls(included),
            **self._factors(included & ~np.isnan(seen.proximal)),
        }

    def _pulls(self, included: NDArray[np.bool_]) -> dict[str, float | None]:
        """Norms of single tokens' gradients: added up as they stand in the step's gradient, and as a share of all."""
        pull, whole = (float(self._seen.pulls[at].astype(np.float64).sum()) for at in (included, self._seen.included))
        return {
            "token_grad": pull / max(1.0, self._seen.units),
            "token_grad_share": pull / whole if whole else None,
        }

    def _factors(self, asked: NDArray[np.bool_]) -> dict[str, float | None]:
        """Both factors of the ratio, engine and training, of tokens whose version the learner was asked for."""
        engine, moved = self._engine[asked], self._moved[asked]
        mismatch, staleness = (np.exp(np.clip(log, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) for log in (engine, moved))
        return {
            "mismatch_mean": mean(mismatch),
            "mismatch_max": float(np.abs(engine).max()) if len(engine) else None,
            "staleness_mean": mean(staleness),
            "staleness_kl": -float(moved.mean()) if len(moved) else None,
        }


def length_name(place: int) -> str:
    """Of a bucket of answers: those that have 2^(place - 1) tokens, and less than twice as many.

    >>> [length_name(place) for place in (0, 1, 2, 5)]
    ['0', '1', '2-3', '16-31']
    """
    low, high = 2 ** max(0, place - 1), 2**place - 1
    return str(high) if place < 2 else f"{low}-{high}"


def k3(log_ratio: NDArray[np.float64]) -> NDArray[np.float64]:
    """r - 1 - log r of r = pi / mu: its mean over what mu sampled estimates KL(mu || pi), is never negative, and as an
    estimate has no bias (Schulman 2020). The exponent is cut as objectives cut it, so that it is always finite.

    >>> k3(np.array([0.0, -5000.0])).tolist()
    [0.0, 4999.000000002061]
    """
    found: NDArray[np.float64] = np.exp(np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) - 1 - log_ratio
    return found


def mean(values: NDArray[Any]) -> float | None:
    """None where there is nothing to average: NaN is not JSON."""
    return float(values.astype(np.float64).mean()) if len(values) else None
