"""`asyncrl bench`: measure, compare with the targets, write down."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asyncrl.benchmarks import BENCHMARKS
from asyncrl.cli.errors import FAILED, Failure

if TYPE_CHECKING:
    from asyncrl.benchmarks.frame import Result

ALL = "all"


@click.command(epilog="\b\n" + "\n".join(f"{name:<15}{line}" for name, (_, line) in BENCHMARKS.items()))
@click.argument("name", type=click.Choice([*BENCHMARKS, ALL]))
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write rows and targets to FILE.")
@click.option(
    "--plot", "picture", type=click.Path(path_type=Path, dir_okay=False), help="Draw FILE, a PNG; of staleness."
)
@click.option("--quick", "size", flag_value="quick", help="Fewer and smaller rows.")
@click.option("--full", "size", flag_value="full", help="Also the rows that a benchmark leaves out by default.")
@click.option("--kills", type=click.IntRange(min=1), help="How many, of soak.")
def bench(name: str, file: Path | None, picture: Path | None, size: str | None, kills: int | None) -> int:
    """Run one benchmark, or all; a target that is not met is said, and makes the exit code 1."""
    from asyncrl.benchmarks import frame

    if picture is not None:
        _check_drawable(name)
    command = " ".join(["asyncrl", *sys.argv[1:]])
    results = []
    for chosen in BENCHMARKS if name == ALL else [name]:
        taken = frame.options_of(chosen)
        options: dict[str, Any] = {"full": True} if size == "full" and "full" in taken else {}
        if kills is not None and "kills" in taken:
            options["kills"] = kills
        elif kills is not None and name != ALL:
            raise click.UsageError(f"--kills is an option of soak, {name} has none")
        results.append(frame.run(chosen, quick=size == "quick", command=command, say=click.echo, **options))
    if file is not None:
        documents = [result.document() for result in results]
        file.write_text(json.dumps(documents if name == ALL else documents[0], indent=2, allow_nan=False) + "\n")
    if picture is not None:
        frame.draw(results[0], picture)
    for result in results:
        _report(result)
    return FAILED if any(result.missed for result in results) else 0


def _check_drawable(name: str) -> None:
    """Before the measuring, which takes minutes. Raises what a person then reads."""
    from asyncrl.benchmarks import frame

    if name == ALL or not frame.draws(name):
        raise click.UsageError(f"--plot is an option of staleness, {name} has no picture")
    if importlib.util.find_spec("matplotlib") is None:
        raise Failure("--plot needs matplotlib: pip install 'asyncrl[plot]'")


def _report(result: Result) -> None:
    for target in result.targets:
        value = "not measured" if target.value is None else f"{target.value:.4g}"
        sign = ">=" if target.better == "higher" else "<="
        said = "met    " if target.met else "NOT MET"
        click.echo(f"{result.name}: {said} {target.name}: {value}, target {sign} {target.target:g}")
