"""`asyncrl init`: a task of one's own that trains as it stands, to be changed."""

from __future__ import annotations

import os
import shlex
from importlib.resources import files
from pathlib import Path

import click

from asyncrl.cli.errors import USAGE, Failure

FILES = ("task.py", "data.jsonl", "recipe.yaml", "test_task.py")
"""What is written, in the order to read it: files of the package's `cli/templates`, byte for byte."""


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
def init(folder: Path) -> None:
    """Write a task of your own into DIR, which trains at once.

    task.py (rows, and the reward in five lines), data.jsonl, recipe.yaml and test_task.py. DIR is made if it is not
    there; a file that is there is never overwritten.
    """
    if taken := [name for name in FILES if os.path.lexists(folder / name)]:
        raise Failure(
            f"{folder} has {', '.join(taken)} already, and nothing is overwritten; give another folder", USAGE
        )
    folder.mkdir(parents=True, exist_ok=True)
    templates = files("asyncrl.cli") / "templates"
    for name in FILES:
        with (folder / name).open("xb") as file:  # x: not even what somebody else has made in between
            file.write((templates / name).read_bytes())
        click.echo(f"wrote {folder / name}")
    click.echo("\nNext:")
    if folder.resolve() != Path.cwd():
        click.echo(f"  cd {shlex.quote(str(folder))}")
    click.echo("  python -m unittest             # the reward says what you mean, tried without a model")
    click.echo("  asyncrl profile recipe.yaml    # whether to train: some answers of the model as it is, scored")
    click.echo("  asyncrl run recipe.yaml        # trains, in about a minute")
    click.echo("  asyncrl eval                   # a look at what it came to: held-out rows, answers to read")
    click.echo("Then change score() in task.py, the rows in data.jsonl, and the model in recipe.yaml.")
