"""`asyncrl status`: who waits for what, since when, and who could end it; do the engines serve what was published?"""

from __future__ import annotations

import asyncio

import click

from asyncrl.cli.errors import Failure
from asyncrl.cli.inspection import chosen, run_options


@click.command()
@run_options
@click.option(
    "--verify-weights",
    "verifying",
    is_flag=True,
    help="Have every engine hash what it serves, and compare with what was published. Ends with 1 where one differs or "
    "does not answer.",
)
def status(run: str | None, named: str | None, url: str | None, verifying: bool) -> int:
    """Where RUN is (a folder or a name; left out: the newest), how weights reach its collectors, and everyone who
    waits: for what, since when, and who could end it. The run is not disturbed.
    """
    from asyncrl.runtime.place import place_of
    from asyncrl.runtime.status import status_of

    if verifying:
        from asyncrl.runtime.verification import verify_weights
        from asyncrl.runtime.weights_text import proof_lines

        found = asyncio.run(verify_weights(place_of(chosen(run, named), url)))
        for line in proof_lines(found):
            click.echo(line)
        return 1 if any(one.wrong for one in found) else 0
    try:
        lines = asyncio.run(status_of(place_of(chosen(run, named), url)))
    except ValueError as error:
        raise Failure(str(error)) from None
    for line in lines:
        click.echo(line)
    return 0
