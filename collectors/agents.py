"""The player of agents: each episode is a process of the user's that calls the policy through the endpoint.

What ends an episode, and what becomes of it:

| what                                               | the member                                            |
|----------------------------------------------------|-------------------------------------------------------|
| the agent returned a reward, or is scored          | scored, whatever limits its calls met (`ended_by`)    |
| it raised, exited with a code, returned no reward  | unscored: `agent_raised`, `agent_invalid`, ...        |
| its process ended, it took too long                | unscored: `agent_died`, `agent_timeout`               |
| it called on and on behind a limit                 | unscored: `agent_flood`                               |
| nothing was sampled for it                         | unscored: `agent_no_call`                             |
| the engine ended an answer                         | unscored, by the engine's failure                     |
| no process could be had, or all of them are gone   | the episode is played again                           |
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from msgspec import to_builtins

from asyncrl.buffers.concurrency import end_all
from asyncrl.collectors.endpoint.server import Endpoint
from asyncrl.collectors.endpoint.session import Ended, Model, Session
from asyncrl.collectors.episode import Episode, EpisodeLost, Played, Player, Sampler, Turn
from asyncrl.collectors.single import nothing_sampled
from asyncrl.environments.processes import CallFailed, Processes, ProcessesLost
from asyncrl.rewards.scoring import Score, Scores
from asyncrl.tasks.base import TaskError

logger = logging.getLogger(__name__)

LONGEST_DETAIL = 200  # characters of it in the record
LOST = "agent_lost"
NO_CALL = "agent_no_call"
NONE = "agent_none"


class AgentPlayer(Player):
    """calls: of an episode, that the policy answers; seconds: that its agent has; at_once: episodes that have begun and
    not ended, each of which has a process. scores: whether the task scores the last answer of an agent that gives no
    reward itself."""

    def __init__(
        self,
        endpoint: Endpoint,
        processes: Processes,
        scoring: Scores,
        model: Model,
        *,
        calls: int,
        seconds: float,
        at_once: int,
        scores: bool,
    ) -> None:
        self._endpoint, self._processes, self._verifiers = endpoint, processes, scoring
        self._model, self._calls, self._seconds, self._scores = model, calls, seconds, scores
        self._places = asyncio.Semaphore(at_once)
        self._scoring: dict[str, float] = {}
        self._failures: Counter[str] = Counter()

    @property
    def scoring(self) -> Mapping[str, float]:
        return self._scoring

    async def start(self) -> None:
        """Raises TaskError for an agent that cannot be loaded and an address that cannot be had."""
        await self._verifiers.start()
        try:
            await self._processes.start()
            await self._endpoint.start()
        except ProcessesLost as error:
            raise TaskError(str(error)) from error
        except OSError as error:
            raise TaskError(
                f"agents cannot be listened to: {error}.\n"
                "collector.endpoint.host must be an address of this machine; collector.endpoint.port 0 takes any port "
                "that is free"
            ) from error

    async def play(self, episode: Episode, sampler: Sampler) -> Played:
        """See Player."""
        async with self._places:  # freed by episodes, each of which has its own limit of time
            session = Session(episode, sampler, self._model, calls=self._calls)
            key = self._endpoint.open(session)
            detail = ""
            try:
                score = await self._score(session, key)
            except Ended as ended:
                score, detail = Score({}, math.nan, ended.failure), str(ended)
                self._note(ended)
            finally:
                await self._endpoint.end(key)
        turns = session.turns or (Turn(episode.request(), nothing_sampled(detail)),)
        info: dict[str, Any] = {"calls": len(session.turns)}
        if session.limit:
            info["ended_by"] = session.limit
        if detail:
            info["error"] = detail[:LONGEST_DETAIL]
        return Played(
            turns, score, time.time(), turns[-1].completion.finish_reason, info, messages=session.conversation
        )

    async def close(self) -> None:
        await asyncio.gather(self._endpoint.close(), self._processes.close(), self._verifiers.close())

    def _note(self, ended: Ended) -> None:
        self._failures[ended.failure] += 1
        if self._failures[ended.failure] == 1:  # later ones are only counted: a broken agent fails each time
            logger.warning("%s: %s", ended.failure, ended)

    async def _score(self, session: Session, key: str) -> Score:
        """Run the agent, then make a score of what it returned. Raises Ended where there is nothing to score, and what
        broke the session."""
        returned = await self._returned(session, key)
        await session.close()  # nobody is there to read what is still sampled
        if not session.turns:
            raise Ended(NO_CALL, "the agent ended without an answer of the policy's: there is nothing to train")
        if returned is None and not self._scores:
            raise Ended(NONE, "the agent returned no reward, and task.rewards says nothing of answers")
        if returned is not None and returned["failure"]:
            raise Ended(returned["failure"].replace("verifier_", "agent_"), returned["detail"])
        last = session.turns[-1]
        answer: dict[str, Any] = {
            "text": session.text(last.completion),
            "token_ids": [token for turn in session.turns for token in turn.completion.token_ids.tolist()],
            "finish_reason": last.completion.finish_reason,
            "messages": session.conversation,
        }
        if returned is not None:
            answer["parts"] = returned["parts"]
        episode = session.episode
        self._scoring[episode.id] = time.monotonic()
        try:
            return await self._verifiers.score(episode.prompt.row, answer)
        finally:
            del self._scoring[episode.id]

    async def _returned(self, session: Session, key: str) -> dict[str, Any] | None:
        """What the agent gave as its reward. The wait ends with the agent, by its limit, or with the session."""
        try:
            process = await self._processes.begin(session.episode.request().seed)
        except ProcessesLost as error:
            raise EpisodeLost(LOST, str(error)) from error
        row = to_builtins(session.episode.prompt.own_row)
        calling = asyncio.ensure_future(process.call("run", row, self._endpoint.base_url, key, limit_s=self._seconds))
        failing = asyncio.ensure_future(session.failed.wait())
        try:
            await asyncio.wait({calling, failing}, return_when=asyncio.FIRST_COMPLETED)
            if session.broken is not None:  # whatever the agent made of it
                raise session.broken
            returned: dict[str, Any] | None = calling.result()
            return returned
        except CallFailed as error:
            raise Ended(f"agent_{error.kind}", str(error)) from error
        except ProcessesLost as error:
            raise EpisodeLost(LOST, str(error)) from error
        finally:
            await end_all({calling, failing})
            await process.end()
