"""The answers of a run's folder, page by page: what each step trained, and what each evaluation asked."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from asyncrl.buffers.archive import Archive
from asyncrl.config.yaml_text import parse
from asyncrl.learners.evaluation import stored_evaluations
from asyncrl.runtime.expected import Lookup, lookup
from asyncrl.runtime.inspection import Unreadable, decoder
from asyncrl.runtime.place import Place
from asyncrl.staleness import Weights
from asyncrl.telemetry.browser import Page
from asyncrl.telemetry.ticket import Answer, Decode, answers_of
from asyncrl.telemetry.view import Shown


def trained_pages(place: Place) -> dict[int, Page]:
    """A page for each step that led to the run's present weights, by number from 1. Raises what reading the folder's
    recipe raises; a part that cannot be read raises Unreadable when its page is looked at."""
    if place.folder is None:
        return {}
    decode, _ = decoder(place, parse((place.folder / "recipe.yaml").read_text(encoding="utf-8")))
    archive = Archive(place.folder / "archive")
    steps = [Weights(lineage, n) for lineage, first, last in archive.branch() for n in range(first, last + 1)]
    known, expected = archive.parts(), lookup(place.folder)
    return {
        step.version + 1: Page(f"step {step.version + 1}", _once(archive, step, decode, expected))
        for step in steps
        if step in known
    }


def evaluated_pages(folder: Path) -> dict[int, Page]:
    """A page for each evaluation, by version; of a version that two lineages made, the later one's. Raises
    Unreadable."""
    try:
        stored = stored_evaluations(folder / "eval")
    except ValueError as error:
        raise Unreadable(str(error)) from None
    found = {}
    for weights, document in stored.items():
        found[weights.version] = Page(f"evaluation of version {weights.version}", partial(_entries, document))
    return dict(sorted(found.items()))


def _entries(document: Mapping[str, Any]) -> list[Shown]:
    return [_evaluated(entry) for entry in document["answers"]]


def _once(archive: Archive, step: Weights, decode: Decode, expected: Lookup) -> Callable[[], Sequence[Shown]]:
    """The answers of a step, read when they are first asked for."""

    @cache
    def load() -> Sequence[Shown]:
        try:
            groups = archive.groups(step)
        except (FileNotFoundError, ValueError) as error:
            number = step.version + 1
            raise Unreadable(f"what step {number} trained cannot be read: {error}; --step shows another one") from None
        return [shown for batch in groups for shown in _trained(batch, decode, expected)]

    return load


def _trained(batch: pa.RecordBatch, decode: Decode, expected: Lookup) -> list[Shown]:
    answers, rows = answers_of(batch, decode), batch.select(["ticket", "row_id", "task", "info"]).to_pylist()
    return [_shown(answer, row, expected) for answer, row in zip(answers, rows, strict=True)]


def _shown(answer: Answer, row: Mapping[str, Any], expected: Lookup) -> Shown:
    info = json.loads(row["info"])
    answer_expected, unknown = expected(row["ticket"], row["row_id"])
    return Shown(
        row_id=row["row_id"],
        member=f"member {answer.name}",
        prompt=answer.prompt,
        answer="".join(piece.text for piece in answer.pieces),
        reward=None if math.isnan(answer.reward) else answer.reward,
        parts=answer.parts,
        label=answer.failure,
        detail=str(info.get("detail") or info.get("error") or ""),
        finish_reason=answer.finish,
        tokens=sum(answer.sampled.values()),
        expected=answer_expected,
        unknown=unknown,
        versions={f"{weights.lineage}/{weights.version}": n for weights, n in answer.sampled.items()},
        task=row["task"],
    )


def _evaluated(entry: Mapping[str, Any]) -> Shown:
    """An entry of an evaluation; older ones lack some keys, and had one key for both kinds of label."""
    return Shown(
        row_id=entry["row_id"],
        member=f"sample {entry.get('sample', 0)}",
        prompt=entry["prompt"],
        answer=entry["answer"],
        reward=entry["reward"],
        parts=entry.get("parts", {}),
        label=entry["failure"] or entry.get("wrong", ""),
        detail=entry.get("detail", ""),
        finish_reason=entry["finish_reason"],
        tokens=entry.get("tokens"),
        expected=entry["expected"],
        task=entry.get("task", ""),
    )
