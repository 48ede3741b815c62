"""The learner's main loop: lease, train, archive, commit, publish, checkpoint.

The order of the last four is what makes a crash harmless. The archive part is there before the commit, so that every
trained ticket has one. Weights are announced after the commit, so that no token can be newer than V. A checkpoint is
written after the commit was acknowledged, so that resuming from it never repeats a batch it already contains. Whatever
lies between the last checkpoint and a crash is rewound by the next lineage and trained again, from the weights that
survived.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import cast

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.base import Buffer, Fenced
from asyncrl.config.identity import identity
from asyncrl.config.recipe import Recipe, mixed_tasks, reward_parts
from asyncrl.config.rewards import declared
from asyncrl.learners import checkpoint as checkpoints
from asyncrl.learners.arithmetic import machine, settings
from asyncrl.learners.commands import Begin
from asyncrl.learners.evaluation import Evaluations, stored_evaluations
from asyncrl.learners.lasting import LastingBuffer, LeaseGone
from asyncrl.learners.limits import limits_of
from asyncrl.learners.lost import RankLost
from asyncrl.learners.model import load_tokenizer, longest_sequence
from asyncrl.learners.notices import Notices
from asyncrl.learners.outlet import Outlet
from asyncrl.learners.parallel import ALONE, Ranks
from asyncrl.learners.passes import compute_device
from asyncrl.learners.phase import Phase, PhaseFile
from asyncrl.learners.recovery import Recovered
from asyncrl.learners.resuming import resume_from
from asyncrl.learners.saving import Saver
from asyncrl.learners.stepping import Learner, RunEnded
from asyncrl.learners.trainer import Trainer
from asyncrl.learners.watch import Watch
from asyncrl.staleness import Lineages, Weights
from asyncrl.telemetry.metrics import MetricsWriter, read_metrics
from asyncrl.weights.reach import device_of, here

log = logging.getLogger(__name__)

EVALUATION_S = 60.0
"""What the final evaluation may take beyond the transfer of the final weights."""


async def learn(
    recipe: Recipe,
    buffer: Buffer,
    *,
    run_dir: Path,
    model_path: Path,
    resume: Path | None,
    stop: asyncio.Event,
    ranks: Ranks = ALONE,
    recreate: Callable[[], Awaitable[object]] | None = None,
) -> None:
    """Train `recipe.run.max_steps` steps from the buffer's groups, as a new lineage of the run.

    resume: the folder of checkpoints to go on from, None to start from `model_path`. `stop`: set to end after the
    current step, with a checkpoint. Writes metrics.jsonl, archive/, checkpoints/, eval/ and summary.json in `run_dir`.
    `ranks`: seen from rank 0, which this is; the others run `rank.follow`. `recreate`: creates the run again in a store
    that has lost everything. An outage of the store is borne for `run.no_progress_s`.

    Raises ModelError, CheckpointError, BufferError before the new lineage is open; then Fenced (a newer learner took
    over: nothing more is written) or, once collectors are told that the run has failed, CheckpointError, LearnerError
    (no progress), TooManySkipped, EssCollapsed, BoundBroken, WeightsError. A rank that is lost, which `ranks` names, is
    no failure of the run: collectors are told nothing, and `run_dir` says that this learner has not ended, but is gone.
    """
    metrics = MetricsWriter(run_dir / "metrics.jsonl")
    lasting = LastingBuffer(
        buffer,
        Archive(run_dir / "archive"),
        limit_s=recipe.run.no_progress_s,
        stop=stop,
        recreate=recreate,
        on_recovered=partial(_write_recovered, metrics),
    )
    borne = cast(Buffer, lasting)
    evaluations = Evaluations(borne, run_dir / "eval", metrics, config=recipe.eval)
    outlet = Outlet(recipe, borne, stop=stop)
    phase = PhaseFile(run_dir)
    phase.enter(Phase.STARTING)
    begun = lost = fenced = False
    saver: Saver | None = None
    try:
        learner = await _begin(recipe, borne, run_dir, model_path, resume, metrics, outlet, evaluations, ranks, phase)
        begun = True
        saver = learner.saver
        gc.freeze()  # what is loaded by now stays: a full collection looks through it for tenths of a second
        lasting.trains(lambda: (learner.lineages.forks, learner.weights))
        outlet.start(here(device_of(compute_device(learner.trainer.model))))
        await _train(learner, stop)
    except Fenced:
        fenced = True
        raise
    except Exception as error:
        cause = await ranks.cause(error)
        lost = isinstance(cause, RankLost)
        if begun and not lost and not isinstance(cause, RunEnded):
            await _finish_with(buffer, cause)
        raise
    finally:
        if saver is not None:
            await saver.close(give_up=fenced)
        await evaluations.cancel()
        await outlet.close()
        metrics.close()
        if not lost:
            phase.enter(Phase.ENDED)


async def _train(learner: Learner, stop: asyncio.Event) -> None:
    """From the first publication to the summary."""
    recipe, buffer, evaluations = learner.recipe, learner.buffer, learner.evaluations
    await learner.publish()
    if recipe.eval.at_start and not await asyncio.to_thread(stored_evaluations, learner.run_dir / "eval"):
        await evaluations.request(learner.weights)

    ended = learner.version >= recipe.run.max_steps
    while not ended and not stop.is_set():
        lease = await learner.next_batch(stop)
        if lease is None:
            break
        try:
            ended = not lease.ordinals or await learner.step(lease)
        except LeaseGone as error:
            log.warning("%s", error)

    if not ended:
        await learner.last_checkpoint()
        await learner.summarise(stopped=True)
        return
    await learner.publish()
    due = recipe.eval.every_steps is not None and learner.version % recipe.eval.every_steps == 0
    if (recipe.eval.at_end or due) and await learner.anyone_alive():
        learner.enter(Phase.EVALUATING)
        await learner.evaluated(recipe.weights.deadline_s, stop)  # an earlier version, if a collector is still at it
        await evaluations.request(learner.weights)
    await learner.last_checkpoint()
    learner.enter(Phase.EVALUATING)
    await learner.evaluated(recipe.weights.deadline_s + EVALUATION_S, stop)
    await buffer.finish()
    await learner.summarise(stopped=False)


async def _begin(
    recipe: Recipe,
    buffer: Buffer,
    run_dir: Path,
    model_path: Path,
    resume: Path | None,
    metrics: MetricsWriter,
    outlet: Outlet,
    evaluations: Evaluations,
    ranks: Ranks,
    phase: PhaseFile,
) -> Learner:
    """Load what is trained, then open a new lineage: from here on an older learner of the run is fenced."""
    trust = recipe.model.trust_remote_code
    longest = await asyncio.to_thread(
        longest_sequence, model_path, limit=recipe.model.max_length, trust_remote_code=trust
    )
    limits = limits_of(recipe, max_length=longest)
    checkpoint, lineage = None, None
    if resume is not None:
        recovered = partial(_write_recovered, metrics)
        checkpoint, lineage = await resume_from(buffer, run_dir, resume, limits, recipe, on_recovered=recovered) or (
            None,
            None,
        )
    source = model_path if checkpoint is None else checkpoint.folder
    begin = Begin(identity(recipe), str(run_dir))
    if checkpoint is not None:
        digest = checkpoints.file_entry(checkpoint.folder / checkpoints.MANIFEST).xxh3
        begin = Begin(identity(recipe), str(run_dir), checkpoint=str(checkpoint.folder), digest=digest)
    await asyncio.to_thread(ranks.tell, begin)
    trainer = await asyncio.to_thread(Trainer.load, recipe, model_path, checkpoint, ranks, run_dir=run_dir)
    tokenizer = await asyncio.to_thread(load_tokenizer, source, trust_remote_code=trust)
    if lineage is None:
        lineage = await buffer.new_lineage(parent=None, limits=limits)
    forks = dict(checkpoint.manifest.forks) if checkpoint else {}
    parent = checkpoint.weights if checkpoint else Weights(0, 0)
    forks[lineage] = (parent.lineage, parent.version)
    metrics.write(
        {
            "event": "start",
            "time": time.time(),
            "lineage": lineage,
            "version": parent.version,
            "parent": list(parent),
            "model": str(source),
            "attention": trainer.model.config._attn_implementation,
            "device": str(compute_device(trainer.model)),
            "machine": machine(compute_device(trainer.model), ranks=ranks.size),
            "settings": settings(recipe),
        }
    )
    metrics.sync()  # a lineage whose weights collectors are about to get: its number must not be given again
    by_task = {name: declared(task.rewards) for name, task in mixed_tasks(recipe.task).items()}
    watch = Watch(declared(reward_parts(recipe.task)), by_task)
    if checkpoint is not None:
        watch.resume(await asyncio.to_thread(read_metrics, run_dir / "metrics.jsonl"), parent.version)
    learner = Learner(
        recipe=recipe,
        buffer=buffer,
        run_dir=run_dir,
        metrics=metrics,
        outlet=outlet,
        evaluations=evaluations,
        ranks=ranks,
        phase=phase,
        trainer=trainer,
        gathered=parent.version,
        lineage=lineage,
        version=parent.version,
        lineages=Lineages(forks),
        tokens_total=checkpoint.manifest.tokens if checkpoint else 0,
        accounted=await buffer.stats(),
        notices=Notices(recipe.learner, watch),
        tokenizer=tokenizer,
    )
    learner.saver = Saver(
        run_dir / "checkpoints",
        tokenizer=tokenizer,
        beside=recipe.learner.checkpoint.async_save,
        limit_s=recipe.run.no_progress_s,
        on_saved=learner.saved,
        on_failed=learner.not_saved,
        newest=parent.version if checkpoint else None,
    )
    return learner


def _write_recovered(metrics: MetricsWriter, found: Recovered) -> None:
    metrics.write({"event": "recovered", "time": time.time(), **found.event()})


async def _finish_with(buffer: Buffer, error: Exception) -> None:
    try:
        await buffer.finish(error=f"{type(error).__name__}: {error}")
    except Exception as second:  # the first error is the one that matters
        log.warning("collectors could not be told that the run failed: %s", second)
