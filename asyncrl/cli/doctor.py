"""`asyncrl doctor`: what a run stands on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from asyncrl.cli.errors import FAILED
from asyncrl.cli.options import buffer_option

if TYPE_CHECKING:
    from asyncrl.runtime.diagnosis import Finding


@click.command()
@buffer_option
@click.option("--run", metavar="NAME", help="A run: its recipe says how much its store must hold.")
def doctor(url: str | None, run: str | None) -> int:
    """Look at this machine and at a store: that of --buffer, or of the run's folder; without either, at an embedded one
    that is started for this.

    Each line is ok, a warning or an error, with the fix. The exit code is 1 if there is an error.
    """
    from asyncrl.runtime.doctor import examine

    findings = asyncio.run(examine(url, run))
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        click.echo(_line(finding, width))
    return FAILED if any(finding.level == "error" for finding in findings) else 0


def _line(finding: Finding, width: int) -> str:
    line = f"{finding.level:<9}{finding.what:<{width + 2}}{finding.says}"
    return f"{line}\n{' ' * (width + 11)}fix: {finding.fix}" if finding.fix else line
