"""One process that opens a data file: `python -m asyncrl.benchmarks.data_child FILE READS [--list]`, one line of JSON.

As a task does, or, with --list, as a program does that parses all rows into a list. What it reports of memory is what
is its own (RssAnon): pages of files are the system's, which takes them back as it likes.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.recipe import DataSource
from asyncrl.data.dataset import Dataset
from asyncrl.data.rows import Columns

NEARBY = 1024  # bytes, in which a whole line lies


def own_bytes() -> int:
    """Memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def as_list(path: Path) -> Sequence[Any]:
    """All rows of a JSONL file, checked in the same way."""
    columns = Columns("prompt", "answer", None, "tools", "data")
    with path.open("rb") as lines:
        return [columns.record("row", str(n), json.loads(line)) for n, line in enumerate(lines)]


def plain_reads(path: Path, reads: int) -> float:
    """Seconds of as many reads of lines at known places all over the file, parsed."""
    file = os.open(path, os.O_RDONLY)
    try:
        chosen = random.Random(0)
        spans = []
        for _ in range(reads):
            at = chosen.randrange(os.fstat(file).st_size - NEARBY)
            before, line, _ = os.pread(file, NEARBY, at).split(b"\n", 2)
            spans.append((at + len(before) + 1, len(line)))
        began = time.perf_counter()
        for start, length in spans:
            json.loads(os.pread(file, length, start))
        return time.perf_counter() - began
    finally:
        os.close(file)


def main(path: Path, reads: int, *, in_list: bool) -> dict[str, float]:
    before = own_bytes()
    began = time.perf_counter()
    rows = as_list(path) if in_list else Dataset(DataSource(train=str(path))).train
    opened = time.perf_counter() - began
    chosen = random.Random(0)
    places = [chosen.randrange(len(rows)) for _ in range(reads)]
    for _ in range(2):  # the second time the system has the pages, as it has those of the bare reads
        began = time.perf_counter()
        for place in places:
            rows[place]
        seconds = time.perf_counter() - began
    found = {"rows": len(rows), "open_s": opened, "reads_s": seconds, "bytes": max(0, own_bytes() - before)}
    return found if path.suffix != ".jsonl" else {**found, "plain_s": plain_reads(path, reads)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), in_list="--list" in sys.argv)) + "\n")
