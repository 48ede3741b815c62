"""`asyncrl buffer`: the store by itself, and what its ledger says."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import click

from asyncrl.cli import inspection
from asyncrl.cli.buffer_replay import replay
from asyncrl.cli.errors import FAILED, Failure

STOP_S = 15.0


@click.group()
def buffer() -> None:
    """Serve a store; look into a run's buffer, while it trains or afterwards."""


for command in (inspection.status, inspection.ls, inspection.head, inspection.show, inspection.dump, replay):
    buffer.add_command(command)


@buffer.command()
@click.option("--listen", metavar="HOST:PORT", help="Also for other hosts; left out: a unix socket of this user's.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("store"),
    show_default=True,
    help="Where its data lie; a later start continues with them.",
)
@click.option("--password-env", metavar="NAME", help="The environment variable that holds the store's password.")
@click.option(
    "--tls",
    "certificates",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Serve TLS with tls.crt and tls.key of this folder; with a ca.crt, clients need a certificate signed by it.",
)
def serve(listen: str | None, folder: Path, password_env: str | None, certificates: Path | None) -> int:
    """Serve a store until SIGINT or SIGTERM, for `asyncrl learner` and `asyncrl collector`.

    If it is killed it is started again, with its data and at its address.
    An address that other machines can reach needs --password-env, or --tls with a ca.crt.
    """
    from asyncrl.buffers.server import EmbeddedServer
    from asyncrl.buffers.tls import Tls
    from asyncrl.runtime import signals
    from asyncrl.runtime.store_keeper import TICK_S, StoreKeeper

    address = _address(listen) if listen else None
    password = None
    if password_env:
        password = os.environ.get(password_env)
        if not password:
            raise click.UsageError(f"--password-env {password_env}: that environment variable is not set")
    tls = Tls.of(certificates) if certificates else None
    server = EmbeddedServer(folder, listen=address, password=password, tls=tls)

    async def main(stop: asyncio.Event) -> int:
        async with server:
            hidden = server.url.replace("://", "://:***@", 1) if password else server.url
            click.echo(f"store {hidden} (data in {server.folder})")
            keeper = StoreKeeper(server, click.echo)
            stopping = asyncio.ensure_future(stop.wait())
            try:
                while not stopping.done():
                    await asyncio.wait({stopping}, timeout=TICK_S)
                    if (lost := keeper.tend()) is not None:
                        raise Failure(lost)
            finally:
                stopping.cancel()
        return 0

    code = signals.run(main, grace_s=STOP_S)
    # Being stopped is how a server ends well.
    return 0 if code > 128 else code


@buffer.command()
@click.argument("run", required=False)
@click.option(
    "--buffer", "url", envvar="ASYNCRL_BUFFER", metavar="URL", help="Its store; left out: the run folder's own."
)
def audit(run: str | None, url: str | None) -> int:
    """Check the ledger of RUN (a folder or a name; left out: the newest) against its archive.

    Prints the sums and every problem; exit code 1 if there is one.
    """
    from asyncrl.runtime.audit import audit_run

    report = asyncio.run(audit_run(run, url))
    for line in report.lines():
        click.echo(line)
    return FAILED if report.problems else 0


def _address(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise click.UsageError(f"--listen {listen!r}: write HOST:PORT, such as 127.0.0.1:6379")
    return host, int(port)
