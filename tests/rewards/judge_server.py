"""A judge that says what a test tells it to: a real HTTP server with OpenAI's chat completions, and what asks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from asyncrl.config.rewards import Judge
from asyncrl.rewards.base import Finding, Unscored
from asyncrl.rewards.judge import JudgePart

Says = Callable[["Scripted", dict[str, Any]], "web.Response | str | float"]
"""From the request to a reply: a response, the text of a completion, or seconds in which nothing comes."""

TRIAL = "This is a trial"

ROW: dict[str, Any] = {"id": "f:1", "prompt": "2+2?", "answer": "4", "info": {}}
LIMIT_S = 30.0


class Scripted:
    """questions: the requests that it got, without the trials; asked: since there is one; given_up: since a connection
    ended before its reply; trial: its reply to one, None: a verdict."""

    def __init__(self, says: Says) -> None:
        self.questions: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.trials = self.at_once = self.most_at_once = 0
        self.asked, self.given_up = asyncio.Event(), asyncio.Event()
        self.url = ""
        self.port = 0
        self.trial: web.Response | None = None
        self._says = says

    async def reply(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.headers.append(dict(request.headers))
        if TRIAL in asked["messages"][0]["content"]:
            self.trials += 1
            return self.trial or completion("10")
        self.questions.append(asked)
        self.asked.set()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            said = self._says(self, asked)
            if isinstance(said, float):
                await asyncio.sleep(said)
                said = "10"
            return completion(said) if isinstance(said, str) else said
        except asyncio.CancelledError:
            self.given_up.set()
            raise
        finally:
            self.at_once -= 1


def completion(text: str, *, finish_reason: str = "stop", tokens: int | None = 30) -> web.Response:
    """A chat completion. tokens: that it says were used."""
    return web.json_response(
        {
            "id": "c-1",
            "object": "chat.completion",
            "created": 0,
            "model": "scripted",
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
            ],
            "usage": None
            if tokens is None
            else {"prompt_tokens": tokens - 10, "completion_tokens": 10, "total_tokens": tokens},
        }
    )


def failure(status: int, message: str = "scripted", **headers: str) -> web.Response:
    """An error as OpenAI's servers have it."""
    return web.json_response({"error": {"message": message}}, status=status, headers=headers)


@asynccontextmanager
async def serving(says: Says, *, port: int = 0) -> AsyncIterator[Scripted]:
    """The server, on a port of this host, until the block is left."""
    scripted = Scripted(says)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", scripted.reply)
    # A handler whose client has gone is cancelled: the test sees that a request was given up.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    scripted.port = runner.addresses[0][1]
    scripted.url = f"http://127.0.0.1:{scripted.port}/v1"
    try:
        yield scripted
    finally:
        await runner.cleanup()


def said(text: str) -> dict[str, Any]:
    return {"text": text, "token_ids": [1], "finish_reason": "stop", "messages": []}


@asynccontextmanager
async def judging(says: Says, **keys: Any) -> AsyncIterator[tuple[JudgePart, Scripted]]:
    """A judge that was started, and the server behind it."""
    async with serving(says) as server:
        judge = JudgePart(Judge(**{"url": server.url, "model": "m", "retries": 2, "timeout_s": 10.0, **keys}))
        await asyncio.wait_for(judge.start(), LIMIT_S)
        try:
            yield judge, server
        finally:
            await judge.close()


async def verdict(judge: JudgePart, text: str = "four") -> Finding:
    return await asyncio.wait_for(judge.verify(ROW, said(text)), LIMIT_S)


async def unscored(judge: JudgePart, text: str = "four") -> Unscored:
    with pytest.raises(Unscored) as caught:
        await verdict(judge, text)
    return caught.value
