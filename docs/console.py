"""Draws the console of a run as it stood after one of its steps: `python -m docs.console RUN docs/console.svg`.

The steps and events are those of the run's metrics.jsonl, the panel is the one `asyncrl run` draws on a terminal.
"""

from __future__ import annotations

import io
from pathlib import Path

import click
from rich.console import Console

from asyncrl.config.loading import load_recipe
from asyncrl.runtime.folder import find
from asyncrl.telemetry import text
from asyncrl.telemetry.console import FULL_WIDTH, panel
from asyncrl.telemetry.metrics import read_metrics


@click.command()
@click.argument("run")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--step", type=int, help="The step after which it is drawn; left out: two thirds of the way.")
def main(run: str, file: Path, step: int | None) -> None:
    """RUN is a folder or a name; FILE ends in .svg."""
    folder = find(run)
    max_steps = load_recipe(str(folder / "recipe.yaml")).recipe.run.max_steps
    step = step or max_steps * 2 // 3
    screen = Console(record=True, file=io.StringIO(), width=FULL_WIDTH, force_terminal=True, color_system="truecolor")
    steps = []
    for record in read_metrics(folder / "metrics.jsonl"):
        if "event" in record:
            if record["event"] == "eval":  # the others name folders of the machine
                screen.print(text.event_line(record), markup=False, highlight=False)
        else:
            steps.append(record)
            if record["step"] == step:
                break
    else:
        raise click.UsageError(f"{folder} has no step {step}")
    screen.print(panel(steps, {}, max_steps=max_steps, width=FULL_WIDTH))
    file.write_text(screen.export_svg(title="asyncrl run"), encoding="utf-8")


if __name__ == "__main__":
    main()
