"""Reward parts that any answer can have, and from all parts to what is trained on. Pure.

They are made where the score is, in the verifier's process, and summed where the group is made: buffer, filter, archive
and learner see one shaped reward, whatever the age it is trained at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.config.rewards import Format, Length, Overlong, part_name
from asyncrl.rewards.base import Finding
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


class Shape:
    """One of the parts `format`, `length` and `overlong`. max_tokens: that an answer may have
    (`collector.sampling.max_tokens`). A Verifier."""

    def __init__(self, part: Format | Length | Overlong, *, max_tokens: int) -> None:
        self._name = part_name(part)
        self._part = part
        self._max_tokens = max_tokens
        self._pattern = re.compile(part.pattern, re.DOTALL) if isinstance(part, Format) else None

    def check(self, row: Mapping[str, Any]) -> None:
        """Any row will do."""

    def verify(self, row: Mapping[str, Any], answer: Mapping[str, Any]) -> Finding:
        tokens, finish_reason = len(answer["token_ids"]), answer["finish_reason"]
        if self._pattern is not None:
            value = matches(answer["text"], finish_reason, self._pattern)
            return Finding({self._name: value}, "" if value else "wrong_format")
        if isinstance(self._part, Length):
            value = length(tokens, target_tokens=self._part.target_tokens, max_tokens=self._max_tokens)
        elif isinstance(self._part, Overlong):
            value = overlong(tokens, finish_reason, max_tokens=self._max_tokens, buffer_tokens=self._part.buffer_tokens)
        return Finding({self._name: value})


@dataclass(frozen=True, slots=True)
class Rule:
    """From parts to a reward. shaping: names of the parts that say nothing of right or wrong; violations: of those
    that must not happen (below 0: it did); clip: after `scale`."""

    shaping: frozenset[str] = frozenset()
    violations: frozenset[str] = frozenset()
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
        """What success is measured by: the weighted sum without shaping and violations, neither scaled nor clipped; of
        an answer with a violation, that sum or 0, whichever is less.

        >>> rule = Rule(shaping=frozenset({"length"}), violations=frozenset({"unsafe"}), scale=2.0)
        >>> rule.outcome({"exact": 1.0, "length": -0.25, "unsafe": 0.0}, {})
        1.0
        >>> rule.outcome({"exact": 1.0, "length": -0.25, "unsafe": -1.0}, {})
        0.0
        """
        aside = self.shaping | self.violations
        found = weighted_sum({name: part for name, part in parts.items() if name not in aside}, weights)
        violated = any((parts.get(name) or 0.0) < 0 for name in self.violations)
        return min(found, 0.0) if violated else found
