"""Weights & Biases: online where that works, else recorded in the run folder's wandb/ to be uploaded later."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import wandb

from asyncrl.config.recipe import Wandb
from asyncrl.telemetry.sinks.base import Point

REACH_S = 30
"""For the server to answer at the start; without a network the run is recorded offline after it."""


class WandbSink:
    """One W&B run per run folder, also after --resume. Implements Sink."""

    def __init__(self, config: Wandb, *, folder: Path, recipe: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """`folder`: the run's. `recipe`: becomes the W&B run's config. `say`: hears one line if it is offline. Raises
        what wandb raises where not even a local record can be made."""
        arguments: dict[str, Any] = {
            "project": config.project,
            "entity": config.entity,
            "name": folder.name,
            "id": _run_id(folder / "wandb-run-id"),
            "dir": str(folder),
            "config": dict(recipe),
            "settings": wandb.Settings(init_timeout=REACH_S, console="off", silent=True),
        }
        reason = "telemetry.wandb.mode is offline"
        if config.mode == "online":
            try:
                # No mode: WANDB_MODE of the environment counts.
                self._run = wandb.init(**arguments, resume="allow")
                reason = "WANDB_MODE is not online" if self._run.offline else ""
            except wandb.Error as error:  # no key, a key that is refused, no network
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                wandb.teardown()  # of what still tries: it holds the id
                self._run = wandb.init(**arguments, mode="offline")
        else:
            self._run = wandb.init(**arguments, mode="offline")
        if reason:
            say(f"recording offline ({reason}); to upload later: wandb sync {Path(self._run.dir).parent}")
        # Axes of their own instead of wandb's step counter, which refuses what comes late: an evaluation of version 0
        # is done after step 3, and a resumed run makes steps again.
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("eval/*", step_metric="eval/version")

    def log(self, point: Point) -> None:
        self._run.log(point.values)

    def close(self) -> None:
        self._run.finish()


def _run_id(file: Path) -> str:
    """The W&B id of this run, made at its first start: a folder's name is not unique among all machines."""
    known = file.read_text().strip() if file.exists() else ""
    if not known:  # also where the process was killed before it had written it
        known = secrets.token_hex(6)
        file.write_text(f"{known}\n")
    return known
