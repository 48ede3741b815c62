"""What the process of `asyncrl sft` does: prepare, train until done or told to stop."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from asyncrl.config.sft import SftRecipe
from asyncrl.data.conversations import Split, read_split
from asyncrl.data.errors import DataError
from asyncrl.runtime import models
from asyncrl.runtime.processes import RunFailed
from asyncrl.tasks.base import TaskError
from asyncrl.telemetry.sft_console import SftConsole

log = logging.getLogger(__name__)


def check(recipe: SftRecipe) -> Split:
    """Everything a person can get wrong that is found without torch. Raises DataError, ModelError,
    BuiltinModelError; returns the rows."""
    split = read_split(recipe.data)
    models.check(recipe)
    return split


async def train(recipe: SftRecipe, split: Split, *, folder: Path, resume: bool, stop: asyncio.Event) -> None:
    """Train into `folder`, from the newest checkpoint in it if `resume`; `stop` ends it after the step at hand, with a
    checkpoint. Raises what `check` raises, TaskError and SftError before the work, RunFailed after."""
    model_path = await asyncio.to_thread(models.resolve, recipe)
    import torch
    from transformers.utils import logging as transformers_logging

    from asyncrl.learners.model import ModelError
    from asyncrl.learners.sft_service import SftError, finetune

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # a bar a checkpoint says nothing
    if models.is_small(model_path):
        torch.set_num_threads(1)
    try:
        await asyncio.to_thread(
            finetune,
            recipe,
            split,
            run_dir=folder,
            model_path=model_path,
            resume=resume,
            stop=stop.is_set,
            report=SftConsole(sys.stdout).on_record,
        )
    except (DataError, ModelError, SftError, TaskError):
        raise
    except Exception as error:
        log.exception("the training failed")
        raise RunFailed(f"the training failed: {type(error).__name__}: {error}") from error
