"""A Redis-protocol server as the buffer's store: connecting, refusing what would lose data, creating and finding runs.

Works with Redis >= 6.2 and Valkey >= 7.2, embedded, on a host or managed; what an ACL user needs: ACL_RULES. Nothing
here ever flushes or lists the whole key space.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import msgspec
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import AuthenticationError, NoScriptError, RedisError

from asyncrl.buffers.base import PROTOCOL_VERSION, BufferError, Fenced, UnknownMember
from asyncrl.buffers.limits import Limits
from asyncrl.config.secrets import masked
from asyncrl.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from asyncrl.buffers.remote import RedisBuffer

SCRIPT_FILES = (
    "common", "transitions", "put", "tickets", "choose", "lease", "lineage", "ledger", "recovery", "inspect", "main",
)  # fmt: skip
OLDEST_REDIS = (6, 2)  # first with every command the scripts use
CONNECT_S = 5.0  # a server that does not answer a PING for so long is unreachable
COMMAND_S = 30.0  # no script of ours runs for so long; a hung server must not hang us
RETRIES = 6  # with backoff up to 1 s: a restart of the server is ridden out; every operation is safe to repeat
ACL_RULES = "~asyncrl:* +@all -@admin -@dangerous +info"

URL_OPTIONS = ("db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname")
"""What may stand after the `?`. Not ssl_cert_reqs: a certificate that nobody looks at protects nobody."""


class StoreAway(BufferError):
    """The store does not answer, or cannot serve now: starting, out of memory, its disk full. The call may be made
    again, as long as somebody has the patience."""


class NoRun(BufferError):
    """The store serves, and does not know the run: it was never created there, or the store has lost everything."""


class RunExists(BufferError):
    """Another run has this name. `recipe` is its recipe, to list the keys that differ."""

    def __init__(self, name: str, recipe: Mapping[str, Any]) -> None:
        super().__init__(f"run {name!r} exists in this store with another recipe; choose another run.name")
        self.recipe = recipe


def shown(url: str) -> str:
    """A URL as it may be printed: the password is ***."""
    return masked(url)


def script_text() -> str:
    """All server-side files as the one script that is loaded."""
    folder = resources.files("asyncrl.buffers") / "scripts"
    return "\n".join((folder / f"{name}.lua").read_text() for name in SCRIPT_FILES)


def refuse_public(url: str) -> None:
    """A store that anyone on the internet could write to is refused: anyone could steer the training."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss") or parts.scheme == "rediss" or parts.password:
        return
    host = parts.hostname or "localhost"
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise BufferError(f"store {shown(url)}: host {host!r} cannot be resolved ({error}); check buffer.url") from None
    for address in addresses:
        if ipaddress.ip_address(str(address).split("%")[0]).is_global:
            raise BufferError(
                f"store {shown(url)} is a public address ({address}) without password or TLS; use "
                "rediss://user:password@host or a private address"
            )


