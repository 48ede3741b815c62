"""`asyncrl export`: a run's weights as a folder that transformers, vLLM or peft load, with a model card."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from asyncrl.learners.exporting import Form


@click.command()
@click.argument("run", required=False)
@click.option(
    "--to",
    "form",
    type=click.Choice(["hf", "adapter", "merged"]),
    default="hf",
    show_default=True,
    help="The whole model; the adapter alone, for peft; the model that the adapter was added to.",
)
@click.option("--version", type=click.IntRange(min=0), metavar="N", help="Of a kept checkpoint; left out: the newest.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Of a whole model; left out: model.dtype.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="New or empty; left out: RUN/exports/version-<N>-<form>.",
)
def export(run: str | None, form: Form, version: int | None, dtype: str | None, output: Path | None) -> int:
    """Write the weights of RUN as a folder that transformers, vLLM or peft load, with tokenizer, chat template,
    generation config, checksums and a model card.

    RUN is a run (a folder or a name; left out: the newest) or a checkpoint's folder. A run may go on meanwhile.
    """
    from asyncrl.runtime import folder as folders

    if run is None:
        folders.find(None)  # before what takes seconds to import
    from transformers.utils import logging as transformers_logging

    from asyncrl.runtime.export import export as write
    from asyncrl.runtime.export import find_source

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # of loading weights: says nothing
    source = find_source(run, version)
    previous = signal.signal(signal.SIGTERM, _end)
    try:
        done = write(source, form, dtype=dtype, output=output, on_phase=_tell)
    finally:
        signal.signal(signal.SIGTERM, previous)
    document = done.document
    manifest = document.manifest
    held = "A and B in float32" if manifest.adapter else f"the whole model in {document.dtype}"
    stamped = "which is what rows were sampled by" if done.stamped else "which no trained row was sampled by"
    click.echo(f"exported  run {source.run}, version {document.version} of lineage {document.lineage}")
    click.echo(f"as        {form}: {held}, {len(manifest.tensors)} tensors, {manifest.nbytes / 1e6:,.1f} MB")
    click.echo(f"checksum  {manifest.served} of the whole model in {document.dtype}, {stamped}")
    click.echo(f"folder    {done.folder}")
    return 0


def _end(number: int, _frame: FrameType | None) -> None:
    """What was begun is removed on the way out, as at SIGINT."""
    sys.exit(128 + number)


def _tell(phase: str) -> None:
    """On a terminal: a large model takes minutes in each."""
    if sys.stderr.isatty():
        click.echo(f"{phase} ...", err=True)
