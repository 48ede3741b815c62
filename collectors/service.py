"""The collector: takes tickets, generates and scores their groups, hands them over, follows the newest weights.

`collect` builds what the recipe names and serves the run; `Session` is one membership of the run and owns all state
that the tasks below share, that of its groups in `Work`. They run in one event loop and change that state only between
two awaits.

| task          | waits for                                     | who ends the wait                                   |
|---------------|-----------------------------------------------|-----------------------------------------------------|
| control       | a nudge, at most BEAT_S                       | announce, new lineage, a revoked ticket, end; time  |
| tickets       | a free slot on an engine that serves weights; | an ended member, an activation;                     |
|               | an admissible ticket, at most ASK_S           | commit, a terminal put, a lost member; time         |
| updates       | weights not tried yet (`updates.py`)          | control, from a beat's answer; engines; its pause   |
| engines       | one that failed, or is to be checked          | any task, by `Fleet.fail`; control (no token); time |
| one per group | its members: completions, then a score; put   | an engine, or another one; their limits of time     |
| evaluation    | the right to hold the weights; completions    | updates, after an activation; the engine            |
| verification  | the hash of what the engines serve            | the engine; time                                    |

The tasks of groups are in `work.py`. Calls to the store end by themselves (`patience.py`). The end of any task is seen
by `serve`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any, TypeVar

from msgspec import to_builtins

from asyncrl.buffers.base import Beat, Buffer, BufferError, Member, UnknownMember
from asyncrl.buffers.blocked import IN_MESSAGE, blocked_table
from asyncrl.buffers.concurrency import end_all, stopped
from asyncrl.buffers.patience import patiently
from asyncrl.collectors.engines.base import EngineError
from asyncrl.collectors.episode import Player
from asyncrl.collectors.evaluation.heldout import Evaluation, evaluate
from asyncrl.collectors.evaluation.report import report
from asyncrl.collectors.fleet import CollectorError, Fleet, engine_makers
from asyncrl.collectors.playing import start_all, task_parts
from asyncrl.collectors.rollout import Prompts, run_of, sampling_of
from asyncrl.collectors.seats import Seats
from asyncrl.collectors.unscored import TooManyUnscored
from asyncrl.collectors.updates import Updates
from asyncrl.collectors.waits import waits_of
from asyncrl.collectors.work import Work
from asyncrl.config.derived import derive
from asyncrl.config.evaluation import powers_of_two
from asyncrl.config.recipe import Recipe
from asyncrl.rewards.judge_limits import BudgetSpent
from asyncrl.staleness import Weights
from asyncrl.weights.reach import here

logger = logging.getLogger(__name__)

BEAT_S = 2.0  # a beat at least so often, and four within the time after which a member counts as lost
ASK_S = 10.0  # one request for tickets; it is simply made again
LEAVE_S = 5.0  # for the farewell: without it the tickets are returned a little later
REJOIN_S = 1.0  # before joining again, so that a store that forgets everybody is not flooded
METER_S = 1.0  # shortest stretch over which tokens/s is measured

T = TypeVar("T")


async def collect(
    recipe: Recipe, buffer: Buffer, member: Member, *, model_path: Path | None, stop: asyncio.Event
) -> None:
    """Serve a run until it has ended or `stop` is set; tickets in work are then returned. `model_path` is None for a
    simulated engine. If the run no longer knows the member, all work is dropped and it joins as a new incarnation.

    Raises CollectorError (an engine fails again and again, nothing to do for too long), what building the engine, the
    task or its verifiers raises, and the store's BufferError when it could not be reached for `run.no_progress_s`; and,
    after everybody is told that the run has ended, what ends it for all: TooManyUnscored, BudgetSpent.
    """
    prompts, player = await asyncio.to_thread(task_parts, recipe, model_path)  # imports and reads for seconds
    fleet = Fleet(engine_makers(recipe, member.name, model_path))
    try:
        if await stopped(stop, start_all(player, fleet)):
            return
        # What was loaded stays until the end. A full collection that looks through it again (every 60 steps or so of a
        # small model) halts everything for 0.1 to 0.2 s.
        gc.freeze()
        while True:
            session = Session(recipe, buffer, member, fleet=fleet, prompts=prompts, player=player)
            try:
                return await session.serve(stop)
            except UnknownMember as error:
                logger.warning("%s; joining again, all work in progress is dropped", error)
            except (TooManyUnscored, BudgetSpent) as error:
                await _end_run(buffer, f"collector {member.name}: {error}")
                raise
            if await stopped(stop, asyncio.sleep(REJOIN_S)):
                return
            member = Member(member.name, uuid.uuid4().hex)
    finally:
        await asyncio.gather(fleet.close(), player.close())


async def _end_run(buffer: Buffer, error: str) -> None:
    """Tell the learner and other collectors: they would go on to make and train what is not worth it, and a collector
    that was only started again would have to find that out once more."""
    try:
        async with asyncio.timeout(LEAVE_S):
            await buffer.finish(error=error)
    except (BufferError, TimeoutError) as second:
        logger.warning("the others could not be told that the run has ended: %s", second)


class Session:
    """One membership of the run, from join to leave."""

    def __init__(
        self, recipe: Recipe, buffer: Buffer, member: Member, *, fleet: Fleet, prompts: Prompts, player: Player
    ) -> None:
        self.recipe, self.buffer, self.member = recipe, buffer, member
        self.fleet, self.prompts, self.player = fleet, prompts, player
        self.sampling = sampling_of(recipe, prompts.stop_token_ids)
        self.run = run_of(recipe.run.name, recipe.run.seed)
        self.limit_s = recipe.run.no_progress_s
        self.most_groups = derive(recipe).most_groups
        self.work = Work(recipe, buffer, member, fleet=fleet, prompts=prompts, player=player, watched=self._watched)
        self.evaluation: asyncio.Task[None] | None = None
        self.verification: asyncio.Task[None] | None = None
        self.verified: dict[str, Any] | None = None  # the last answer to a request to prove what is served
        self.place = here(fleet.device)
        self.updates = Updates(
            fleet,
            buffer,
            config=recipe.weights,
            me=member.incarnation,
            place=self.place,
            drain_limit_s=recipe.collector.group_timeout_s,
            store_limit_s=self.limit_s,
            on_change=self._weights_changed,
        )
        self.moved_at = time.monotonic()  # when there was last something to do: tickets, weights, an evaluation
        self.wrong: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # a group's task raised
        self._beating = asyncio.Lock()  # answers are acted on in the order they were given
        self._told: tuple[Weights, str] | None = None  # what the store knows to be served
        self._verifying = ""  # the last request that was taken up
        self._meter = (time.monotonic(), fleet.generated_tokens, 0.0)

    # --- the long-lived tasks ---------------------------------------------------------------------------------------

    async def serve(self, stop: asyncio.Event) -> None:
        """Join, work until the run ended or `stop` is set, leave. Raises what any task raises."""
        await self.updates.prove()
        await self._store(lambda: self.buffer.join(self.member, self._info()))
        logger.info("collector %s joined run %s, waits for weights", self.member.name, self.run)
        loops: set[asyncio.Future[Any]] = {
            asyncio.ensure_future(loop)
            for loop in (
                self._control(),
                self._tickets(),
                self.updates.run(),
                self.fleet.tend(on_failed=self._beat, on_started=self.updates.engine_restarted),
                self.fleet.watch(),
                stop.wait(),
            )
        }
        try:
            done, _ = await asyncio.wait({*loops, self.wrong}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            groups = self.work.leave()
            work = {group.task for group in groups if group.task is not None}
            asked = {task for task in (self.evaluation, self.verification) if task is not None}
            await end_all({*loops, *work, *asked, self.wrong})
            for group in groups:
                group.seats.release()
            await self.updates.close()
            with suppress(BufferError, TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self.buffer.leave(self.member)

    async def _control(self) -> None:
        """Beat, act on the answer, wait for news. Returns when the run has ended."""
        pause = min(BEAT_S, self.buffer.limits.member_timeout_s / 4)
        while (await self._beat()).phase != "ended":
            self.fleet.fail_still(self.recipe.collector.group_timeout_s)
            if self.work.groups:
                self.moved_at = time.monotonic()
            if (idle := time.monotonic() - self.moved_at) > self.limit_s:
                stats = await self._store(self.buffer.stats)
                stall = f"nothing to do for {idle:.0f} s (run.no_progress_s): {self._idle_reason()}"
                raise CollectorError("\n".join([stall, *blocked_table(stats, self.buffer.limits, most=IN_MESSAGE)]))
            await self._store(lambda: self.buffer.nudge(self.member, pause))
        logger.info("the run has ended")

    async def _tickets(self) -> None:
        """Ask for the groups that could start now, and start what is granted."""
        seq = 1
        while True:
            self.fleet.freed.clear()
            want = self.work.startable
            if want <= 0:
                await self.fleet.freed.wait()
                continue
            ask = partial(self.buffer.tickets, self.member, seq=seq, want=want, wait_s=ASK_S)
            granted = await self._store(ask)
            if granted:  # else the same question again: an answer that was lost is not granted twice
                seq += 1
            for ticket in granted:
                await self.work.start(ticket)

    # --- beats ------------------------------------------------------------------------------------------------------

    async def _beat(self) -> Beat:
        async with self._beating:
            served = self.fleet.oldest
            progress = self.work.progress
            beat = await self._store(
                lambda: self.buffer.beat(
                    self.member,
                    serving=served[0] if served else None,
                    checksum=served[1] if served else "",
                    progress=progress,
                    info=self._info(),
                )
            )
            self._told = served
            self._act(beat)
        return beat

    def _act(self, beat: Beat) -> None:
        self.work.revoke(beat.revoked)
        self.updates.announced(beat.announced, beat.announcements)
        if beat.evaluation is not None and (self.evaluation is None or self.evaluation.done()):
            evaluation = Evaluation.of(beat.evaluation)
            if any(host.engine.serving == evaluation.weights for host in self.fleet.usable):
                self.evaluation = self._watched(self._evaluate(evaluation))
        if beat.verify and beat.verify != self._verifying and (self.verification is None or self.verification.done()):
            self._verifying = beat.verify
            self.verification = self._watched(self._verify(beat.verify))

    def _info(self) -> dict[str, Any]:
        """Small and JSON: it goes into every beat."""
        since, tokens, per_s = self._meter
        now, unix, total = time.monotonic(), time.time(), self.fleet.generated_tokens
        if now - since >= METER_S:
            per_s = max(0, total - tokens) / (now - since)  # a restarted engine counts from 0
            self._meter = (now, total, per_s)
        return {
            "tokens_per_s": round(per_s, 1),
            "tokens": total,
            "weights_staged_s": round(self.updates.staged_s, 4),
            "weights_paused_s": sum(host.engine.paused_s for host in self.fleet.hosts),
            "weights": self.updates.course.told(now, unix),
            "verified": self.verified,
            "place": to_builtins(self.place),
            "waits": waits_of(
                self.recipe,
                self.fleet,
                self.updates,
                scoring=self.player.scoring.values(),
                answering=self.player.answering.values(),
            ),
            "pid": os.getpid(),
            "host": self.place.host,
            "running_groups": len(self.work.groups),
            "scored": self.work.scored,
            "cancelled_s": round(self.work.cancelled_s, 3),
            "failures": dict(self.work.failures),
        }

    def _idle_reason(self) -> str:
        if self.fleet.oldest is None:
            return f"no weights to serve ({self.updates.course.error or 'none were announced; is a learner running?'})"
        return "no ticket was granted; is a learner running?"

    async def _weights_changed(self) -> None:
        """The family tree may have grown, or other weights are served: end dead work, tell the store what is new."""
        self.moved_at = time.monotonic()
        self.work.end_dead(self.updates.is_dead)
        if self.fleet.oldest != self._told:
            await self._beat()

    # --- evaluation -------------------------------------------------------------------------------------------------

    async def _evaluate(self, evaluation: Evaluation) -> None:
        """Claim an evaluation and run it on the engines that serve its weights, which stay as they are meanwhile."""
        async with self.updates.hold:
            if not any(host.engine.serving == evaluation.weights for host in self.fleet.usable):
                return
            if not await self._store(lambda: self.buffer.claim_evaluation(self.member, evaluation.id)):
                return
            logger.info("evaluation %s: %d held-out prompts", evaluation.id, evaluation.prompts)
            try:
                result = await evaluate(
                    evaluation,
                    prompts=self.prompts,
                    player=self.player,
                    sampler=Seats(self.fleet, may=partial(eq, evaluation.weights), wait_s=0.0),
                    sampling=self.sampling,
                    run=self.run,
                    # As many as rollouts may have in work: neither waits in an engine's queue behind all of the other.
                    at_once=self.most_groups * self.recipe.collector.group_size,
                )
            except EngineError as error:
                logger.warning("evaluation %s: %s; again once an engine serves its weights", evaluation.id, error)
                return
        numbers = partial(
            report,
            result["answers"],
            ks=powers_of_two(evaluation.samples),
            samples=evaluation.samples,
            pass_above=evaluation.pass_above,
            seed=self.recipe.run.seed,
        )
        result["report"] = await asyncio.to_thread(numbers)
        self.moved_at = time.monotonic()
        await self._store(lambda: self.buffer.report_evaluation(evaluation.id, result))

    async def _verify(self, request_id: str) -> None:
        """Say what is served, by its hash: a later beat brings a later request."""
        self.verified = {"id": request_id, "engines": await self.updates.proof()}
        await self._beat()

    # --- helpers ----------------------------------------------------------------------------------------------------

    async def _store(self, call: Callable[[], Awaitable[T]]) -> T:
        """A call to the buffer, made again while the store is away."""
        return await patiently(call, limit_s=self.limit_s)

    def _watched(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose unexpected exception ends the session rather than being lost."""
        task = asyncio.ensure_future(work)

        def look(done: asyncio.Task[None]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None and not self.wrong.done():
                self.wrong.set_exception(error)

        task.add_done_callback(look)
        return task
