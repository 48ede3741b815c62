"""From an answer to its score: every part of a recipe is asked, those in verifier processes and those elsewhere, and
what they say becomes one reward.

| asked                                                | where, and by which limit                                     |
|------------------------------------------------------|---------------------------------------------------------------|
| the task's own score, and parts without a limit      | one call to a verifier process, `collector.score_timeout_s`   |
| each part with `timeout_s`                           | a call of its own, so that its limit is nobody else's         |
| parts of a remote kind                               | this event loop; their own limits                             |

If one of them has no number, the answer is unscored, whatever the others say.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from asyncrl.rewards.base import BadRow, Remote, Unscored
from asyncrl.rewards.parts import BAD_ROW, INVALID, RAISED, Verdict, joined, judge, odd_names, short
from asyncrl.rewards.pool import VerifierError, VerifierPool
from asyncrl.rewards.shaping import Rule
from asyncrl.rewards.worker import Scored

logger = logging.getLogger(__name__)

LARGEST_REWARD = 3.4e38  # of float32, in which the learner computes; the record refuses a group with a larger one


@dataclass(frozen=True, slots=True)
class Score:
    """`parts` by name, None where one has no finite number. `reward` NaN = unscored; `failure` says why, else "".

    plain: the reward without shaping, scale and clip, where it has any; None: it is the reward. wrong: class of what is
    wrong with a scored answer, "" if nothing is. detail: of failure or wrong, for a person. seconds: of all verifiers.
    asked: verifiers were, so that a failure is theirs.
    """

    parts: dict[str, float | None]
    reward: float
    failure: str
    plain: float | None = None
    wrong: str = ""
    read: str = field(default="", compare=False)  # what was taken for the answer; "": its whole text
    detail: str = field(default="", compare=False)
    seconds: float = field(default=0.0, compare=False)
    asked: bool = field(default=False, compare=False)

    @property
    def outcome(self) -> float:
        """What success is measured by; NaN = unscored."""
        return self.reward if self.plain is None else self.plain


class Scores(Protocol):
    """What scores answers: the verifiers of a task."""

    async def start(self) -> None:
        """Start all verifiers, before any score. Raises VerifierError, and ends all, if one cannot be."""

    async def score(self, row: object, answer: object) -> Score:
        """Score one answer. `row` and `answer` are dataclasses or mappings.

        Never raises for the fault of an answer or of a verifier: `failure` names it. Raises VerifierError if nothing
        can be scored any more. Cancelling it ends what was begun for it.
        """

    async def close(self) -> None:
        """End all verifiers. Calls in flight and later ones raise VerifierError."""


class Scoring(Scores):
    """All that scores the answers of a task. `rule` makes rewards of parts; None: their weighted sum.

    limited: parts with a limit of their own, seconds, by name. remotes: by name. weights: of parts, beside those that
    the task gives its own; `own` finds these among the pool's. replaced: parts that are not asked where the answer
    brings `parts` of its own, such as an agent's reward. counts: answers by failure, and "scored".
    """

    def __init__(
        self,
        pool: VerifierPool,
        *,
        timeout_s: float,
        limited: Mapping[str, float] | None = None,
        remotes: Mapping[str, Remote] | None = None,
        weights: Mapping[str, float] | None = None,
        own: Callable[[Mapping[str, float]], Mapping[str, float]] = dict,
        replaced: frozenset[str] = frozenset(),
        rule: Rule | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._pool = pool
        self._timeout_s = timeout_s
        self._limited = dict(limited or {})
        self._remotes = dict(remotes or {})
        self._weights = dict(weights or {})
        self._own = own
        self._replaced = replaced
        self._rule = rule or Rule()
        self._shapes = rule is not None
        self._names: tuple[str, ...] | None = None  # of the parts of the first score

    async def start(self) -> None:
        starts = [self._pool.start(), *(remote.start() for remote in self._remotes.values())]
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        for error in outcomes:
            if error is not None:
                await self.close()
                raise error

    async def score(self, row: object, answer: object) -> Score:
        calls: list[Awaitable[Scored]] = [self._pool.verdict(row, answer, timeout_s=self._timeout_s)]
        brings = self._replaced if isinstance(answer, Mapping) and answer.get("parts") is not None else frozenset()
        for part, limit_s in self._limited.items():
            if part not in brings:
                calls.append(self._pool.verdict(row, answer, timeout_s=limit_s, part=part))
        for name, remote in self._remotes.items():
            if name not in brings:
                calls.append(_asked(remote, row, answer))
        found = [await calls[0]] if len(calls) == 1 else await _all(calls)
        verdict = joined([scored.verdict for scored in found], order=list(self._weights))  # as in the recipe
        return self._finish(verdict, sum(scored.seconds for scored in found))

    async def close(self) -> None:
        await asyncio.gather(self._pool.close(), *(remote.close() for remote in self._remotes.values()))

    def _finish(self, verdict: Verdict, seconds: float) -> Score:
        weights = {
            **self._own(self._pool.weights),
            **{name: w for name, w in self._weights.items() if name in verdict.parts},
        }
        reward = outcome = math.nan
        if not verdict.failure:
            reward, outcome = self._rule.reward(verdict.parts, weights), self._rule.outcome(verdict.parts, weights)
            if complaint := odd_names(verdict.parts, self._names, weights):
                verdict = Verdict(verdict.parts, INVALID, complaint)
            elif not (abs(reward) <= LARGEST_REWARD and abs(outcome) <= LARGEST_REWARD):
                complaint = f"the weighted sum of the parts {verdict.parts} is beyond what float32 holds"
                verdict = Verdict(verdict.parts, INVALID, complaint)
            else:
                self._names = tuple(verdict.parts)
        ended = verdict.failure or "scored"
        self.counts[ended] += 1
        if verdict.failure:
            if self.counts[ended] == 1:
                # Later ones are only counted: a broken verifier fails each time.
                logger.warning("%s: %s", verdict.failure, verdict.detail)
            return Score(verdict.parts, math.nan, verdict.failure, detail=verdict.detail, seconds=seconds, asked=True)
        plain = outcome if self._shapes else None
        return Score(verdict.parts, reward, "", plain, verdict.wrong, verdict.read, verdict.detail, seconds, asked=True)


async def _asked(remote: Remote, row: object, answer: object) -> Scored:
    """What a remote part says, with its faults named as those of a verifier in a process are."""
    began = time.perf_counter()
    try:
        verdict = judge(await remote.verify(msgspec.to_builtins(row), msgspec.to_builtins(answer)))
    except VerifierError:
        raise
    except Unscored as error:
        verdict = Verdict({}, error.failure, short(error.detail))
    except BadRow as error:
        verdict = Verdict({}, BAD_ROW, short(error))
    except Exception as error:
        verdict = Verdict({}, RAISED, short(f"{type(error).__name__}: {error}"))
    return Scored(verdict, time.perf_counter() - began)


async def _all(calls: Sequence[Awaitable[Scored]]) -> list[Scored]:
    """The results of all. Raises what the first one raised, the others cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
