"""Reward parts that any answer can have, and from all parts to what is trained on. Pure.

They are made where the score is, in the verifier's process, and summed where the group is made: buffer, filter, archive
and learner see one shaped reward, whatever the age it is trained at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.config.rewards import Format, Length, RewardPart, Shaping
from asyncrl.rewards.parts import weighted_sum

OUTCOME = "outcome"
"""In a trajectory's `info`: what success is measured by, where the reward that is trained on is something else."""


def overlong(tokens: int, finish_reason: str, *, max_tokens: int, buffer_tokens: int) -> float:
    """DAPO's soft over-long punishment (arXiv 2503.14476, eq. 13) of an answer of `tokens` tokens, its end token
    included: 0 up to max_tokens - buffer_tokens, then linear, -1 at max_tokens.

    An answer that was cut before that, because the model's own length left less room, is over-long as well: -1.

    >>> [overlong(n, "stop", max_tokens=20, buffer_tokens=4) for n in (15, 16, 17, 18, 20)]
    [0.0, 0.0, -0.25, -0.5, -1.0]
    """
    if finish_reason == "length":
        return -1.0
    return max(-1.0, min(0.0, (max_tokens - buffer_tokens - tokens) / buffer_tokens))


def length(tokens: int, *, target_tokens: int, max_tokens: int) -> float:
    """- |tokens - target_tokens| / max_tokens, in [-1, 0]: L1's price of the distance from a length that is asked for
    (LCPO-Exact, arXiv 2503.04697), whose alpha is weight / max_tokens.

    >>> [length(n, target_tokens=4, max_tokens=8) for n in (2, 4, 8)]
    [-0.25, 0.0, -0.5]
    """
    return 0.0 - abs(tokens - target_tokens) / max_tokens


def matches(text: str, finish_reason: str, pattern: re.Pattern[str]) -> float:
    """1.0 iff the whole answer, stripped, matches and the model ended it itself: a form that was cut off is none.

    A pattern may take for ever on some text. This runs where it can be killed (`pool.py`).
    """
    return float(finish_reason == "stop" and pattern.fullmatch(text.strip()) is not None)


class Shaper:
    """The shaping parts of a recipe. max_tokens: that an answer may have (`collector.sampling.max_tokens`)."""

    def __init__(self, parts: Sequence[RewardPart], *, max_tokens: int) -> None:
        self._parts = [part for part in parts if isinstance(part, Shaping)]
        self._max_tokens = max_tokens
        self._patterns = {p.pattern: re.compile(p.pattern, re.DOTALL) for p in self._parts if isinstance(p, Format)}
        self.weights: dict[str, float] = {part.type: part.weight for part in self._parts}

    def parts(self, text: str, tokens: int, finish_reason: str) -> dict[str, float]:
        """By name, of one answer."""
        return {part.type: self._value(part, text, tokens, finish_reason) for part in self._parts}

    def _value(self, part: Shaping, text: str, tokens: int, finish_reason: str) -> float:
        if isinstance(part, Format):
            return matches(text, finish_reason, self._patterns[part.pattern])
        if isinstance(part, Length):
            return length(tokens, target_tokens=part.target_tokens, max_tokens=self._max_tokens)
        return overlong(tokens, finish_reason, max_tokens=self._max_tokens, buffer_tokens=part.buffer_tokens)


@dataclass(frozen=True, slots=True)
class Rule:
    """From parts to a reward. shaping: names of the parts that say nothing of right or wrong; clip: after `scale`."""

    shaping: frozenset[str] = frozenset()
    scale: float = 1.0
    clip: tuple[float, float] | None = None

    def reward(self, parts: Mapping[str, float | None], weights: Mapping[str, float]) -> float:
        """What is trained on: scale x the weighted sum of all parts, clipped.

        >>> Rule(scale=2.0, clip=(-1.0, 1.0)).reward({"exact": 1.0, "length": -0.25}, {})
        1.0
        """
        found = self.scale * weighted_sum(parts, weights)
        return found if self.clip is None else min(max(found, self.clip[0]), self.clip[1])

    def outcome(self, parts: Mapping[str, float | None], weights: Mapping[str, float]) -> float:
        """What success is measured by: the weighted sum without shaping, neither scaled nor clipped.

        >>> Rule(shaping=frozenset({"length"}), scale=2.0).outcome({"exact": 1.0, "length": -0.25}, {})
        1.0
        """
        return weighted_sum({name: part for name, part in parts.items() if name not in self.shaping}, weights)
