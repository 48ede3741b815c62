"""From an answer to its score, and from trajectories to what is handed to the buffer.

A member that failed stays in the record, unscored (reward NaN, `failure` says why); the learner leaves it out of
loss and baseline. A group with too few scored members is a failed ticket, never one of zeros.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np

from asyncrl import schema
from asyncrl.buffers.base import FailKind, GroupHeader, Ticket
from asyncrl.collectors.engines.base import Completion
from asyncrl.collectors.rollout import Prompt, Prompts
from asyncrl.rewards.scoring import Score, Scores
from asyncrl.rewards.shaping import OUTCOME
from asyncrl.schema import Group, Trajectory
from asyncrl.tasks.base import Answer

ENGINE_ERROR = "engine_error"  # the engine ended this one request with an error: nothing to score
ABORTED = "engine_aborted"  # the engine ended it for reasons of its own
REFUSED = "request_refused"  # the engine cannot serve it exactly

ZERO_VARIANCE = "zero_variance"  # all outcomes or rewards are equal: nothing tells the members of the group apart


class Scorer(Protocol):
    """What turns a completion into a score."""

    async def start(self) -> None: ...

    async def score(self, prompt: Prompt, completion: Completion, *, ticket: int, member: int) -> Score:
        """Never raises for an answer's or a verifier's fault: `failure` names it. Raises rewards.pool.VerifierError if
        no answer can be scored any more."""

    async def close(self) -> None: ...


class TaskScorer:
    """The task's own scores, from its verifier processes. Implements Scorer."""

    def __init__(self, scoring: Scores, prompts: Prompts) -> None:
        self._scores = scoring
        self._prompts = prompts

    async def start(self) -> None:
        await self._scores.start()

    async def score(self, prompt: Prompt, completion: Completion, *, ticket: int, member: int) -> Score:
        token_ids: list[int] = completion.token_ids.tolist()
        answer = Answer(self._prompts.read(token_ids), tuple(token_ids), completion.finish_reason)
        return await self._scores.score(prompt.row, answer)

    async def close(self) -> None:
        await self._scores.close()


class SimulatedScorer:
    """0 or 1 by a hash of ticket and member: what a simulated completion says means nothing. Implements Scorer.

    scales: by task, what the reward is multiplied by (`reward_scale`), as the learner takes it to be; left out: 1.
    """

    def __init__(self, scales: Mapping[str, float] | None = None) -> None:
        self._scales = scales or {}

    async def start(self) -> None:
        return None

    async def score(self, prompt: Prompt, completion: Completion, *, ticket: int, member: int) -> Score:
        reward = float(blake2b(f"{ticket}/{member}".encode(), digest_size=1).digest()[0] & 1)
        scale = self._scales.get(prompt.task, 1.0)
        return Score({"simulated": reward}, scale * reward, "", None if scale == 1.0 else reward)

    async def close(self) -> None:
        return None


def mean_reward(rewards: Iterable[float]) -> float | None:
    """Over the scored ones; None if there is none.

    >>> mean_reward([1.0, math.nan, 0.5]), mean_reward([math.nan])
    (0.75, None)
    """
    known = [reward for reward in rewards if not math.isnan(reward)]
    return sum(known) / len(known) if known else None


def members_of(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The first row of each member: what is said of it, each of its segments says."""
    return [row for row in trajectories if row.segment == 0]


def unusable(
    trajectories: Sequence[Trajectory], *, min_members: int | None, filtering: bool
) -> tuple[FailKind, str] | None:
    """Why a finished group cannot be trained and what becomes of its ticket, None if it can.

    trajectories: the rows of the group; a member counts once, however many segments it has.
    filtering: leave out groups whose scored members are all right or all wrong: of the same outcome, as in DAPO's
    dynamic sampling (arXiv 2503.14476, eq. 11), though shaping may tell them apart. Also those of the same reward, of
    which nothing can be learnt.
    min_members: scored ones it needs; None: one. With too few the most common failure names the reason; if the engine
    aborted some, the prompt may do better elsewhere. All members have ended by now: a group that was taken as soon as
    enough were there would be one of short answers.
    """
    members = members_of(trajectories)
    failures = Counter(member.failure for member in members if math.isnan(member.reward))
    rewards = [member.reward for member in members if not math.isnan(member.reward)]
    if len(rewards) < (min_members or 1):
        if failures[ABORTED]:
            return "infrastructure", ABORTED
        (failure, _), *_ = failures.most_common(1)
        return "data", f"{'too_few_members' if rewards else 'unscored'}/{failure}"
    if not any(row.loss_mask.any() for row in trajectories):
        return "data", "empty"
    outcomes = [member.info.get(OUTCOME, member.reward) for member in members if not math.isnan(member.reward)]
    flat = min(rewards) == max(rewards) or min(outcomes) == max(outcomes)
    return ("filtered", ZERO_VARIANCE) if filtering and flat else None


def hand_over(
    ticket: Ticket,
    trajectories: Sequence[Trajectory],
    *,
    prompt: Prompt,
    collector: str,
    engine: str,
    sampling: dict[str, float],
    seconds: float,
) -> tuple[GroupHeader, bytes]:
    """What the store must know of a finished group, and its payload. Raises ValueError if the group is too large or the
    engine broke the record's rules (`schema.validate`)."""
    spans = {span.weights for row in trajectories for span in row.spans}
    newest = max(spans, default=ticket.issued_for)
    group = Group(
        ticket=ticket.ordinal,
        attempt=ticket.attempt,
        lineage=newest.lineage,
        task=prompt.task,
        row_id=prompt.row.id,
        collector=collector,
        engine=engine,
        sampling=sampling,
        issued=ticket.issued,
        put=time.time(),
        trajectories=trajectories,
    )
    payload = schema.encode(group)
    versions = np.concatenate([row.versions for row in trajectories])
    versions = versions[versions >= 0]  # of the sampled tokens, as `encode` made sure
    members = members_of(trajectories)
    header = GroupHeader(
        ordinal=ticket.ordinal,
        attempt=ticket.attempt,
        weights=newest,
        oldest=int(versions.min()),
        newest=int(versions.max()),
        spans=tuple(sorted(spans)),
        tokens=len(versions),
        seconds=seconds,
        digest=schema.digest(payload),
        reward=mean_reward(member.reward for member in members),
        length=len(versions) / len(members),
    )
    return header, payload
