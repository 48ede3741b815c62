"""`data`: what it takes to open a file of very many rows, and to read one of them.

Each file is opened in a process of its own, the first time and again: seconds, the process's own memory, and random
reads. A read is compared with the least there can be: bytes at a place that is known, parsed.

Control: the same file parsed into a list, whose memory grows with the rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.benchmarks.frame import Measured, Row, Say, Target

READS = 20_000
OPEN_S = 30.0  # the first time: the rows' places are found, the first 100,000 rows looked at
AGAIN_S = 2.0
LIMIT_S = 600.0
FLAT = 1.5  # x the memory of the small file
LEAST_BYTES = 16 << 20  # below it memory is what the interpreter happens to take
OF_PLAIN = 0.15  # of the speed of a bare read: rows are checked again, strictly


def measure(*, quick: bool, say: Say) -> Measured:
    """Rows: one per format and number of rows, for a first and a second process (quick: fewer rows)."""
    few, many = (600_000, 2_000_000) if quick else (1_000_000, 10_000_000)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        for form in ("jsonl", "parquet"):
            for count in (few, many):
                path = Path(folder) / f"{count}.{form}"
                write(path, count)
                for again in (False, True):
                    rows.append({"format": form, "again": again, "size": path.stat().st_size, **opened(path)})
                    say(_line(rows[-1]))
        control = []
        for count in (few // 30, few // 3):
            write(Path(folder) / f"{count}.jsonl", count)
            control.append({"format": "list", **opened(Path(folder) / f"{count}.jsonl", "--list")})
    for row in control:
        say(_line(row))
    return Measured(rows=[*rows, *control], targets=_targets(rows, control))


def write(path: Path, count: int) -> None:
    """So many rows of some 130 bytes, each with its own prompt, as JSONL or Parquet."""
    rows = (
        {"prompt": f"What is {n} plus {n * 7 % 1_000_003}, and how many are left if we take half?", "answer": f"{n}"}
        for n in range(count)
    )
    if path.suffix == ".jsonl":
        with path.open("w", buffering=1 << 20) as file:
            file.writelines(json.dumps({**row, "source": "made up", "level": 3}) + "\n" for row in rows)
        return
    schema = pa.schema({"prompt": pa.string(), "answer": pa.string()})
    with pq.ParquetWriter(path, schema) as writer:
        while some := list(islice(rows, 250_000)):
            writer.write_table(pa.Table.from_pylist(some, schema))


def opened(path: Path, *options: str) -> Row:
    """What a process of its own says of the file. What it keeps lies beside it."""
    command = [sys.executable, "-m", "asyncrl.benchmarks.data_child", str(path), str(READS), *options]
    environment = {**os.environ, "ASYNCRL_CACHE": str(path.parent / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=LIMIT_S)
    found: Row = json.loads(done.stdout)
    return found


def _targets(rows: list[Row], control: list[Row]) -> list[Target]:
    targets = []
    for form in ("jsonl", "parquet"):
        few, few_again, many, many_again = (row for row in rows if row["format"] == form)
        name = f"{form}, {many['rows']:,} rows to train"
        targets += [
            Target(f"{name}: open, of {OPEN_S:.0f} s", many["open_s"] / OPEN_S, 1.0, "lower"),
            Target(f"{name}: open again, of {AGAIN_S:.0f} s", many_again["open_s"] / AGAIN_S, 1.0, "lower"),
            Target(f"{name}: memory against {few['rows']:,}", _growth(few, many), FLAT, "lower"),
            Target(f"{name}: memory again", _growth(few_again, many_again), FLAT, "lower"),
        ]
    _, _, _, lines = (row for row in rows if row["format"] == "jsonl")
    return [
        *targets,
        Target("random reads of JSONL against bare ones", lines["plain_s"] / lines["reads_s"], OF_PLAIN, "higher"),
        Target("control: memory of a list of ten times the rows", _growth(*control), 2 * FLAT, "higher"),
    ]


def _growth(few: Row, many: Row) -> float:
    return float(max(many["bytes"], LEAST_BYTES) / max(few["bytes"], LEAST_BYTES))


def _line(row: Row) -> str:
    what = f"{row['format']}{', again' if row.get('again') else ''}: {row['rows']:,} rows"
    return (
        f"{what}: open {row['open_s']:.2f} s, {row['bytes'] / (1 << 20):.0f} MiB of its own, "
        f"{READS / row['reads_s']:,.0f} reads/s"
    )
