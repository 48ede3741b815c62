"""The player of episodes with several turns: the model answers, what answers it answers, until it is over.

| ends                       | finish_reason | info.ended_by  | scored               |
|----------------------------|---------------|----------------|----------------------|
| the environment is done    | of the answer | -              | yes                  |
| an answer without a call   | of the answer | -              | yes                  |
| an answer was cut off      | length        | max_tokens     | as it stands         |
| as many answers as allowed | length        | max_turns      | as it stands         |
| no room for another one    | length        | max_length     | as it stands         |
| no time left               | length        | timeout        | as it stands         |
| a fault of the environment | of the answer | -              | no: its name         |
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from asyncrl.buffers.concurrency import all_or_nothing, end_all
from asyncrl.collectors.engines.base import Completion, FinishReason, Request, request_seed
from asyncrl.collectors.episode import Episode, EpisodeLost, Played, Player, Sampler, Turn
from asyncrl.collectors.rollout import TaskPrompts
from asyncrl.collectors.single import ask, nothing_sampled
from asyncrl.environments.base import INVALID, LOST, RAISED, EnvironmentFailed, EnvironmentLost, Step
from asyncrl.environments.live import Live
from asyncrl.environments.processes import Processes, ProcessesLost
from asyncrl.rewards.scoring import Score, Scores
from asyncrl.tasks.base import Answer, Message, TaskError
from asyncrl.tasks.history import Rendered, answered, rendered, went_on
from asyncrl.tasks.scorer import TURNS

logger = logging.getLogger(__name__)

T = TypeVar("T")

OUT_OF_TIME = "episode_timeout"  # before anything was sampled


@dataclass(frozen=True, slots=True)
class Limits:
    """Of an episode. max_turns: answers; max_length: tokens of the whole sequence, None: any; seconds: from its
    beginning. at_once: episodes that have begun and not ended."""

    max_turns: int
    max_length: int | None
    seconds: float
    at_once: int


class TurnPlayer(Player):
    """Plays with what `live` makes for each episode. `rewards_turns`: it may give rewards turn by turn."""

    def __init__(
        self,
        prompts: TaskPrompts,
        scoring: Scores,
        processes: Processes,
        live: Callable[[], Live],
        *,
        limits: Limits,
        rewards_turns: bool,
    ) -> None:
        self._prompts, self._verifiers, self._processes, self._live = prompts, scoring, processes, live
        self._limits, self._rewards_turns = limits, rewards_turns
        self._places = asyncio.Semaphore(limits.at_once)
        self._scoring: dict[str, float] = {}
        self._answering: dict[str, float] = {}
        self._failures: Counter[str] = Counter()

    @property
    def scoring(self) -> Mapping[str, float]:
        return self._scoring

    @property
    def answering(self) -> Mapping[str, float]:
        return self._answering

    async def start(self) -> None:
        try:
            await all_or_nothing([self._verifiers.start(), self._processes.start()])
        except ProcessesLost as error:  # at first that is the task's fault
            raise TaskError(str(error)) from error

    async def play(self, episode: Episode, sampler: Sampler) -> Played:
        async with self._places:  # freed by episodes, each of which has its own limit of time
            live = self._live()
            run = _Run(episode, live, self._prompts, self._limits, sampler, self._answering)
            try:
                failure = await self._played(run)
                score = Score({}, math.nan, failure) if failure else await self._score(run)
            except EnvironmentLost as error:
                raise EpisodeLost(LOST, str(error)) from error
            finally:
                await live.end()
        return run.played(score)

    async def close(self) -> None:
        await asyncio.gather(self._verifiers.close(), self._processes.close())

    async def _played(self, run: _Run) -> str:
        """Why the episode cannot be scored, "" if it can."""
        try:
            if failure := await run.turns_to_the_end():
                return failure
            run.parts = await run.answer(run.live.score())
        except EnvironmentFailed as error:
            self._tell(error)
            return error.failure
        try:
            await run.answer(run.live.close())
        except EnvironmentFailed as error:  # what it was worth is known, and its process ends anyway
            self._tell(error)
        return ""

    def _tell(self, error: EnvironmentFailed) -> None:
        self._failures[error.failure] += 1
        if self._failures[error.failure] == 1:  # later ones are only counted: a broken one fails each time
            logger.warning("%s", error)

    async def _score(self, run: _Run) -> Score:
        answer: dict[str, Any] = {
            "text": run.text,
            "token_ids": run.token_ids,
            "finish_reason": run.finish_reason,
            "messages": run.messages,
        }
        if run.parts is not None:
            answer["parts"] = run.parts
        if self._rewards_turns:
            rewards = [turn.reward for turn in run.turns if turn.reward is not None]
            answer[TURNS] = sum(rewards) if rewards else None
        episode = run.episode
        self._scoring[episode.id] = time.monotonic()
        try:
            return await self._verifiers.score(episode.prompt.row, answer)
        finally:
            del self._scoring[episode.id]


class _Run:
    """One episode on its way: what was said, what was sampled."""

    def __init__(
        self,
        episode: Episode,
        live: Live,
        prompts: TaskPrompts,
        limits: Limits,
        sampler: Sampler,
        answering: dict[str, float],
    ) -> None:
        self.episode, self.live = episode, live
        self._prompts, self._limits, self._sampler, self._answering = prompts, limits, sampler, answering
        self._deadline = time.monotonic() + limits.seconds
        self.turns: list[Turn] = []
        self.messages: list[Message] = []  # after the opening
        self.text = ""  # of the last answer
        self.parts: Mapping[str, float | None] | None = None  # of the environment's own score
        self.ended_by = ""  # a limit
        self._unasked: Turn | None = None  # an episode that failed before anything was sampled has this one

    @property
    def token_ids(self) -> list[int]:
        """All that was sampled."""
        return [token for turn in self.turns for token in turn.completion.token_ids.tolist()]

    @property
    def finish_reason(self) -> FinishReason:
        return "length" if self.ended_by else self._all_turns[-1].completion.finish_reason

    @property
    def _all_turns(self) -> list[Turn]:
        return self.turns or ([] if self._unasked is None else [self._unasked])

    def played(self, score: Score) -> Played:
        info: dict[str, Any] = {**self.live.info, "turns": len(self.turns)}
        if self.ended_by:
            info["ended_by"] = self.ended_by
        return Played(
            tuple(self._all_turns), score, time.time(), self.finish_reason, info=info, messages=tuple(self.messages)
        )

    async def turns_to_the_end(self) -> str:
        """Play; "", or why there is nothing to score. Raises EnvironmentFailed, EnvironmentLost, EngineError."""
        episode, tokenizer = self.episode, self._prompts.tokenizer
        shown = self._prompts.shown(episode.prompt.row)
        self._unasked = Turn(episode.request(), nothing_sampled("the environment failed before the first answer"))
        # The same for all members: they are attempts at one and the same thing.
        seed = request_seed(episode.run, episode.ordinal, 0, 0, 0)
        opening = await self.answer(self.live.reset(episode.prompt.own_row, seed))
        conversation = self._own_opening() if opening is None else list(opening)
        try:
            before = rendered(tokenizer, conversation, **shown)
            while True:
                room = math.inf if self._limits.max_length is None else self._limits.max_length - len(before.token_ids)
                if room < 1:
                    return self._end_by("max_length", "prompt_too_long")
                if failure := await self._ask(before, None if room == math.inf else int(room)):
                    return failure
                if self.ended_by == "timeout":
                    return ""
                turn = self.turns[-1]
                after = answered(tokenizer, before, turn.completion.token_ids.tolist())
                step = await self._step(turn.completion)
                self.turns[-1] = replace(turn, reward=step.reward)
                if turn.completion.finish_reason == "length":
                    return self._end_by("max_tokens")
                if step.done:
                    return ""
                if len(self.turns) == self._limits.max_turns:
                    return self._end_by("max_turns")
                if time.monotonic() >= self._deadline:
                    return self._end_by("timeout")
                before = went_on(tokenizer, after, [*conversation, *self.messages], **shown)
        except TaskError as error:  # the template refuses what the environment says
            raise EnvironmentFailed(INVALID, str(error)) from error

    def _own_opening(self) -> list[Message]:
        try:
            return self._prompts.messages(self.episode.prompt.row)
        except Exception as error:  # the user's program: it made the prompt before, and may be of another mind now
            raise EnvironmentFailed(RAISED, f"messages: {type(error).__name__}: {error}") from error

    async def answer(self, call: Awaitable[T]) -> T:
        """What the environment says, which has a limit of its own."""
        self._answering[self.episode.id] = time.monotonic()
        try:
            return await call
        finally:
            del self._answering[self.episode.id]

    def _end_by(self, limit: str, failure: str = "") -> str:
        """End by a limit. `failure`: what it is if nothing was sampled before."""
        if not self.turns:
            return failure
        self.ended_by = limit
        return ""

    async def _ask(self, before: Rendered, room: int | None) -> str:
        """Ask for the next answer. Out of time, what was sampled of it is the answer."""
        request = self.episode.request(len(self.turns), before.token_ids, max_tokens=room)
        asking = asyncio.ensure_future(ask(self._sampler, request))
        try:
            await asyncio.wait({asking}, timeout=max(0.0, self._deadline - time.monotonic()))
            found: tuple[Completion | None, str] = asking.result() if asking.done() else self._interrupted(request)
        finally:
            await end_all([asking])
        completion, failure = found
        if completion is None:
            return failure
        self.turns.append(Turn(request, completion))
        self.text = self._prompts.read(completion.token_ids.tolist())
        self.messages.append({"role": "assistant", "content": self.text})
        return failure

    def _interrupted(self, request: Request) -> tuple[Completion | None, str]:
        partial = self._sampler.partial(request.id)
        if partial is None or len(partial.token_ids) == 0:
            return None, self._end_by("timeout", OUT_OF_TIME)
        self.ended_by = "timeout"
        return replace(partial, finish_reason="length"), ""

    async def _step(self, completion: Completion) -> Step:
        """What comes back to the last answer, put behind it."""
        answer = Answer(self.text, tuple(completion.token_ids.tolist()), completion.finish_reason, tuple(self.messages))
        step = await self.answer(self.live.step(answer))
        self.messages += step.messages
        return step
