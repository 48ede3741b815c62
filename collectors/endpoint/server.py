"""The endpoint: OpenAI's chat completions over HTTP, a key for each episode.

    POST /v1/chat/completions    whole or streamed
    GET  /v1/models, /v1/models/{name}

It runs in the collector's loop. A key is unguessable and proves itself: an ended episode's is told from a wrong one
without keeping it.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from asyncrl.collectors.endpoint.asked import Chat, read_chat
from asyncrl.collectors.endpoint.errors import ApiError
from asyncrl.collectors.endpoint.reply import Reply
from asyncrl.collectors.endpoint.session import Session

logger = logging.getLogger(__name__)

MODEL = "policy"
LARGEST_BODY = 64 << 20  # bytes of a request: a conversation of millions of tokens
CLOSE_S = 1.0  # for connections whose calls were aborted already
ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""What listens everywhere is reached from here by the loopback address."""

OVERRIDDEN = "x-asyncrl-overridden"
"""Response header: the arguments that the recipe decided instead of the client."""


class Endpoint:
    """Listens on `host`; `port` 0 is any that is free."""

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host, self._port = host, port
        self._secret = secrets.token_bytes(32)
        self._numbers = itertools.count()
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._told: set[str] = set()  # arguments whose overriding was logged

    @property
    def base_url(self) -> str:
        """As clients take it."""
        host = ANY_HOST.get(self._host, self._host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}/v1"

    async def start(self) -> None:
        """Listen; once it listens, do nothing. Raises OSError if the address cannot be had."""
        if self._runner is not None:
            return
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[_errors])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        # A client that hangs up ends its call: what it asked for need not be sampled.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        self._port = self._runner.addresses[0][1]

    def open(self, session: Session) -> str:
        """The key under which the session's episode may call."""
        number = str(next(self._numbers))
        key = f"{number}-{self._proof(number)}"
        self._sessions[key] = session
        return key

    async def end(self, key: str) -> None:
        """The episode is over: its calls are aborted, and its key is good for nothing any more."""
        session = self._sessions.pop(key, None)
        if session is not None:  # else `close` has ended it
            await session.close()

    async def close(self) -> None:
        """Abort all calls and stop listening; once it does not listen, do nothing."""
        runner, self._runner = self._runner, None
        for key in list(self._sessions):
            await self.end(key)
        if runner is not None:
            await runner.cleanup()

    def _session(self, request: web.Request) -> Session:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise ApiError(401, "no API key: send `Authorization: Bearer KEY`, the key of an episode")
        session = self._sessions.get(key.strip())
        if session is not None:
            return session
        number, _, proof = key.strip().partition("-")
        if hmac.compare_digest(proof.encode(), self._proof(number).encode()):
            raise ApiError(401, "the episode of this key has ended", code="episode_ended")
        raise ApiError(401, "Incorrect API key provided: it is of no episode", code="invalid_api_key")

    def _proof(self, number: str) -> str:
        return hmac.new(self._secret, number.encode(), hashlib.sha256).hexdigest()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        chat = read_chat(await request.read())
        try:
            return await self._answer(request, session, chat)
        except (ApiError, ConnectionError):
            raise
        except Exception as error:  # a fault here must end the episode by its name, not as the agent's
            session.fail(error)
            raise

    async def _answer(self, request: web.Request, session: Session, chat: Chat) -> web.StreamResponse:
        headers = self._headers(chat.overridden(session.episode.sampling))
        if not chat.stream:
            return _json((await session.answer(chat)).document(), headers=headers)
        stream = _Stream(request, headers)
        try:
            reply = await session.answer(chat, stream.say)
        except ApiError as error:
            if stream.response is None:
                raise
            await stream.send(error.document())  # the status was sent already
            return await stream.end()
        usage = chat.stream_options is not None and bool(chat.stream_options.include_usage)
        return await stream.finish(reply, usage=usage)

    def _headers(self, overridden: Sequence[str]) -> dict[str, str]:
        if new := set(overridden) - self._told:
            self._told |= new
            logger.warning(
                "an agent set %s; the recipe's sampling decides, so that log-probs are those of what is trained",
                ", ".join(sorted(new)),
            )
        return {OVERRIDDEN: ", ".join(overridden)} if overridden else {}

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return _json({"object": "list", "data": [_described(MODEL)]})

    async def _model(self, request: web.Request) -> web.Response:
        self._session(request)
        return _json(_described(request.match_info["name"]))  # by whatever name: there is but the policy


class _Stream:
    """A streamed answer. The response begins with the first text: until then the status can still be an error's."""

    def __init__(self, request: web.Request, headers: dict[str, str]) -> None:
        self.response: web.StreamResponse | None = None
        self._request = request
        self._headers = headers
        self._said = 0  # characters of the content

    async def say(self, reply: Reply, text: str) -> None:
        if self.response is None:
            await self._begin(reply)
        self._said += len(text)
        await self.send(reply.chunk({"content": text}))

    async def finish(self, reply: Reply, *, usage: bool) -> web.StreamResponse:
        if self.response is None:
            await self._begin(reply)
        for chunk in reply.last_chunks(reply.content[self._said :], usage=usage):
            await self.send(chunk)
        return await self.end()

    async def send(self, document: dict[str, Any]) -> None:
        if self.response is not None:
            await self.response.write(b"data: " + msgspec.json.encode(document) + b"\n\n")

    async def end(self) -> web.StreamResponse:
        if self.response is None:
            raise RuntimeError("the stream never began")
        await self.response.write(b"data: [DONE]\n\n")
        await self.response.write_eof()
        return self.response

    async def _begin(self, reply: Reply) -> None:
        headers = {**self._headers, "Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        self.response = web.StreamResponse(headers=headers)
        await self.response.prepare(self._request)
        await self.send(reply.chunk({"role": "assistant", "content": ""}))


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every error as clients read it."""
    try:
        return await handler(request)
    except ApiError as error:
        return _refused(error)
    except web.HTTPException as error:
        return _refused(ApiError(error.status, f"{error.reason}: {request.method} {request.path}"))
    except ConnectionError:  # the client is gone: there is nobody to tell
        raise
    except Exception as error:
        logger.exception("a call of an agent's met a fault of the endpoint")
        return _refused(ApiError(500, f"{type(error).__name__}: {error}"))


def _refused(error: ApiError) -> web.Response:
    # Clients try again by themselves after most errors. None of these passes by waiting.
    return _json(error.document(), status=error.status, headers={"x-should-retry": "false"})


def _json(document: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(document), status=status, headers=headers, content_type="application/json"
    )


def _described(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "asyncrl"}
