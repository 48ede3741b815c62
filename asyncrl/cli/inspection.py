"""`asyncrl buffer status|ls|head|show|dump`: looking into a run's buffer while it trains."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from asyncrl.buffers.base import LIVE, TERMINAL
from asyncrl.cli.errors import Failure

F = TypeVar("F", bound=Callable[..., Any])

STATES = [state.value for state in (*LIVE, *TERMINAL)]


def run_options(command: F) -> F:
    """`[RUN]`, or `--run NAME`; `--buffer URL`. They arrive as `run`, `named` and `url`."""
    for decorate in (
        click.option(
            "--buffer",
            "url",
            envvar="ASYNCRL_BUFFER",
            show_envvar=True,
            metavar="URL",
            help="The run's store; left out: the one that the run's folder names, which may be the embedded one.",
        ),
        click.option("--run", "named", metavar="NAME", help="The same as RUN."),
        click.argument("run", required=False),
    ):
        command = decorate(command)
    return command


def chosen(run: str | None, named: str | None) -> str | None:
    """RUN, however it was given."""
    if run is not None and named is not None:
        raise click.UsageError(f"RUN is given twice: {run} and --run {named}")
    return run if named is None else named


@click.command()
@run_options
def status(run: str | None, named: str | None, url: str | None) -> int:
    """The sums: tickets, ages, bytes, collectors.

    RUN is a folder or a name; left out, the newest. An ended run's embedded store is started for the moment.
    """
    from asyncrl.runtime.inspection_text import status_lines
    from asyncrl.runtime.place import opened, place_of

    async def look() -> list[str]:
        async with opened(place_of(chosen(run, named), url)) as buffer:
            stats = await buffer.stats()
            aside = sorted(await buffer.quarantined()) if stats.quarantined else []
            return status_lines(stats, buffer.limits, aside=aside)

    return _say(asyncio.run(look()))


@click.command()
@run_options
@click.option("--state", "states", multiple=True, type=click.Choice(STATES), help="Only these; left out: all.")
@click.option("--from", "start", type=click.IntRange(min=0), default=0, show_default=True, help="The first ticket.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Rows, at most.")
def ls(run: str | None, named: str | None, url: str | None, states: Sequence[str], start: int, limit: int) -> int:
    """A row for each ticket, by number.

    RUN is a folder or a name; left out, the newest. What trained it is written lineage/version, the version that the
    step started from.
    """
    from asyncrl.buffers.base import State
    from asyncrl.runtime import inspection
    from asyncrl.runtime.inspection_text import row_lines
    from asyncrl.runtime.place import opened, place_of

    place = place_of(chosen(run, named), url)

    async def look() -> list[str]:
        async with opened(place) as buffer:
            wanted = [State(state) for state in states] or list(State)
            found = await inspection.ledger_rows(buffer, place.folder, wanted, start=start, most=limit)
            stats = await buffer.stats()
            moved = 0 if place.folder is not None else sum(stats.archived.values())
            elsewhere = [f"{moved} rows are in the archive's ledger, which is not on this host"] if moved else []
            return [*row_lines(found, now=stats.time), *elsewhere]

    return _say(asyncio.run(look()))


@click.command()
@run_options
def head(run: str | None, named: str | None, url: str | None) -> int:
    """What the next step chooses from, and what it waits for.

    RUN is a folder or a name; left out, the newest. Ages are those at the next step.
    """
    from asyncrl.buffers.base import State
    from asyncrl.runtime import inspection
    from asyncrl.runtime.inspection_text import head_lines
    from asyncrl.runtime.place import opened, place_of

    async def look() -> list[str]:
        async with opened(place_of(chosen(run, named), url)) as buffer:
            live = [row async for row in inspection.rows_of(buffer, State.ISSUED, State.HELD)]
            returned = await buffer.rows(states=[State.RETURNED], limit=1)
            return head_lines(await buffer.stats(), buffer.limits, live, returned=returned[0] if returned else None)

    return _say(asyncio.run(look()))


@click.command()
@click.argument("ticket", type=click.IntRange(min=0))
@run_options
def show(ticket: int, run: str | None, named: str | None, url: str | None) -> int:
    """One ticket: prompt, answers, and what became of it.

    RUN is a folder or a name; left out, the newest. Answers are coloured by the version that sampled each token;
    without a terminal its number stands in brackets. A trained ticket is shown from the archive, where that lies on
    this host.
    """
    from rich.text import Text

    from asyncrl.runtime import inspection
    from asyncrl.runtime.inspection_text import ticket_lines
    from asyncrl.runtime.place import place_of
    from asyncrl.telemetry.ticket import answer_lines, answers_of, checksums_of, print_lines

    place = place_of(chosen(run, named), url)
    found = asyncio.run(inspection.find_ticket(place, ticket))
    terminal = sys.stdout.isatty()
    lines = [Text(line) for line in ticket_lines(found)]
    if found.group is not None:
        decode, why_not = inspection.decoder(place, found.recipe)
        answers = answers_of(found.group, decode)
        lines += [Text(), *answer_lines(answers, checksums_of(found.group), marks=not terminal)]
        if why_not:
            lines.append(Text(f"token ids instead of text: {why_not}"))
    print_lines(lines, terminal=terminal, file=sys.stdout)
    return 0


@click.command()
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@run_options
@click.option(
    "--state", "states", multiple=True, type=click.Choice(["held", "leased"]), default=["held"], show_default=True,
    help="Those that wait for a step; those that a step trains now.",
)  # fmt: skip
def dump(out: Path, run: str | None, named: str | None, url: str | None, states: Sequence[str]) -> int:
    """The groups in the buffer, as a Parquet file.

    RUN is a folder or a name; left out, the newest. The run goes on, undisturbed. Trained groups need no dump: the
    run's archive is Parquet.
    """
    if not out.absolute().parent.is_dir():
        raise click.UsageError(f"{out}: there is no folder {out.parent}")
    from asyncrl.buffers.base import State
    from asyncrl.runtime import dump as dumps
    from asyncrl.runtime.place import opened, place_of

    async def work() -> dumps.Dumped:
        async with opened(place_of(chosen(run, named), url)) as buffer:
            return await dumps.dump(buffer, out, [State(state) for state in states])

    done = asyncio.run(work())
    moved = f"; {done.moved_on} moved on meanwhile" if done.moved_on else ""
    _say([f"{done.groups} groups, {done.trajectories} trajectories: {out}{moved}"])
    if done.damaged:
        raise Failure("\n".join([f"{len(done.damaged)} groups are damaged and left out:", *done.damaged]))
    return 0


def _say(lines: Sequence[str]) -> int:
    for line in lines:
        click.echo(line)
    return 0