class Store:
    """Connections to one server, with the scripts loaded.

    `mailbox` is a client that gives up with its connection: what was popped over one that broke is lost, and to pop
    again would mean to sleep until the next deadline.
    """

    def __init__(self, url: str, client: Redis, mailbox: Redis) -> None:
        self.url = url
        self.client = client
        self.mailbox = mailbox
        self.script = script_text()
        self.sha = ""

    async def load(self) -> None:
        async with self.answering("loading the scripts"):
            self.sha = str(await self.client.script_load(self.script))

    @asynccontextmanager
    async def answering(self, what: str) -> AsyncIterator[None]:
        """Around calls of the client: a server that fails is a BufferError; StoreAway if that may pass, as it is when
        there is no answer for COMMAND_S.

        The limit is here and not in the client: with a `socket_timeout` redis-py runs each read under `wait_for`, which
        before Python 3.12 loses a cancellation that arrives at the wrong moment, and a cancelled task would live on.
        """
        try:
            async with asyncio.timeout(COMMAND_S):
                yield
        except TimeoutError:
            raise StoreAway(f"store {shown(self.url)}: {what}: no answer for {COMMAND_S:.0f} s") from None
        except RedisError as error:
            raise self.failure(what, error) from error

    def failure(self, what: str, error: RedisError) -> BufferError:
        """What the client's error means to callers."""
        kind = StoreAway if may_pass(error) else BufferError
        advice = f"; give this user the rules {ACL_RULES}" if isinstance(error, exceptions.NoPermissionError) else ""
        return kind(f"store {shown(self.url)}: {what} failed: {error}{advice}")

    async def run_script(self, prefix: str, operation: str, arguments: Any, now: str = "") -> Any:
        """One atomic operation. Raises BufferError for what the script refuses or the server cannot do."""
        document = msgspec.json.encode(arguments)
        async with self.answering(operation):
            try:
                raw = await self.client.evalsha(self.sha, 1, prefix, operation, document, now)
            except NoScriptError:  # the server was restarted, or its script cache flushed
                await self.load()
                raw = await self.client.evalsha(self.sha, 1, prefix, operation, document, now)
        return answer_of(raw)

    async def create_run(self, name: str, *, recipe: dict[str, Any], recipe_hash: str, limits: Limits) -> RedisBuffer:
        """Create the run, or find the very same one (by recipe hash). Raises RunExists for another recipe's."""
        document = {
            "schema": SCHEMA_VERSION,
            "protocol": PROTOCOL_VERSION,
            "name": name,
            "recipe": recipe,
            "hash": recipe_hash,
            "created": time.time(),
        }
        encoded = msgspec.json.encode(document).decode()
        reply = await self.run_script(run_prefix(name), "create", {"document": encoded, "limits": limits_doc(limits)})
        found = checked_document(msgspec.json.decode(reply["document"]), self.url)
        if found["hash"] != recipe_hash:
            raise RunExists(name, found["recipe"])
        return self._buffer(found, limits if reply["created"] else await self._limits(name))

    async def find_run(self, name: str) -> RedisBuffer | None:
        """The run of this name, or None. Raises BufferError if another version of asyncrl made it."""
        raw = await self._hget(name, "document")
        if raw is None:
            return None
        return self._buffer(checked_document(msgspec.json.decode(raw), self.url), await self._limits(name))

    async def runs(self) -> list[str]:
        """Names of the runs in this store."""
        found = []
        async with self.answering("listing the runs"):
            async for key in self.client.scan_iter(match="asyncrl:{*}:run", count=1000):
                found.append(key.decode()[len("asyncrl:{") : -len("}:run")])
        return sorted(found)

    async def _hget(self, name: str, field: str) -> bytes | None:
        async with self.answering(f"looking for run {name}"):
            value = await self.client.hget(f"{run_prefix(name)}:run", field)
        return value if value is None or isinstance(value, bytes) else value.encode()

    async def _limits(self, name: str) -> Limits:
        raw = await self._hget(name, "limits")
        assert raw is not None, "create writes document and limits in one act"
        return Limits(**msgspec.json.decode(raw))

    def _buffer(self, document: Mapping[str, Any], limits: Limits) -> RedisBuffer:
        from asyncrl.buffers.remote import RedisBuffer

        return RedisBuffer(self, document["name"], limits, recipe=document["recipe"])

    async def close(self) -> None:
        await self.client.aclose()
        await self.mailbox.aclose()


def answer_of(raw: bytes | str) -> Any:
    """A script's reply, its refusals as exceptions."""
    reply = msgspec.json.decode(raw)
    if isinstance(reply, dict) and "error" in reply and "message" in reply:
        kinds: dict[str, type[BufferError]] = {"fenced": Fenced, "unknown_member": UnknownMember, "no_run": NoRun}
        raise kinds.get(reply["error"], BufferError)(reply["message"])
    return reply


def may_pass(error: RedisError) -> bool:
    """Whether the server may serve the same call later."""
    if isinstance(error, AuthenticationError | exceptions.AuthorizationError):
        return False
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | exceptions.ClusterError):
        return True
    # MISCONF: it cannot write its append-only file. READONLY: a replica, until it is promoted. BUSY: somebody's script.
    passing = ("OOM command not allowed", "MISCONF", "READONLY", "TRYAGAIN", "BUSY ")
    return isinstance(error, exceptions.OutOfMemoryError | exceptions.ReadOnlyError) or any(
        word in str(error) for word in passing
    )


