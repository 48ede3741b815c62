"""The work of a collector's tickets: from one that is granted to its group, or to why there is none.

Each ticket has a task of its own (`Running`), which generates, scores and hands over. Whatever happens, its end is told
to the store and its slots are free again. The work of a ticket that is no longer wanted (revoked, dead weights) is
ended by cancelling its task, which aborts its requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from operator import le
from typing import Any, TypeVar

from asyncrl.buffers.base import Buffer, Member, Ticket
from asyncrl.buffers.concurrency import all_or_nothing
from asyncrl.buffers.patience import patiently
from asyncrl.collectors.again import play
from asyncrl.collectors.engines.base import EngineError
from asyncrl.collectors.episode import Episode, EpisodeLost, Played, Player, episodes
from asyncrl.collectors.fleet import Fleet
from asyncrl.collectors.rollout import PromptError, Prompts, run_of, sampling_of
from asyncrl.collectors.running import Running, TicketEnded
from asyncrl.collectors.scoring import ABORTED, REFUSED, hand_over, mean_reward, unusable
from asyncrl.collectors.seats import Seats
from asyncrl.collectors.segments import trajectories
from asyncrl.collectors.unscored import Missed, UnscoredWatch
from asyncrl.config.derived import derive
from asyncrl.config.recipe import Recipe
from asyncrl.schema import Trajectory
from asyncrl.staleness import Weights

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Work:
    """The tickets that one membership of the run has in work. Its tasks are of the event loop of that."""

    def __init__(
        self,
        recipe: Recipe,
        buffer: Buffer,
        member: Member,
        *,
        fleet: Fleet,
        prompts: Prompts,
        player: Player,
        watched: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        """watched: makes a task whose unexpected exception somebody sees."""
        self._recipe, self._buffer, self._member = recipe, buffer, member
        self._fleet, self._prompts, self._player, self._watched = fleet, prompts, player, watched
        self._sampling = sampling_of(recipe, prompts.stop_token_ids)
        self._run = run_of(recipe.run.name, recipe.run.seed)
        self._most_groups = derive(recipe).most_groups
        self._unscored = UnscoredWatch(recipe.collector.max_unscored, group_size=recipe.collector.group_size)
        self.groups: dict[tuple[int, int], Running] = {}
        self.scored = 0  # answers, by now
        self.cancelled_s = 0.0  # collector-seconds of work that was taken away; the store knows its tokens only
        self.failures: Counter[str] = Counter()  # members by verifier failure, tickets and puts by outcome

    @property
    def startable(self) -> int:
        """Groups that could start now."""
        by_slots = self._fleet.startable(self._recipe.collector.group_size)
        return min(by_slots, self._most_groups - len(self.groups))

    @property
    def progress(self) -> dict[tuple[int, int], int]:
        """By ticket, what grows as long as anything comes of it: tokens and scores."""
        return {key: group.tokens + len(group.scores) for key, group in self.groups.items()}

    def revoke(self, keys: Iterable[tuple[int, int]]) -> None:
        """End what the store has taken back; nobody is told."""
        for key in keys:
            if (group := self.groups.get(key)) is not None:
                group.end(TicketEnded(None, "revoked"))

    def end_dead(self, is_dead: Callable[[Weights], bool]) -> None:
        """End the work in which weights have a part that no longer count."""
        for group in self.groups.values():
            group.seats.touch()
            if dead := [weights for weights in group.seats.touched if is_dead(weights)]:
                group.end(TicketEnded("cancelled", "dead_weights", str(tuple(dead[0]))))

    def leave(self) -> list[Running]:
        """What is in work, whose tasks are to be cancelled and seats released. They end silently: leaving returns all
        tickets at once, without counting a loss."""
        groups = list(self.groups.values())
        for group in groups:
            group.ended = TicketEnded(None, "left")
        return groups

    async def start(self, ticket: Ticket) -> None:
        """Reserve the slots of a ticket's group, then let it run."""
        try:
            prompt = self._prompts.train(ticket.ordinal)
        except PromptError as error:
            await self._fail(ticket, TicketEnded("data", error.reason, str(error)))
            return
        members = episodes(
            prompt,
            self._sampling,
            run=self._run,
            ordinal=ticket.ordinal,
            attempt=ticket.attempt,
            group_size=self._recipe.collector.group_size,
            same_draws=self._recipe.run.deterministic,
        )
        may = partial(le, ticket.issued_for)  # what the store was promised
        seats = Seats(self._fleet, may=may, wait_s=self._recipe.collector.group_timeout_s)
        if not seats.reserve(episode.request() for episode in members):
            await self._fail(ticket, TicketEnded("cancelled", "no_engine"))
            return
        group = Running(ticket, members, seats)
        self.groups[group.key] = group
        group.task = self._watched(self._group(group))

    async def _group(self, group: Running) -> None:
        """Generate, score, hand over. Whatever happens, the ticket's end is told and its slots are free again."""
        group.begun = True
        try:
            await self._work(group)
        except TicketEnded as end:
            if group.ended is None:
                group.ended, group.tokens_at_end = end, group.tokens
            if end.kind is None:
                self.failures[end.reason] += 1
                self.cancelled_s += self._seconds(group)
            else:
                await self._fail(group.ticket, end, group)
        finally:
            del self.groups[group.key]
            group.seats.release()
            # Also where it held no slot any more, only a judge's time: its place among the groups is free.
            self._fleet.freed.set()

    async def _work(self, group: Running) -> None:
        """Raises TicketEnded for every way in which a ticket ends without a group."""
        try:
            if group.ended is not None:
                raise group.ended
            members = await all_or_nothing(self._episode(group, episode) for episode in group.episodes)
            await self._put(group, [row for member in members for row in member])
        except EngineError as error:
            raise TicketEnded("infrastructure", "engine_failed", str(error)) from error
        except EpisodeLost as error:
            raise TicketEnded("infrastructure", error.reason, str(error)) from error
        except asyncio.CancelledError:
            if group.ended is None:
                raise
            raise group.ended from None

    async def _episode(self, group: Running, episode: Episode) -> list[Trajectory]:
        """The rows of one episode. One the engine gave up on ends the ticket, unless its group may go without it."""
        played = await play(episode, self._player, group.seats)
        failure = played.score.failure
        if self._recipe.collector.min_members is None:
            if failure == REFUSED:
                raise TicketEnded("data", REFUSED, played.turns[-1].completion.error)
            if failure == ABORTED:
                raise TicketEnded("infrastructure", ABORTED)
        group.scores.append(played.score)
        self.scored += 1
        if failure:
            self.failures[failure] += 1
        if played.score.asked:
            self._unscored.see(self._missed(episode, played) if failure else None)
        return trajectories(played)

    def _missed(self, episode: Episode, played: Played) -> Missed:
        text = self._prompts.read(played.turns[-1].completion.token_ids.tolist())
        return Missed(episode.prompt.row.id, played.score.failure, played.score.detail, text)

    async def _put(self, group: Running, rows: list[Trajectory]) -> None:
        end = unusable(
            rows,
            min_members=self._recipe.collector.min_members,
            filtering=self._recipe.buffer.dynamic_sampling,
        )
        if end is not None:
            raise TicketEnded(*end)
        sampling = self._recipe.collector.sampling
        try:
            header, payload = hand_over(
                group.ticket,
                rows,
                prompt=group.episodes[0].prompt,
                collector=self._member.name,
                engine=", ".join(sorted(group.seats.engines)),
                sampling={name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")},
                seconds=self._seconds(group),
            )
        except ValueError as error:
            raise TicketEnded("data", "bad_group", str(error)) from error
        result = await self._store(lambda: self._buffer.put(self._member, header, payload))
        if result not in ("held", "duplicate"):
            self.failures[f"put_{result}"] += 1
            logger.info("put of ticket %d attempt %d: %s, dropped", *group.key, result)

    async def _fail(self, ticket: Ticket, end: TicketEnded, group: Running | None = None) -> None:
        """Tell the store, with the work that is lost by it; None: none was begun."""
        kind = end.kind or "cancelled"
        self.failures[end.reason] += 1
        logger.log(
            logging.INFO if kind in ("cancelled", "filtered") else logging.WARNING,
            "ticket %d attempt %d: %s, %s", ticket.ordinal, ticket.attempt, kind, end,
        )  # fmt: skip
        await self._store(
            lambda: self._buffer.fail(
                self._member,
                ticket.ordinal,
                ticket.attempt,
                kind=kind,
                reason=end.reason,
                tokens=group.tokens_at_end if group else 0,
                seconds=self._seconds(group) if group else 0.0,
                # What is filtered is so for its outcomes: their mean says whether prompts are too easy or too hard.
                reward=mean_reward(s.outcome if kind == "filtered" else s.reward for s in group.scores)
                if group
                else None,
                length=group.tokens_at_end / len(group.episodes) if group else 0.0,
            )
        )

    def _seconds(self, group: Running) -> float:
        """Collector-seconds: the time a group took, by the share of this collector's slots it may occupy, so that the
        seconds of groups that ran beside each other add up to the time that passed."""
        share = min(1.0, len(group.episodes) / self._fleet.slots)
        return (time.monotonic() - group.started) * share

    async def _store(self, call: Callable[[], Awaitable[T]]) -> T:
        """A call to the buffer, made again while the store is away."""
        return await patiently(call, limit_s=self._recipe.run.no_progress_s)
