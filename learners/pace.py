"""How fast to learn from data that are far from the weights, and when to stop: by the effective sample size of whole
answers, as a share of their number (`ess.py`).

Answers whose weights have the effective size ESS make a gradient about as noisy as that of ESS answers, and the rate
that a smaller batch bears is smaller by the square root: lr x sqrt(ESS / n) (VCPO, arXiv 2602.17616). That is the rate
wanted here, but for four things, each for a reason:

- From HEALTHY on it is the recipe's rate exactly: where nothing is wrong, the control changes no bit.
- The lower one of this update's share and its average counts. A fall is acted upon in the update whose data show it. A
  rise is believed once it lasts: when no heavy answer happens to be in a batch, its share looks better than it is.
- Below FLOOR it falls no further. Over long answers W exaggerates: its spread grows with their length, and objectives
  cut it.
- It moves by TOLERANCE or more, or not at all: each move is an event that says why, and there are few.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

HEALTHY = 0.9
FLOOR = 0.1
KEEP = 0.9
"""Of the average, at each update: it looks back on about ten."""

TOLERANCE = 0.1
"""Least relative change of the rate; a share that moves by a fifth."""

LOW = 0.1
"""Below it a dozen answers do the work of 128: worth a warning, if `learner.min_ess` says nothing."""


class EssCollapsed(RuntimeError):
    """For so many steps so few answers have carried the gradient that going on is a waste; names numbers and advice."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Where control stands between two updates; every checkpoint has it. average: of the shares of updates. scale: what
    the rate is multiplied by. low: steps in a row below the limit."""

    average: float = 1.0
    scale: float = 1.0
    low: int = 0


def after_measuring(pace: Pace, ess: float | None) -> Pace:
    """For an update whose answers have this share; None: it has none.

    >>> after_measuring(Pace(), 0.25).scale, after_measuring(Pace(), 0.95).scale
    (0.5, 1.0)
    """
    if ess is None:
        return pace
    average = KEEP * pace.average + (1 - KEEP) * ess
    wanted = wanted_scale(min(ess, average))
    moves = wanted != pace.scale and (wanted == 1.0 or abs(wanted / pace.scale - 1) >= TOLERANCE)
    return replace(pace, average=average, scale=wanted if moves else pace.scale)


def wanted_scale(ess: float) -> float:
    """sqrt(ess), between sqrt(FLOOR) and 1.

    >>> wanted_scale(0.49), round(wanted_scale(1e-4), 3), wanted_scale(0.93)
    (0.7, 0.316, 1.0)
    """
    return 1.0 if ess >= HEALTHY else math.sqrt(max(ess, FLOOR))


def after_step(pace: Pace, ess: float | None, *, limit: float | None) -> Pace:
    """Once a step is over, whose answers have this share together. limit: `learner.min_ess`.

    >>> after_step(Pace(low=2), 0.05, limit=None).low, after_step(Pace(low=2), 0.5, limit=None).low
    (3, 0)
    """
    if ess is None:
        return pace
    return replace(pace, low=pace.low + 1 if ess < (LOW if limit is None else limit) else 0)


def collapse(pace: Pace, ess: float | None, *, limit: float | None, steps: int, scaled: bool) -> str:
    """Empty, or what to say after `steps` low steps in a row, and again after each further one. limit: as above.
    scaled: `learner.rate_by_ess`."""
    if ess is None or pace.low < steps:
        return ""
    advice = "" if scaled else ", or set learner.rate_by_ess: true"
    return (
        f"the effective sample size of whole answers (ess/sequence) was below {LOW if limit is None else limit:g} in "
        f"{pace.low} steps in a row, in the last {ess:.3g} of the answers: few of them carry the gradient.\n"
        f"Lower learner.learning_rate or buffer.max_trajectory_age{advice}. Which answers are far from the weights: "
        "by_age and by_length in metrics.jsonl"
    )
