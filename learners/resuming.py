"""Which checkpoint a learner goes on from: the newest that is sound and that the store accepts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.base import Buffer, BufferError, Fenced
from asyncrl.buffers.limits import Limits
from asyncrl.learners.checkpoint import Checkpoint, CheckpointError, survey
from asyncrl.learners.recovery import Recovered, lineages_in, newest_known, recover
from asyncrl.staleness import Weights
from asyncrl.telemetry.metrics import read_metrics

log = logging.getLogger(__name__)


async def resume_from(
    buffer: Buffer, run_dir: Path, folder: Path, limits: Limits, *, on_recovered: Callable[[Recovered], None]
) -> tuple[Checkpoint, int] | None:
    """The newest sound checkpoint in `folder` that the buffer accepts, and the lineage that starts from it; None if the
    run ended before its first checkpoint. A store that has forgotten what led there is told first, and `on_recovered`
    hears of it. Raises CheckpointError if there are checkpoints and none will do.
    """
    refused = []
    archive = Archive(run_dir / "archive")
    started = lineages_in(await asyncio.to_thread(read_metrics, run_dir / "metrics.jsonl"))
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
            refused.append(f"{checkpoint.folder}: {error}")
    if refused or damaged:
        raise CheckpointError(
            f"no checkpoint in {folder} can be resumed from: {'; '.join((*refused, *damaged))}\n"
            "Start a new run, or move the folder away to begin this one again."
        )
    log.warning("%s holds no checkpoint: starting from the initial weights", folder)
    await recover(buffer, archive, forks=started, own=newest_known(started, Weights(0, 0)))
    return None
