"""Groups on their way into the store. While a transaction is under way the next groups gather, and go in one together.

A group never waits for others: the first one goes at once. Answers of a batch come in bursts, and a transaction costs
its client about as much for four groups as for one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

from redis.exceptions import NoScriptError, RedisError

from asyncrl.buffers.base import BufferError
from asyncrl.buffers.store import Store, answer_of, payload_key, shown
from asyncrl.buffers.transaction import Command, transaction

TOGETHER_BYTES = 1 << 20
"""Groups that go together, at most: the server does nothing else while it reads a transaction."""


@dataclass(slots=True, eq=False)
class _Put:
    field: str
    payload: bytes
    document: bytes
    now: str
    answer: asyncio.Future[Any]


class Puts:
    """Payload and decision of each group in one transaction: the group is there exactly if its ticket says so."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._waiting: deque[_Put] = deque()
        self._sending: asyncio.Task[None] | None = None

    async def put(self, field: str, payload: bytes, document: bytes, now: str) -> Any:
        """The script's answer. A caller that is cancelled leaves a group that is on its way on its way."""
        put = _Put(field, payload, document, now, asyncio.get_running_loop().create_future())
        self._waiting.append(put)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return answer_of(await put.answer)

    async def _send(self) -> None:
        batch: list[_Put] = []
        try:
            while batch := self._next():
                try:
                    answers = await self._transaction(batch)
                except Exception as error:  # whatever it is, each of them wants to know
                    answers = [error] * len(batch)
                for put, answer in zip(batch, answers, strict=True):
                    if put.answer.done():
                        continue  # nobody waits for it any more
                    if isinstance(answer, Exception):
                        put.answer.set_exception(answer)
                    else:
                        put.answer.set_result(answer)
        finally:
            self._sending = None
            for put in (*batch, *self._waiting):  # there are some only where this task was cancelled: the loop closes
                put.answer.cancel()
            self._waiting.clear()

    def _next(self) -> list[_Put]:
        """What goes together next, in order of asking."""
        batch: list[_Put] = []
        size = 0
        while self._waiting and (not batch or size + len(self._waiting[0].payload) <= TOGETHER_BYTES):
            put = self._waiting.popleft()
            if not put.answer.done():
                batch.append(put)
                size += len(put.payload)
        return batch

    async def _transaction(self, batch: list[_Put]) -> list[Any]:
        """One answer a put: what the script said, or the BufferError that it failed with."""
        store, what = self._store, f"put of {', '.join(put.field for put in batch)}"
        for _ in range(2):
            commands: list[Command] = []
            for put in batch:
                commands.append(("SET", payload_key(self._prefix, put.field), put.payload, "NX"))
                commands.append(("EVALSHA", store.sha, 1, self._prefix, "put", put.document, put.now))
            async with store.answering(what):
                answers = (await transaction(store.client, commands))[1::2]
                if not any(isinstance(answer, NoScriptError) for answer in answers):
                    return [store.failure(what, a) if isinstance(a, RedisError) else a for a in answers]
                await store.load()  # the payloads written meanwhile are found again: NX leaves them alone
        raise BufferError(f"store {shown(store.url)}: the server does not keep the scripts that it is given")
