"""`asyncrl status`: who waits for what, since when, and who could end it."""

from __future__ import annotations

import asyncio

import click

from asyncrl.cli.errors import Failure
from asyncrl.cli.inspection import chosen, run_options


@click.command()
@run_options
def status(run: str | None, named: str | None, url: str | None) -> int:
    """Where RUN is (a folder or a name; left out: the newest), and everyone who waits: for what, since when, and who
    could end it. The run is not disturbed.
    """
    from asyncrl.runtime.place import place_of
    from asyncrl.runtime.status import status_of

    try:
        lines = asyncio.run(status_of(place_of(chosen(run, named), url)))
    except ValueError as error:
        raise Failure(str(error)) from None
    for line in lines:
        click.echo(line)
    return 0
