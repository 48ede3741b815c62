"""Masks: tokens that leave numerator and denominator. Each function says which tokens go, bool [N].

Those decided by data (`truncated`, `token_age`) are known before a step's first pass; the others look at the weights of
the moment, with no gradient through the decision. An advantage of 0 is neither above nor below it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.learners.objectives.ratio import bounded, ratio_of
from asyncrl.learners.objectives.sequences import Sequences

NAMES = ("dppo-tv", "geometric-sequence", "k3", "opsm", "truncated", "token-age")
"""As in the recipe, in the order in which they are asked; a token that several would take is the first one's."""


def dppo_tv(current: Tensor, behaviour: Tensor, advantages: Tensor, *, threshold: float) -> Tensor:
    """Tokens pushed further that moved by more than the threshold in probability already (DPPO, arXiv 2602.04879).

    In probability and not as a ratio: a rare token's ratio is large before its probability is. current, behaviour [N],
    nats; advantages [N].
    """
    moved = torch.exp(current.detach()) - torch.exp(behaviour)
    return ((advantages > 0) & (moved > threshold)) | ((advantages < 0) & (moved < -threshold))


def geometric_sequence(log_ratio: Tensor, sequences: Sequences, *, low: float, high: float) -> Tensor:
    """All tokens of answers whose geometric mean ratio is outside [low, high]: the same bounds for every length."""
    ratio = ratio_of(sequences.mean(log_ratio.detach()))
    return sequences.spread((ratio < low) | (ratio > high))


def k3(log_ratio: Tensor, sequences: Sequences, *, threshold: float) -> Tensor:
    """All tokens of answers with a mean of w - 1 - log w above the threshold: deviations up and down both count."""
    log = bounded(log_ratio.detach())
    return sequences.spread(sequences.mean(torch.exp(log) - 1 - log) > threshold)


def opsm(current: Tensor, behaviour: Tensor, advantages: Tensor, sequences: Sequences, *, delta: float) -> Tensor:
    """All tokens of answers with an advantage below 0 and a mean of log mu - log pi above delta (DeepSeek-V3.2, arXiv
    2512.02556): what the weights have left already is not pushed away further; what is better is always taken."""
    return (advantages < 0) & sequences.spread(sequences.mean(bounded(behaviour - current.detach())) > delta)


def truncated(rows: Tensor, sequences: Sequences) -> Tensor:
    """All tokens of answers cut at their limit, rows bool [R] (overlong filtering of DAPO, arXiv 2503.14476)."""
    return sequences.spread(rows)


def token_age(ages: Tensor, *, max_age: int) -> Tensor:
    """Tokens older than this, ages int [N] in versions."""
    return ages > max_age
