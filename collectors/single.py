"""The player of tasks with one answer a row: one request, one score."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import numpy as np

from asyncrl.collectors.engines.base import Completion, Request
from asyncrl.collectors.episode import Episode, Played, Player, Sampler, Turn
from asyncrl.collectors.scoring import ABORTED, ENGINE_ERROR, REFUSED, Scorer
from asyncrl.rewards.scoring import Score


class SinglePlayer(Player):
    """Asks once and has the answer scored."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._scoring: dict[str, float] = {}

    @property
    def scoring(self) -> Mapping[str, float]:
        return self._scoring

    async def start(self) -> None:
        await self._scorer.start()

    async def play(self, episode: Episode, sampler: Sampler) -> Played:
        request = episode.request()
        completion, failure = await ask(sampler, request)
        if failure:
            score = Score({}, math.nan, failure)
        else:
            self._scoring[episode.id] = time.monotonic()
            try:
                score = await self._scorer.score(
                    episode.prompt, completion, ticket=episode.ordinal, member=episode.member
                )
            finally:
                del self._scoring[episode.id]
        return Played((Turn(request, completion),), score, time.time(), completion.finish_reason)

    async def close(self) -> None:
        await self._scorer.close()


async def ask(sampler: Sampler, request: Request) -> tuple[Completion, str]:
    """The answer, and why it cannot be scored; "" if it can. Raises EngineError."""
    try:
        completion = await sampler.generate(request)
    except ValueError as error:  # it cannot be served exactly, and that will not change
        return nothing_sampled(str(error)), REFUSED
    return completion, {"abort": ABORTED, "error": ENGINE_ERROR}.get(completion.finish_reason, "")


def nothing_sampled(error: str) -> Completion:
    """What stands in the record for a request that the engine refused."""
    return Completion(
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        versions=np.empty(0, np.int32),
        spans=(),
        finish_reason="error",
        error=error,
    )
