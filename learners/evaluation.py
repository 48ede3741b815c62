"""Asking collectors for evaluations, and keeping what they answer."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.buffers.base import Buffer
from asyncrl.buffers.concurrency import end_all
from asyncrl.config.evaluation import REWARD, Eval, sampling_changes
from asyncrl.learners.watch import Evaluated
from asyncrl.staleness import Weights
from asyncrl.telemetry.documents import write_document
from asyncrl.telemetry.metrics import MetricsWriter

log = logging.getLogger(__name__)

ROUND_S = 5.0
"""One wait for a result, which ends it earlier; without a limit, a lost wake would be for ever."""

_FILE = re.compile(r"eval-(\d+)-(\d+)\.json")


class Evaluations:
    """Requests, answered in the background while training goes on. Results lie in `folder`/<id>.json.

    The store holds one request. One that a collector is at when the next comes is still answered; after that one, too,
    has come, nobody is: its weights are not served any more.
    """

    def __init__(self, buffer: Buffer, folder: Path, metrics: MetricsWriter, *, config: Eval) -> None:
        self._buffer = buffer
        self._folder = folder
        self._metrics = metrics
        self._config = config
        self._results = results_of(folder)
        self._waiting: asyncio.Task[None] | None = None
        self._asked = Weights(0, 0)  # what `_waiting` waits for the evaluation of
        self._before: asyncio.Task[None] | None = None  # the request before, still open when `_waiting` was made

    async def request(self, weights: Weights) -> None:
        """Ask for an evaluation of `weights`. It takes the place of a request that is still open, which may be answered
        until the next call, and then counts as skipped."""
        await self._skip(self._before)
        self._before = self._waiting
        name = _name(weights)
        request = {
            "id": name,
            "weights": list(weights),
            "prompts": self._config.prompts,
            "samples": self._config.n or 1,
            "sampling": sampling_changes(self._config.sampling),
            "pass_above": self._config.pass_above,
            "difficulty": self._config.difficulty,
        }
        await self._buffer.request_evaluation(request)
        self._waiting, self._asked = asyncio.create_task(self._receive(name, weights), name=name), weights

    @property
    def results(self) -> Sequence[Evaluated]:
        """What the evaluations of this run folder came to, by version; of a version that two lineages made, the later
        one's."""
        by_version = {weights.version: result for weights, result in sorted(self._results.items())}
        return [by_version[version] for version in sorted(by_version)]

    @property
    def open(self) -> Weights | None:
        """Of which weights the newest request is, until it is answered."""
        return None if self._waiting is None or self._waiting.done() else self._asked

    async def wait(self, limit_s: float, stop: asyncio.Event) -> None:
        """Until the newest request is answered, `stop` is set, or `limit_s` seconds are over."""
        if self._waiting is None:
            return
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({self._waiting, stopped}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        if self._waiting.done():
            self._waiting.result()
            self._waiting = None

    async def cancel(self) -> None:
        """Stop waiting for open requests."""
        await self._skip(self._before)
        await self._skip(self._waiting)
        self._before = self._waiting = None

    async def _skip(self, request: asyncio.Task[None] | None) -> None:
        if request is None:
            return
        if not request.done():
            log.warning("%s is skipped: no collector has answered it", request.get_name())
        await end_all([request])

    async def _receive(self, name: str, weights: Weights) -> None:
        while (result := await self._buffer.evaluation(name, wait_s=ROUND_S)) is None:
            pass
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{name}.json"
        write_document(path, result)
        if (found := Evaluated.of(weights.version, result["answers"])) is not None:
            self._results[weights] = found
        event = {
            "event": "eval",
            "time": time.time(),
            "lineage": weights.lineage,
            "version": weights.version,
            "id": name,
        }
        facts = {key: result.get(key) for key in ("success", "n", "unscored")}
        report = result.get("report", {})
        numbers = report.get("metrics", {})
        values = {name: number["value"] for name, number in numbers.items() if number["value"] is not None}
        facts["prompts"] = report.get("prompts", result.get("n"))
        self._metrics.write({**event, **facts, "metrics": values, "path": str(path)})


def result_of(folder: Path, weights: Weights, *, metric: str) -> float | None:
    """What the evaluation of exactly these weights came to, by `eval.metric`; None if there is none, or it could not be
    measured."""
    try:
        result = json.loads((folder / f"{_name(weights)}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    metrics = result.get("report", {}).get("metrics", {})
    value: float | None = result["success"] if metric == REWARD else metrics.get(metric, {}).get("value")
    return value


def stored_evaluations(folder: Path) -> dict[Weights, Mapping[str, Any]]:
    """Every evaluation of a run folder, by the weights that were evaluated, oldest first. Raises ValueError that names
    the file of a damaged one."""
    found = {}
    for path in folder.glob("eval-*.json"):
        if match := _FILE.fullmatch(path.name):
            try:
                found[Weights(int(match[1]), int(match[2]))] = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ValueError(f"{path} is damaged, move it away: {error}") from None
    return dict(sorted(found.items()))


def results_of(folder: Path) -> dict[Weights, Evaluated]:
    """What each evaluation of a run folder came to; without those in which nothing was scored."""
    stored = stored_evaluations(folder)
    found = {weights: Evaluated.of(weights.version, document["answers"]) for weights, document in stored.items()}
    return {weights: result for weights, result in found.items() if result is not None}


def _name(weights: Weights) -> str:
    return f"eval-{weights.lineage}-{weights.version}"
