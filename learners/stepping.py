"""A learner between two steps, and what a step is: lease, train, archive, commit, publish, checkpoint (`service.py`
says why in that order)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.base import Buffer, Lease, Stats
from asyncrl.buffers.blocked import IN_MESSAGE, blocked_table
from asyncrl.buffers.store import StoreAway
from asyncrl.config.recipe import Recipe, mixed_tasks, reward_parts
from asyncrl.config.rewards import declared, violations
from asyncrl.learners import checkpoint as checkpoints
from asyncrl.learners.batch import check_lineages, check_once
from asyncrl.learners.commands import Gather, Train
from asyncrl.learners.costs import empty_fills, step_costs, use_metrics, weights_costs
from asyncrl.learners.damage import sound_groups
from asyncrl.learners.diagnostics import step_metrics, task_metrics
from asyncrl.learners.evaluation import Evaluations, result_of
from asyncrl.learners.gathering import merged
from asyncrl.learners.ledger import move_settled
from asyncrl.learners.lora import has_adapter, in_dtype, served_weights
from asyncrl.learners.notices import Notices
from asyncrl.learners.optimize import Updates
from asyncrl.learners.outlet import Outlet
from asyncrl.learners.parallel import Ranks, Sharded
from asyncrl.learners.phase import Phase, PhaseFile
from asyncrl.learners.samples import samples
from asyncrl.learners.saving import Failed, Saved, Saver
from asyncrl.learners.snapshot import Keep, Snapshot, state_of
from asyncrl.learners.summary import summarise
from asyncrl.learners.trainer import Trainer
from asyncrl.schema import span_weights
from asyncrl.staleness import Lineages, Weights
from asyncrl.telemetry.documents import write_document
from asyncrl.telemetry.metrics import MetricsWriter
from asyncrl.weights.adapter import ServedWeights
from asyncrl.weights.manifest import Pieces

log = logging.getLogger(__name__)

ROUND_S = 2.0
"""One wait for a batch, which ends it earlier. Between rounds the learner looks at `stop` and at the clock."""


class LearnerError(RuntimeError):
    """The learner cannot go on; says what it waited for or what it lacks."""


class RunEnded(LearnerError):
    """A collector has found that the run is not worth going on with, and has told everybody; its own words."""


@dataclass(slots=True)
class Learner:
    """A learner between two steps: weights of (lineage, version), trained and committed."""

    recipe: Recipe
    buffer: Buffer
    run_dir: Path
    metrics: MetricsWriter
    outlet: Outlet
    evaluations: Evaluations
    ranks: Ranks
    phase: PhaseFile
    trainer: Trainer
    gathered: int  # the version of `trainer.whole`
    lineage: int
    version: int  # V
    lineages: Lineages
    tokens_total: int  # trained since the beginning of the run
    accounted: Stats  # what was lost until then is in the metrics
    notices: Notices
    tokenizer: Any  # of transformers
    saver: Saver = field(init=False)
    published: int | None = None
    published_bytes: int = 0
    consumed: list[tuple[int, int]] = field(default_factory=list)  # (lineage, step) since the newest checkpoint
    started: float = field(default_factory=time.monotonic)
    last_step: float = field(default_factory=time.monotonic)
    waited_for: str = ""
    samples: Sequence[Mapping[str, Any]] = ()  # of the last step, to be shown

    @property
    def weights(self) -> Weights:
        return Weights(self.lineage, self.version)

    def enter(self, phase: Phase) -> None:
        """Say what the learner does from now on, for the step it is at."""
        self.phase.enter(phase, step=self.version + 1)

    async def anyone_alive(self) -> bool:
        """Whether a collector is left that could run the final evaluation; says so if not."""
        alive = any(member.alive for member in (await self.buffer.stats()).members)
        if not alive:
            log.warning("no final evaluation: no collector is left to run it")
        return alive

    async def evaluated(self, limit_s: float, stop: asyncio.Event) -> None:
        """Wait for the newest evaluation that was asked for, as long as it can still be made: of the present weights,
        or of such as a collector serves. At most `limit_s` seconds; their end is no error, the training is paid for."""
        deadline = time.monotonic() + limit_s
        while (asked := self.evaluations.open) is not None and not stop.is_set():
            if asked != self.weights and not await self._is_served(asked):
                return
            if time.monotonic() > deadline:
                log.warning("no collector evaluated version %d within %.0f s", asked.version, limit_s)
                return
            await self.evaluations.wait(ROUND_S, stop)

    async def _is_served(self, weights: Weights) -> bool:
        members = (await self.buffer.stats()).members
        return any(member.alive and member.serving == weights for member in members)

    async def next_batch(self, stop: asyncio.Event) -> Lease | None:
        """The batch of the next step, however long it takes; None when `stop` is set. Raises LearnerError when no step
        was made for `run.no_progress_s`, with the table of everyone who waits, and RunEnded."""
        self.waited_for = ""
        self.enter(Phase.LEASING)
        while not stop.is_set():
            self.ranks.check()
            self.outlet.check()
            self.saver.check()
            try:
                answer = await self.buffer.lease(self.lineage, self.version, wait_s=ROUND_S)
            except StoreAway:
                if stop.is_set():  # nobody waits for it any longer, and the checkpoint does not need it
                    return None
                raise
            if isinstance(answer, Lease):
                return answer
            if answer.reason != self.waited_for:
                self.waited_for = answer.reason
                log.info("step %d waits: %s", self.version + 1, answer.reason)
            await self._check_ended()
            await self._check_fills()
            idle = time.monotonic() - self.last_step
            if idle > self.recipe.run.no_progress_s:
                stats = await self.buffer.stats()
                stall = f"no step for {idle:.0f} s (run.no_progress_s); step {self.version + 1} waits: {answer.reason}"
                raise LearnerError("\n".join([stall, *blocked_table(stats, self.buffer.limits, most=IN_MESSAGE)]))
        return None

    async def _check_ended(self) -> None:
        """Raises RunEnded if a collector has ended the run, once what was trained is saved."""
        if error := (await self.buffer.stats()).error:
            await self.last_checkpoint()
            raise RunEnded(error)

    async def _check_fills(self) -> None:
        """Raises LearnerError, with advice, when for too long every group was left out."""
        buffer = self.recipe.buffer
        if buffer.dynamic_sampling:
            limit = buffer.max_empty_fills * self.recipe.learner.groups_per_step
            if hopeless := empty_fills(self.accounted, await self.buffer.stats(), limit=limit):
                raise LearnerError(hopeless)

    async def step(self, lease: Lease) -> bool:
        """Train a batch and everything that follows from it; whether it was the run's last. A batch with damaged groups
        is not trained (`sound_groups`)."""
        leased_at = time.monotonic()
        wait_s = leased_at - self.last_step
        self.enter(Phase.TRAINING)
        if (groups := await sound_groups(self.buffer, lease)) is None:
            return False
        record, updates = await asyncio.to_thread(self._compute, lease, groups)
        train_s = time.monotonic() - leased_at
        commit = await self.buffer.commit(self.lineage, lease.step, skipped=bool(updates.skipped))
        self.version = commit.version
        self.consumed.append((self.lineage, lease.step))
        self.tokens_total += record["tokens"]

        ended = commit.ended or self.version >= self.recipe.run.max_steps
        publish_s = 0.0
        stats = await self.buffer.stats()
        if not ended and (every := self.recipe.eval.every_steps) and self.version % every == 0:
            # Before it is published: a collector that gets it then knows that it is to evaluate it first.
            await self.evaluations.request(self.weights)
        if ended or self.version % self.recipe.weights.publish_every == 0:
            publish_s = await self.publish()
        now = time.monotonic()
        step_s, self.last_step = now - self.last_step, now
        times = {"step_s": step_s, "wait_s": wait_s, "train_s": train_s, "publish_s": publish_s}
        self._write_metrics({**record, **times}, stats)
        self._write_notices(record, updates)
        if self.version % self.recipe.learner.checkpoint.every_steps == 0:
            await self.checkpoint()
            self.last_step = time.monotonic()
        if updates.skipped:
            log.warning("step %d changed nothing: %s", self.version, updates.skipped)
        elif left_out := [update.skipped for update in updates.each if update.skipped]:
            log.warning(
                "step %d made %d of its %d updates: %s",
                self.version,
                len(updates.applied),
                len(updates.each),
                left_out[-1],
            )
        self.trainer.optimizer.check_progress(updates)
        return ended

    def _compute(self, lease: Lease, batches: list[pa.RecordBatch]) -> tuple[dict[str, Any], Updates]:
        """From groups to changed weights and an archive part; runs in a thread, so that the loop lives."""
        check_once(lease.ordinals)
        for groups in batches:
            check_lineages(span_weights(groups), lineages=self.lineages, current=self.lineage)
        step = self.trainer.prepare(batches, version=lease.step)
        self.ranks.tell(Train(lease=lease, shares=step.shares))
        seen, updates = self.trainer.train(step)
        Archive(self.run_dir / "archive").write(self.lineage, lease.step, batches)
        shown = self.recipe.telemetry.print_completions
        if shown is not None and (lease.step + 1) % shown.every_steps == 0:
            self.samples = samples(step.packed, shown, self.tokenizer.decode)
        record = {
            **step_metrics(
                step.packed,
                step.batch,
                step.worth,
                seen,
                first=step.first,
                update=self.recipe.weights.update,
                violations=violations(declared(reward_parts(self.recipe.task))),
            ),
            **task_metrics(step.packed, mixed_tasks(self.recipe.task)),
            "ranks/idle_passes": seen.idle_passes,
            "ranks/imbalance": step.imbalance,
            "proximal/bytes": 0 if self.trainer.history is None else self.trainer.history.nbytes,
            **use_metrics(lease),
            "skipped": bool(updates.skipped),
            "updates": len(updates.applied),
            "updates_skipped": len(updates.each) - len(updates.applied),
            "grad_norm": updates.grad_norm,
            "learning_rate": updates.learning_rate,
            "tokens_per_microbatch": self.trainer.budget.tokens,
        }
        return record, updates

    async def publish(self) -> float:
        """Make the current weights available to collectors; seconds it took. Nothing happens if they are already."""
        if self.published == self.version:
            return 0.0
        self.enter(Phase.PUBLISHING)
        started = time.monotonic()
        served = served_weights(self.trainer.whole, self.recipe.model.dtype)
        fork = Weights(*self.lineages.forks[self.lineage])
        if self.recipe.weights.lora == "adapter":
            await asyncio.to_thread(self._gather)
            factors = served.factors.items()
            image = await self.outlet.publish(self.weights, factors, tied=served.tied, fork=fork, sums=served)
        else:
            image = await self.outlet.publish(self.weights, self._source(served), tied=served.tied, fork=fork)
        self.published = self.version
        self.published_bytes = image.manifest.nbytes
        return time.monotonic() - started

    def _source(self, served: ServedWeights) -> Iterator[tuple[str, torch.Tensor | Pieces]]:
        """What is published, one tensor at a time, in the type that engines compute in. Several ranks give what they
        have trained in pieces, adapters whole: the sum that is served needs both factors."""
        dtype = self.recipe.model.dtype
        if isinstance(self.ranks, Sharded) and not has_adapter(self.trainer.model):
            self.ranks.tell(Gather("served"))
            yield from merged(served, self.ranks.stream(self.trainer.model, getattr(torch, dtype)), dtype)
        else:
            self._gather()
            yield from in_dtype(served, dtype)

    async def checkpoint(self) -> None:
        """Have the current version saved. Its commit was acknowledged before."""
        self.enter(Phase.CHECKPOINTING)
        await self.saver.save(self.version, self._take)

    async def last_checkpoint(self) -> None:
        """The same, and wait until it is. Raises CheckpointError if it cannot be saved."""
        self.enter(Phase.CHECKPOINTING)
        await self.saver.ensure(self.version, self._take)

    def _take(self, keep: Keep) -> Snapshot:
        self._gather()
        self.ranks.tell(Gather("optimizer"))
        optimizer, rng = self.trainer.resumable(keep)
        return Snapshot(
            weights=self.weights,
            model=self.trainer.whole,
            state=state_of(self.trainer.whole, keep),
            optimizer=optimizer,
            rng=rng,
            forks=dict(self.lineages.forks),
            trained=list(self.consumed),
            tokens=self.tokens_total,
            start=self.trainer.start,
        )

    async def saved(self, saved: Saved) -> None:
        """A checkpoint is on the disk: what it makes superfluous goes, here and in the store. Training may have gone on
        meanwhile; all this is about the snapshot's version."""
        config, weights = self.recipe.learner.checkpoint, saved.snapshot.weights
        kept = await asyncio.to_thread(
            checkpoints.prune,
            saved.path.parent,
            lineages=self.lineages,
            current=self.lineage,
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            keep_every=config.keep_every,
            success=partial(result_of, self.run_dir / "eval", metric=self.recipe.eval.metric),
        )
        oldest = kept.newest[-1]
        # After the older ones are gone: what only they could bring back is then settled.
        await self.buffer.checkpointed(self.lineage, weights.version, oldest=oldest.version)
        self.consumed = self.consumed[len(saved.snapshot.trained) :]
        ledger = Archive(self.run_dir / "archive").ledger
        try:
            await move_settled(self.buffer, ledger, lineage=self.lineage, covered=oldest)
        except OSError as error:  # they stay in the store, and the next checkpoint moves them
            self._warn_of_disk(f"rows of the ledger cannot be written to {ledger.folder}: {error}")
        event = {"event": "checkpoint", "time": time.time(), "lineage": weights.lineage, "version": weights.version}
        times = {"checkpoint/stall_s": round(saved.stall_s, 4), "checkpoint/save_s": round(saved.save_s, 4)}
        self.metrics.write({**event, "path": str(saved.path), **times})

    def not_saved(self, failed: Failed) -> None:
        """A checkpoint could not be written: those before it stay, and the next one that is due tries again."""
        self._warn_of_disk(str(failed))

    def _warn_of_disk(self, text: str) -> None:
        log.warning("step %d: %s", self.version, text)
        event = {"event": "warning", "time": time.time(), "lineage": self.lineage, "version": self.version}
        self.metrics.write({**event, "about": "checkpoint", "text": text})

    def _gather(self) -> None:
        """Bring `trainer.whole` to the current version."""
        if self.gathered != self.version:
            self.ranks.tell(Gather("weights"))
            self.ranks.gather(self.trainer.model, self.trainer.whole)
            self.gathered = self.version

    def _write_metrics(self, record: dict[str, Any], stats: Stats) -> None:
        groups = {state.value: count for state, count in stats.states.items()}
        self.metrics.write(
            {
                "step": self.version,
                "version": self.version,
                "lineage": self.lineage,
                "time": time.time(),
                **record,
                "tokens_total": self.tokens_total,
                "tokens_per_s": record["tokens"] / record["step_s"],
                "buffer": groups,
                "buffer_bytes": stats.bytes_held + stats.bytes_reserved + stats.bytes_kept,
                **step_costs(self.accounted, stats),
                "weights/publish_s": record["publish_s"],
                "weights/bytes": self.published_bytes,
                "weights/sent": self.outlet.measured(),
                "weights/late": {one.member: one.phase for one in self.outlet.take_late()},
                **weights_costs(self.accounted, stats),
                "collectors": {m.name: m.serving.version if m.serving else None for m in stats.members if m.alive},
                "checkpoint/stall_s": self.saver.take_stalled(),
                "waiting": self.waited_for,
            }
        )
        self.accounted = stats

    def _write_notices(self, record: dict[str, Any], updates: Updates) -> None:
        record = {**record, "step": self.version}
        for event in self.notices.of(record, updates, self.trainer.optimizer, self.evaluations.results):
            self.metrics.write({"time": time.time(), "lineage": self.lineage, "version": self.version, **event})
            if event["event"] == "warning":
                log.warning("step %d: %s", self.version, event["text"])
        if self.samples:
            about = {"time": time.time(), "lineage": self.lineage, "version": self.version}
            self.metrics.write({"event": "samples", **about, "samples": self.samples})
            self.samples = ()

    async def summarise(self, *, stopped: bool) -> None:
        """Write summary.json and the event that ends this learner's part of metrics.jsonl."""
        seconds = time.monotonic() - self.started
        stats = await self.buffer.stats()
        summary = summarise(
            self.run_dir,
            weights=self.weights,
            lineages=self.lineages,
            seconds=seconds,
            stats=stats,
            stopped=stopped,
        )
        write_document(self.run_dir / "summary.json", summary)
        self.metrics.write({"event": "end", "time": time.time(), "version": self.version, "stopped": stopped})
