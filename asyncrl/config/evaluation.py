"""`eval`: how good the model is on rows that nobody trains on, during a run and in `asyncrl eval` (`docs/eval.md`)."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta, field

from asyncrl.config.section import Positive, Section

REWARD = "reward"
"""The metric that a run's success is: the mean reward of the task, without what is for training."""

FEWEST_VOTES = 3
"""Answers of a majority: that of two is one of them, so pass@1 again."""

NUMBERED = re.compile(r"(pass|majority)@([1-9]\d*)")
"""Metrics whose name says of how many answers."""


class EvalSampling(Section, frozen=True, kw_only=True):
    """How held-out rows are answered where that is not `collector.sampling`; null: as there."""

    temperature: Annotated[float, Meta(ge=0)] | None = None  # 0: greedy, the likeliest token each time
    top_k: int | None = None  # only from the so many likeliest; -1: all
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None  # of these, the fewest whose mass reaches it; 1: all
    max_tokens: Positive | None = None  # of an answer


class Eval(Section, frozen=True, kw_only=True):
    """Answers to held-out rows, before, during and after training, and by `asyncrl eval` (`docs/eval.md`)."""

    at_start: bool = True  # before the first step
    at_end: bool = True  # after the last one
    every_steps: Positive | None = None  # and of every n-th version, beside training; null: of none
    data: str | None = None  # a file of held-out rows, as task.data.heldout; null: the task's
    prompts: Positive = 128  # held-out rows, from the first
    n: Positive | None = None  # answers to each; null: one, and four in `asyncrl eval`
    sampling: EvalSampling = field(default_factory=EvalSampling)
    pass_above: float = 0.0  # an answer passes if its reward is above it
    difficulty: str | None = None  # a column of the rows; results are shown by its values too
    metric: str = REWARD  # which checkpoints are the best (keep_best) says this one: reward, pass@K or majority@N


def sampling_changes(config: EvalSampling) -> dict[str, Any]:
    """What it sets, by the names of `Sampling`.

    >>> sampling_changes(EvalSampling(temperature=0.6))
    {'temperature': 0.6}
    """
    return {name: value for name, value in msgspec.structs.asdict(config).items() if value is not None}


def powers_of_two(most: int) -> list[int]:
    """
    >>> powers_of_two(1), powers_of_two(6)
    ([1], [1, 2, 4])
    """
    return [1 << exponent for exponent in range(most.bit_length())]
