"""Which checkpoint a learner goes on from: the newest that is sound and that the store accepts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.base import Buffer, BufferError, Fenced
from asyncrl.buffers.limits import Limits
from asyncrl.config.recipe import Recipe
from asyncrl.config.resumable import MAY_CHANGE, refused
from asyncrl.learners.arithmetic import settings
from asyncrl.learners.checkpoint import Checkpoint, CheckpointError, survey
from asyncrl.learners.recovery import Recovered, lineages_in, newest_known, recover
from asyncrl.staleness import Weights
from asyncrl.telemetry.metrics import Record, read_metrics

log = logging.getLogger(__name__)


async def resume_from(
    buffer: Buffer,
    run_dir: Path,
    folder: Path,
    limits: Limits,
    recipe: Recipe,
    *,
    on_recovered: Callable[[Recovered], None],
) -> tuple[Checkpoint, int] | None:
    """The newest sound checkpoint in `folder` that the buffer accepts, and the lineage that starts from it; None if the
    run ended before its first checkpoint. A store that has forgotten what led there is told first, and `on_recovered`
    hears of it. Raises CheckpointError if there are checkpoints and none will do, or if what a step follows from is not
    in `recipe` what it was.
    """
    reasons = []
    archive = Archive(run_dir / "archive")
    records = await asyncio.to_thread(read_metrics, run_dir / "metrics.jsonl")
    check_settings(records, recipe, run_dir / "recipe.yaml")
    started = lineages_in(records)
    sound, damaged = await asyncio.to_thread(survey, folder)
    for checkpoint in sound:
        forks = {**started, **checkpoint.manifest.forks}
        try:
            if found := await recover(buffer, archive, forks=forks, own=newest_known(forks, checkpoint.weights)):
                on_recovered(found)
            return checkpoint, await buffer.new_lineage(parent=checkpoint.weights, limits=limits)
        except Fenced:
            raise
        except BufferError as error:
            log.warning("not resuming from %s: %s", checkpoint.folder, error)
            reasons.append(f"{checkpoint.folder}: {error}")
    if reasons or damaged:
        raise CheckpointError(
            f"no checkpoint in {folder} can be resumed from: {'; '.join((*reasons, *damaged))}\n"
            "Start a new run, or move the folder away to begin this one again."
        )
    log.warning("%s holds no checkpoint: starting from the initial weights", folder)
    await recover(buffer, archive, forks=started, own=newest_known(started, Weights(0, 0)))
    return None


def check_settings(records: Sequence[Record], recipe: Recipe, path: Path) -> None:
    """Raise CheckpointError where a key, out of those that a step's bits follow from, has another value than the last
    learner had, and must not: the recipe that lies in the run's folder was changed by hand."""
    starts = [record for record in records if record.get("event") == "start"]
    then = starts[-1].get("settings", {}) if starts else {}
    now = {key: value for key, value in settings(recipe).items() if key in then}  # an older asyncrl had fewer
    for key, kept, given in refused(then, now, MAY_CHANGE):
        raise CheckpointError(
            f"{path} has {key}: {given}, but the run was trained with {kept}, which a resumed run keeps.\n"
            "Put that back; or begin another run, with a checkpoint of this one as model.path."
        )
