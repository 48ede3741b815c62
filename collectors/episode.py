"""An episode: one attempt of one member of a ticket's group, from the prompt to its score.

A *player* plays it: it asks the engine for one answer (`single.py`), or for one after the other with something between
them. Whatever plays, what was sampled is kept as it was, token by token, and becomes training rows (`segments.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from asyncrl.collectors.engines.base import Completion, FinishReason, Request, Sampling, request_seed
from asyncrl.collectors.rollout import Prompt
from asyncrl.rewards.scoring import Score


class EpisodeLost(Exception):
    """What an episode needs beside an engine is gone, through no fault of row or model: an environment's process, an
    agent's. It is played again from its beginning. `reason` is the class it is counted under."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Episode:
    """What is played. `run`: what seeds are a function of, with ordinal, attempt, member and turn.
    `same_draws`: not of the attempt, nor of `again` (`run.deterministic`)."""

    prompt: Prompt
    group: str  # unique among what runs
    run: str
    ordinal: int  # of the ticket
    attempt: int
    member: int
    sampling: Sampling
    again: int = 0  # how often it was lost (EpisodeLost) and begun again
    same_draws: bool = False

    @property
    def id(self) -> str:
        return f"{self.group}.{self.member}" + (f"+{self.again}" if self.again else "")

    def request(
        self, turn: int = 0, token_ids: Sequence[int] | None = None, *, max_tokens: int | None = None
    ) -> Request:
        """What turn number `turn` asks of the engine. token_ids: all that comes before its answer; None: the prompt.
        max_tokens: of the answer, if it is to have fewer than `sampling` says."""
        sampling = self.sampling
        if max_tokens is not None and max_tokens < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=max_tokens)
        return Request(
            id=f"{self.id}/{turn}" if turn else self.id,
            group=self.group,
            session=self.id,
            token_ids=self.prompt.token_ids if token_ids is None else tuple(token_ids),
            sampling=sampling,
            seed=self._seed(turn),
            ticket=self.ordinal,
            member=self.member,
        )

    def _seed(self, turn: int) -> int:
        attempt, again = (0, 0) if self.same_draws else (self.attempt, self.again)
        return request_seed(self.run, self.ordinal, attempt, self.member, turn, again=again)


def episodes(
    prompt: Prompt,
    sampling: Sampling,
    *,
    run: str,
    ordinal: int,
    attempt: int,
    group_size: int,
    same_draws: bool = False,
) -> tuple[Episode, ...]:
    """The members of a ticket's group. Another attempt has other seeds: it is another sample of the same prompt.

    same_draws: it has the same ones, so that the same weights give the same answers. The price: what cannot end in time
    under these draws cannot at the next attempt either, and the ticket ends as `poison` after as many as it may lose.
    """
    return tuple(
        Episode(prompt, f"{ordinal}.{attempt}", run, ordinal, attempt, member, sampling, same_draws=same_draws)
        for member in range(group_size)
    )


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the model, and what it was asked with: the whole sequence before it."""

    request: Request
    completion: Completion
    reward: float | None = None  # its own, where the environment gives one


@dataclass(frozen=True, slots=True)
class Played:
    """What came of an episode. `turns` in the order they were asked, one at least; scored: unix seconds.

    score: of the whole episode. Where there is nothing to score its `failure` says why (`scoring.py`) and its reward is
    NaN. info: goes into each row, JSON-able. messages: of several turns, what an evaluation shows beside the row's own.
    """

    turns: tuple[Turn, ...]
    score: Score
    scored: float
    finish_reason: FinishReason
    info: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()


class Sampler(Protocol):
    """Where an episode's requests go: engines behind one face, whichever of them answers."""

    async def generate(self, request: Request) -> Completion:
        """As `Engine.generate`. A request takes a slot for as long as it runs; between two of them an episode has
        none. Raises EngineError when no engine will answer, ValueError for what none can serve."""

    def partial(self, request_id: str) -> Completion | None:
        """As `Engine.partial`, over all stretches of the answer."""

    def listen(self, request_id: str, heard: Callable[[], None]) -> None:
        """As `Engine.listen`."""


class Player(Protocol):
    """Plays episodes, many at once."""

    @property
    def scoring(self) -> Mapping[str, float]:
        """Episode -> when its score was asked for, monotonic seconds; of the scores that are not there yet."""

    @property
    def answering(self) -> Mapping[str, float]:
        """Episode -> when its environment was asked, monotonic seconds; of those that have not answered yet."""
        return {}

    async def start(self) -> None:
        """Start the processes it needs."""

    async def play(self, episode: Episode, sampler: Sampler) -> Played:
        """Play it to its end, its score included.

        A fault of row, answer or verifier is a `failure` of the score. Raises EpisodeLost where it must be played
        again, what `sampler.generate` raises of the engine (EngineError), and rewards.pool.VerifierError if nothing can
        be scored any more. Cancelling it ends all that was started for it.
        """

    async def close(self) -> None: ...
