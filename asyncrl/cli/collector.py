"""`asyncrl collector`: a collector process alone."""

from __future__ import annotations

import asyncio

import click

from asyncrl.cli.options import buffer_option, set_option

GRACE_S = 30.0
"""A collector keeps nothing that the store does not know, so it leaves at once; this only bounds it."""


def seconds(ctx: click.Context, param: click.Parameter, text: str) -> float:
    """A duration as people write it: 90, 90s, 10m, 1h."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    try:
        value = float(text) if unit is None else float(text[:-1]) * unit
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise click.BadParameter(f"{text!r} is not a duration; write 90s, 10m or 1h", ctx, param)
    return value


@click.command()
@buffer_option
@click.option("--run", "run", required=True, metavar="NAME", help="The run's name in the store (run.name).")
@click.option("--name", metavar="NAME", help="This collector's name; left out: host and process. A restart keeps it.")
@click.option(
    "--wait", "wait_s", default="10m", show_default=True, callback=seconds, help="How long to wait for store and run."
)
@set_option
def collector(url: str | None, run: str, name: str | None, wait_s: float, overrides: tuple[str, ...]) -> int:
    """Join a run: take its recipe from the store, generate until the run ends.

    With --set only keys of this host may be set, such as model.path.
    """
    if not url:
        raise click.UsageError("give --buffer URL, the store that `asyncrl buffer serve` or the run's owner names")
    from asyncrl.runtime import processes, signals

    async def main(stop: asyncio.Event) -> int:
        await processes.collector(
            url=url, run=run, name=name or processes.default_name(), wait_s=wait_s, overrides=overrides, stop=stop
        )
        return 0

    processes.log_to_stderr()
    return signals.run(main, grace_s=GRACE_S)
