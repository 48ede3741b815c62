"""metrics.jsonl: one JSON object a line, in the order things happened. `docs/metrics.md` says what each name means.

Strict JSON, so that any tool reads it: JSON has no NaN and no infinity, which become null and are counted in the same
object as `nonfinite_values`. (In the trajectory record NaN stays NaN; this file is for people and plots.)
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class MetricsWriter:
    """Appends records; each is in the file, whole, when `write` returns.

    Opening an existing file goes on after its last whole line: a process that was killed while it wrote leaves a torn
    line, which is cut off, so that the next record does not become part of it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._fd, _whole_lines(self._fd))

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object. Values: JSON's own types, NumPy and torch scalars, mappings and sequences of these.

        Raises TypeError, naming the key, for anything else.
        """
        nonfinite: list[str] = []
        cleaned = {str(key): _clean(value, str(key), nonfinite) for key, value in record.items()}
        if nonfinite:
            cleaned["nonfinite_values"] = len(nonfinite)
        line = json.dumps(cleaned, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        while line:  # a signal may cut a write short
            line = line[os.write(self._fd, line) :]

    def sync(self) -> None:
        """What was written survives a power cut as well."""
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def read_metrics(path: Path) -> list[Record]:
    """All records, steps and events, in order. Safe while the run goes on: a torn last line is left out.

    Raises ValueError, naming file and line, if an earlier line is not a JSON object.
    """
    records: list[Record] = []
    *lines, _torn = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: a JSON object was expected, found {line[:40]!r}")
        records.append(record)
    return records


def surviving_steps(records: Iterable[Record]) -> list[Record]:
    """The step records that lead to the present weights, by step.

    A run that resumed from a checkpoint did some steps again; what a later line did again replaces the earlier line and
    all that followed from it.

    >>> surviving_steps([{"step": 1}, {"step": 2}, {"event": "start"}, {"step": 2, "lineage": 2}])
    [{'step': 1}, {'step': 2, 'lineage': 2}]
    """
    steps: list[Record] = []
    for record in records:
        if "event" in record:
            continue
        while steps and steps[-1]["step"] >= record["step"]:
            steps.pop()
        steps.append(record)
    return steps


def _clean(value: Any, key: str, nonfinite: list[str]) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        nonfinite.append(key)
        return None
    if isinstance(value, Mapping):
        return {str(inner): _clean(item, f"{key}.{inner}", nonfinite) for inner, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item, f"{key}[{index}]", nonfinite) for index, item in enumerate(value)]
    if getattr(value, "ndim", None) == 0:  # a NumPy or torch scalar, without importing either
        return _clean(value.item(), key, nonfinite)
    raise TypeError(
        f"metric {key} is a {type(value).__name__}: only numbers, strings, lists and mappings can be written"
    )


def _whole_lines(fd: int) -> int:
    """How many bytes the whole lines of the file take, reading backwards from its end."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - 4096)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
