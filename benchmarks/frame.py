"""What every benchmark has in common: rows, targets, where it ran, how it is written down.

A target that is not met is reported as not met; its number is never changed to make it pass. Each benchmark has at
least one *control*: the same measurement with the thing it measures removed, which must come out on the other side.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import psutil

from asyncrl.benchmarks import BENCHMARKS
from asyncrl.runtime.folder import versions

Row = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Target:
    """One number and what it should be. `value` None: it could not be measured, so the target is not met."""

    name: str
    value: float | None
    target: float
    better: Literal["higher", "lower"]

    @property
    def met(self) -> bool:
        """At least the target where higher is better, at most it where lower is.

        >>> Target("share", 0.9, 0.9, "higher").met, Target("seconds", 91.0, 90.0, "lower").met
        (True, False)
        """
        if self.value is None:
            return False
        return self.value >= self.target if self.better == "higher" else self.value <= self.target


@dataclass(frozen=True, slots=True)
class Measured:
    """What a benchmark's `measure` returns. Rows are flat: names to numbers and strings."""

    rows: Sequence[Row]
    targets: Sequence[Target]


@dataclass(frozen=True, slots=True)
class Result:
    """A finished benchmark, with all that is needed to compare it with another one."""

    name: str
    machine: dict[str, Any]
    versions: dict[str, Any]
    command: str
    rows: Sequence[Row]
    targets: Sequence[Target]

    @property
    def missed(self) -> list[Target]:
        return [target for target in self.targets if not target.met]

    def document(self) -> dict[str, Any]:
        """As written to JSON; flat rows of numbers and strings, none of them NaN or infinite."""
        return {
            "name": self.name,
            "machine": self.machine,
            "versions": self.versions,
            "command": self.command,
            "rows": list(self.rows),
            "targets": [{**asdict(target), "met": target.met} for target in self.targets],
        }


def options_of(name: str) -> set[str]:
    """What the benchmark `name` can be asked for beyond what each can be."""
    return set(inspect.signature(importlib.import_module(BENCHMARKS[name][0]).measure).parameters) - {"quick", "say"}


def run(name: str, *, quick: bool, command: str, say: Say, **options: Any) -> Result:
    """Measure the benchmark `name` of BENCHMARKS. quick: fewer and smaller rows, minutes at most. command: what the
    person typed, for the record. say: called with a line whenever a row is done. options: out of `options_of`."""
    measured: Measured = importlib.import_module(BENCHMARKS[name][0]).measure(quick=quick, say=say, **options)
    return Result(
        name=name,
        machine=machine(),
        versions=versions(),
        command=command,
        rows=measured.rows,
        targets=measured.targets,
    )


def draws(name: str) -> bool:
    """Whether the benchmark `name` has a picture of its rows."""
    return hasattr(importlib.import_module(BENCHMARKS[name][0]), "plot")


def draw(result: Result, file: Path) -> None:
    """Write the picture, a PNG, of a benchmark that `draws`."""
    importlib.import_module(BENCHMARKS[result.name][0]).plot(result.rows, file)


def end_script(result: Result, file: Path | None) -> NoReturn:
    """Of a benchmark that is a script of its own: its JSON, its targets, and the exit code of `asyncrl bench`."""
    if file is not None:
        file.write_text(json.dumps(result.document(), indent=2, allow_nan=False) + "\n")
    for target in result.targets:
        sys.stdout.write(f"{'met' if target.met else 'NOT MET'}: {target.name}: {target.value}\n")
    sys.exit(1 if result.missed else 0)


def machine() -> dict[str, Any]:
    """Where this runs. `load` is the 1-minute load average after the benchmark: above `cores`, others ran beside it."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),  # type: ignore[no-untyped-call]
        "load": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
