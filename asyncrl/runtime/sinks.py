"""The sinks of a run, seen from the process that watches it: which there are, and one line where one does not work."""

from __future__ import annotations

import asyncio
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from asyncrl.config.errors import RecipeError
from asyncrl.config.recipe import Recipe, Telemetry, to_builtins
from asyncrl.config.secrets import masked
from asyncrl.runtime.children import Child
from asyncrl.runtime.sink_process import CLOSE_S, MARK, SAID, Request
from asyncrl.runtime.tail import JsonLines, Lines

Name = Literal["wandb", "tensorboard"]

PACKAGES: dict[Name, str] = {"wandb": "wandb", "tensorboard": "tensorboardX"}
"""Sink, which is also the name of its extra -> the module it needs."""

SINKS_S = CLOSE_S + 5.0
"""From the end of the run until a sink's process, which has a limit of its own, is killed."""


def wanted(telemetry: Telemetry) -> list[Name]:
    """The sinks that a recipe names."""
    named: dict[Name, bool] = {"wandb": telemetry.wandb is not None, "tensorboard": telemetry.tensorboard}
    return [name for name, is_wanted in named.items() if is_wanted]


def closing_s(telemetry: Telemetry) -> float:
    """What the sinks may add to the end of a run, at most."""
    return SINKS_S if wanted(telemetry) else 0.0


def check(telemetry: Telemetry) -> None:
    """Raise RecipeError, with the command that helps, if the package of a sink is not installed."""
    for sink in wanted(telemetry):
        spec = importlib.util.find_spec(PACKAGES[sink])
        if spec is None or spec.origin is None:  # no origin: a mere folder of that name, such as wandb makes
            raise RecipeError(
                f"telemetry.{sink} needs the package {PACKAGES[sink]}, which is not installed: "
                f"pip install 'asyncrl[{sink}]'"
            )


@dataclass(slots=True)
class _Watched:
    child: Child
    request: Request
    log: Lines
    told: bool = False  # that its process ended without a word


class Sinks:
    """The processes of a run's sinks. Make it before the learner starts, which writes what they read."""

    def __init__(self, recipe: Recipe, folder: Path, *, resume: bool) -> None:
        """`resume`: they get only what is written from now on."""
        offset = JsonLines(folder / "metrics.jsonl", from_end=resume).offset
        self._watched = []
        for sink in wanted(recipe.telemetry):
            log = folder / "logs" / f"{sink}.log"
            request = Request(sink, str(folder), offset, recipe.telemetry.wandb, masked(to_builtins(recipe)))
            child = Child(sink, (), log=log, module="asyncrl.runtime.sink_process")
            self._watched.append(_Watched(child, request, Lines(log, from_end=True)))

    async def start(self) -> None:
        for watched in self._watched:
            request = msgspec.json.encode(watched.request) + b"\n"
            await watched.child.start({}, stdin=request, hold=True)

    def news(self) -> list[str]:
        """Lines for the person who watches the run, each once."""
        return [f"{watched.child.name}: {line}" for watched in self._watched for line in _news_of(watched)]

    async def close(self) -> list[str]:
        """Let them catch up and end, within SINKS_S; the last news. Safe where nothing was started."""
        started = [watched.child for watched in self._watched if watched.child.started]
        for child in started:
            child.close_stdin()
        await asyncio.gather(*(child.ended(SINKS_S) for child in started))
        for child in started:
            await child.kill()
        return self.news()


def _news_of(watched: _Watched) -> list[str]:
    ended = watched.child.started and not watched.child.running  # before the log is read: it is complete then
    said = [line.decode(errors="replace") for line in watched.log.whole_lines()]
    news = [line.removeprefix(MARK) for line in said if line.startswith(MARK)]
    if ended and not watched.told and (code := watched.child.exited.result()) not in (0, SAID):
        watched.told = True
        news.append(f"its process ended with code {code}; metrics.jsonl has everything. Its log: {watched.child.log}")
    return news
