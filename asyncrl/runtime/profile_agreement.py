"""Whether a verifier and a person agree on the answers of a profile. Pure.

An agreement is JSON, without NaN; an estimate has its 95 % interval over prompts (`statistics.Estimate`):

    {"judged": scored answers with a mark, "unscored": marked ones that the verifier could not score,
     "accuracy", "kappa": estimates
     "confusion": {"passes_right", "passes_wrong", "fails_right", "fails_wrong"}: the verifier's word, the person's word
     "false_passes":   {"count", "of": answers that pass, "share", "outputs": their numbers}
     "false_failures": {"count", "of": answers that fail, "share", "outputs"}}

A false pass is what a model is paid for without being right: it will do it more often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.collectors.evaluation.report import Key, key_of
from asyncrl.collectors.evaluation.statistics import LEVEL, RESAMPLES, Estimate, share_with_interval

CELLS = ("passes_right", "passes_wrong", "fails_right", "fails_wrong")


def agreement(
    answers: Sequence[Mapping[str, Any]], marks: Mapping[int, bool], *, pass_above: float, seed: int
) -> dict[str, Any]:
    """marks: whether a person calls the answer right, by its place in `answers`, from 1 on. An answer passes if its
    reward is above `pass_above`. seed: of the bootstrap."""
    prompts: dict[Key, NDArray[np.int64]] = {}
    outputs: dict[str, list[int]] = {cell: [] for cell in CELLS}
    unscored = 0
    for number, right in sorted(marks.items()):
        answer = answers[number - 1]
        if answer["reward"] is None:
            unscored += 1
            continue
        cell = f"{'passes' if answer['reward'] > pass_above else 'fails'}_{'right' if right else 'wrong'}"
        outputs[cell].append(number)
        prompts.setdefault(key_of(answer), np.zeros(len(CELLS), np.int64))[CELLS.index(cell)] += 1
    confusion = {cell: len(found) for cell, found in outputs.items()}
    counts = np.array(list(prompts.values()), np.int64).reshape(-1, len(CELLS))
    return {
        "judged": int(counts.sum()),
        "unscored": unscored,
        "accuracy": asdict(share_with_interval([(row[0] + row[3], row.sum()) for row in counts])),
        "kappa": asdict(_kappa(counts, seed=seed)),
        "confusion": confusion,
        "false_passes": _false(outputs["passes_wrong"], confusion["passes_wrong"] + confusion["passes_right"]),
        "false_failures": _false(outputs["fails_right"], confusion["fails_wrong"] + confusion["fails_right"]),
    }


def kappa(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Agreement beyond chance, (p_o - p_e) / (1 - p_e), with p_e that of two who do not look at the answer but say
    right and wrong as often as these do (Cohen, Educational and Psychological Measurement 20, 1960). counts [N, 4];
    NaN where both always say the same, which leaves nothing to agree on.

    >>> kappa(np.array([[20, 5, 10, 15], [8, 0, 0, 0]])).round(9).tolist()
    [0.4, nan]
    """
    passes_right, passes_wrong, fails_right, fails_wrong = counts.T.astype(np.float64)
    judged = counts.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        agreed = (passes_right + fails_wrong) / judged
        passes, right = (passes_right + passes_wrong) / judged, (passes_right + fails_right) / judged
        chance = passes * right + (1 - passes) * (1 - right)
        found: NDArray[np.float64] = np.where(chance < 1, (agreed - chance) / (1 - chance), np.nan)
    return found


def _kappa(counts: NDArray[np.int64], *, seed: int) -> Estimate:
    """Over all answers, with the percentile bootstrap's interval over prompts. counts [prompts, 4]. Resamples without a
    kappa are left out. No ends where all resamples are one: of a single prompt, or where nobody disagreed, a bootstrap
    knows nothing of how far it may be otherwise."""
    if not len(counts) or np.isnan(value := kappa(counts.sum(axis=0, keepdims=True))[0]):
        return Estimate(None, None, None, len(counts))
    drawn = np.random.default_rng(seed).integers(len(counts), size=(RESAMPLES, len(counts)))
    resampled = kappa(np.stack([counts[rows].sum(axis=0) for rows in drawn]))
    resampled = resampled[~np.isnan(resampled)]
    if np.ptp(resampled) == 0:
        return Estimate(float(value), None, None, len(counts))
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(value), float(low), float(high), len(counts))


def _false(outputs: list[int], of: int) -> dict[str, Any]:
    return {"count": len(outputs), "of": of, "share": len(outputs) / of if of else None, "outputs": outputs}
