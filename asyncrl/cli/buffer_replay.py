"""`asyncrl buffer replay`: train a recorded run again and see whether the same weights come out."""

from __future__ import annotations

from pathlib import Path

import click

from asyncrl.cli.errors import FAILED


@click.command()
@click.argument("run", required=False)
@click.option(
    "--from",
    "start",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="VERSION",
    help="Start from that checkpoint; 0: from the initial weights.",
)
@click.option("--check", is_flag=True, help="Exit code 1 unless all the run left of its weights is the same.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Write the last version there, as a checkpoint."
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Only model.path, where it is elsewhere.")
def replay(run: str | None, start: int, check: bool, out: Path | None, overrides: tuple[str, ...]) -> int:
    """Train RUN's recorded batches again, in their order, and compare every version with what the run left.

    RUN is a folder or a name; left out: the newest. Needs its archive, no store and no collector. With
    run.deterministic the same weights come out, bit for bit.
    """
    from asyncrl.runtime import folder as folders

    folder = folders.find(run)  # before what takes seconds to import
    from transformers.utils import logging as transformers_logging

    from asyncrl.runtime.replay import replay_run

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # of loading a model: over in no time
    same = replay_run(folder, start=start, out=out, overrides=overrides, on_line=click.echo)
    return FAILED if check and not same else 0
