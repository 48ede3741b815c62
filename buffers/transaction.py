"""Several commands as one transaction, in one write, over redis-py's connections and with its retries.

redis-py's own pipeline takes about 0.1 ms of a small transaction to set itself up and to keep its books: beside a group
of some hundred KB that is as much as the server takes to decide over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ExecAbortError, RedisError, ResponseError

Command = tuple[bytes | str | int, ...]


async def transaction(client: Redis, commands: Sequence[Command]) -> list[Any]:
    """What the server answered to each, an error as an exception in its place. Commands must be safe to repeat: after
    a connection that broke nobody knows whether they ran, and the client's retries send them again.

    Raises RedisError where nothing of it was done, or where no retry got through.
    """
    pool: Any = client.connection_pool  # its methods have no types
    connection = await pool.get_connection()

    async def broken(_: RedisError) -> None:
        await connection.disconnect()

    try:
        answers: list[Any] = await connection.retry.call_with_retry(lambda: _exchange(connection, commands), broken)
        return answers
    finally:
        await pool.release(connection)


async def _exchange(connection: AbstractConnection, commands: Sequence[Command]) -> list[Any]:
    await connection.send_packed_command(connection.pack_commands([("MULTI",), *commands, ("EXEC",)]))
    refusals = []
    for _ in ("MULTI", *commands):  # each is answered when it is queued; all are read, or the next call reads them
        try:
            await connection.read_response()
        except ResponseError as error:
            refusals.append(error)
    try:
        answers: list[Any] = await connection.read_response()
    except ExecAbortError as error:
        raise (refusals or [error])[0] from None  # what was refused says why, EXEC only that
    return answers
