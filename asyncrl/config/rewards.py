"""`task.rewards`: the parts of a reward that a recipe can name, and what becomes of their sum."""

from __future__ import annotations

from typing import Literal

from msgspec import field

from asyncrl.config.section import Factor, NonNegative, Positive, Section


class Exact(Section, frozen=True, kw_only=True):
    """Of `single-turn` only: the other tasks say themselves what is right."""

    type: Literal["exact"] = "exact"  # 1 if the stripped answer equals the row's and the model ended it itself, else 0
    weight: float = 1.0  # the reward is the weighted sum of the parts


class Format(Section, frozen=True, kw_only=True):
    """The whole answer matches the pattern, white space around it aside, and the model ended it itself: 1, else 0."""

    type: Literal["format"] = "format"
    weight: float = 1.0
    pattern: str  # a regular expression of Python; `.` takes line breaks too


class Length(Section, frozen=True, kw_only=True):
    """Minus the distance from a length, |tokens - target_tokens| / max_tokens. A target of 0 puts a price on every
    token."""

    type: Literal["length"] = "length"
    weight: float = 1.0
    target_tokens: NonNegative  # of an answer, its end token included; at most collector.sampling.max_tokens


class Overlong(Section, frozen=True, kw_only=True):
    """The soft penalty of DAPO: 0 up to max_tokens - buffer_tokens, from there down to -1 at max_tokens."""

    type: Literal["overlong"] = "overlong"
    weight: float = 1.0
    buffer_tokens: Positive  # less than collector.sampling.max_tokens


Shaping = Format | Length | Overlong
"""What an answer looks like, not whether it is right: in what is trained on, not in what success is measured by."""

RewardPart = Exact | Shaping


class RewardedTask(Section, frozen=True, kw_only=True):
    """What every task has: its type, and what becomes of the sum of its reward parts."""

    type: str
    reward_scale: Factor = 1.0  # the weighted sum of all reward parts is multiplied by it
    reward_clip: tuple[float, float] | None = None  # lowest and highest reward, after that; null: no bounds


class ScoringTask(RewardedTask, frozen=True, kw_only=True):
    """A task that says itself what is right."""

    rewards: list[Shaping] = field(default_factory=list)  # added to the task's own score
