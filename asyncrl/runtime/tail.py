"""Reading a file that another process is writing."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any


class Lines:
    """The finished lines of a growing file, each once. `offset`: bytes that were read or passed over."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        """`from_end`: only what is written from now on (a resumed run's file has the earlier steps)."""
        self._path = path
        self.offset = path.stat().st_size if from_end and path.exists() else 0

    def whole_lines(self) -> list[bytes]:
        """What was finished since the last call; [] while the file does not exist."""
        try:
            with self._path.open("rb") as file:
                file.seek(self.offset)
                new = file.read()
        except FileNotFoundError:
            return []
        whole = new[: new.rfind(b"\n") + 1]  # the last line may be half written
        self.offset += len(whole)
        return whole.splitlines()


class JsonLines(Lines):
    """The same for a metrics.jsonl: one JSON object a line."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        super().__init__(path)
        # Not from its last byte: a torn last line is cut off by the writer that goes on (`MetricsWriter`).
        if from_end:
            self.whole_lines()

    def read(self) -> list[dict[str, Any]]:
        """The objects that were finished since the last call."""
        return [json.loads(line) for line in self.whole_lines() if line.strip()]


def last_lines(path: Path, count: int, *, offset: int = 0) -> list[str]:
    """The last `count` lines of a log that are not empty, of those from byte `offset` on; [] if there is none."""
    try:
        with path.open(errors="replace") as file:
            file.seek(offset)
            return list(deque((line.rstrip() for line in file if line.strip()), count))
    except FileNotFoundError:
        return []