def run_prefix(name: str) -> str:
    """All keys of a run lie in one hash slot: the braces are Redis Cluster's."""
    return f"asyncrl:{{{name}}}"


def payload_key(prefix: str, field: str) -> str:
    """Where a group lies. field: ordinal:attempt."""
    return f"{prefix}:payload:{field}"


def limits_doc(limits: Limits) -> dict[str, Any]:
    result: dict[str, Any] = msgspec.to_builtins(limits)
    return result


def checked_document(document: dict[str, Any], url: str) -> dict[str, Any]:
    for what, mine in (("schema", SCHEMA_VERSION), ("protocol", PROTOCOL_VERSION)):
        if document.get(what) != mine:
            raise BufferError(
                f"run {document.get('name')!r} in {shown(url)} has {what} version {document.get(what)}, this asyncrl "
                f"speaks {mine}; use the asyncrl that made it, or another run.name"
            )
    return document


async def open_store(url: str) -> Store:
    """Connect, check and load the scripts. Raises BufferError naming the URL, what is wrong and the fix; it is a
    StoreAway where waiting may help."""
    if urlsplit(url).scheme not in ("redis", "rediss", "unix"):
        raise BufferError(f"store {shown(url)}: not a URL of a store; use redis://, rediss:// or unix://")
    for option in parse_qs(urlsplit(url).query, keep_blank_values=True):
        if option not in URL_OPTIONS:
            raise BufferError(f"store {shown(url)}: ?{option}= is unknown; it may have {', '.join(URL_OPTIONS)}")
    refuse_public(url)
    retries = (Retry(ExponentialBackoff(cap=1.0, base=0.05), RETRIES), Retry(ExponentialBackoff(), 0))
    client, mailbox = (
        Redis.from_url(url, socket_timeout=None, socket_connect_timeout=CONNECT_S, retry=retry) for retry in retries
    )
    store = Store(url, client, mailbox)
    try:
        await _check(url)
        await store.load()
    except BaseException:
        await store.close()
        raise
    return store


async def _check(url: str) -> None:
    """Reach the server once, without retries, and look at what it is."""
    probe = Redis.from_url(
        url, socket_timeout=CONNECT_S, socket_connect_timeout=CONNECT_S, retry=Retry(ExponentialBackoff(), 0)
    )
    try:
        async with asyncio.timeout(CONNECT_S):
            info = await probe.info()
    except AuthenticationError as error:
        raise BufferError(
            f"store {shown(url)} refused the login: {error}; check user and password in buffer.url"
        ) from None
    except exceptions.NoPermissionError as error:
        raise BufferError(
            f"store {shown(url)} does not say what it is: {error}; give this user the rules {ACL_RULES}"
        ) from None
    except (RedisError, OSError, TimeoutError) as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise BufferError(
                f"store {shown(url)} shows a certificate that is not trusted here ({error}); name the authority that "
                "signed it: rediss://...?ssl_ca_certs=/path/ca.crt"
            ) from None
        kind = StoreAway if not isinstance(error, RedisError) or may_pass(error) else BufferError
        raise kind(
            f"store {shown(url)} is unreachable ({str(error) or type(error).__name__}); start it with "
            "`asyncrl buffer serve`, or correct buffer.url"
        ) from None
    finally:
        await probe.aclose()
    version = tuple(int(part) for part in str(info.get("redis_version", "0")).split(".")[:2])
    if version < OLDEST_REDIS:
        raise BufferError(
            f"store {shown(url)} is version {info.get('redis_version')}; asyncrl needs Redis 6.2 or Valkey"
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise BufferError(
            f"store {shown(url)} may evict keys (maxmemory-policy {policy}), which would lose trajectories; run "
            "`CONFIG SET maxmemory-policy noeviction`"
        )
