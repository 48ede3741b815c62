"""The SGLang engine: a server that runs already, with a GPU of its own, behind the protocol of engines.

What is asyncrl's own: weights reach the server as a model folder (`sglang_folder.py`), while nothing is sampled, and no
token is sampled from them before the checksums of the server's live tensors were compared with those of the published
ones (`sglang_served.py`). The server labels every token with the version its step ran under.

Of the server's ways to pause, only `retract` keeps those labels exact: it counts the tokens of the step that runs
before it stops. Under `in_place` they are counted after the label changed (`Scheduler.pause_generation`, 0.5.23). So
running requests always have their keys and values computed anew; to keep them is refused. The server drops all others
with every load: no prefix outlives its weights.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from asyncrl.buffers.concurrency import in_thread
from asyncrl.collectors.engines.base import Completion, Engine, EngineError, KvMode, Request
from asyncrl.collectors.engines.parts import continued, joined
from asyncrl.collectors.engines.refusal import refusal, truncation
from asyncrl.collectors.engines.sglang_folder import Versions
from asyncrl.collectors.engines.sglang_request import Answer, body_of, inexact
from asyncrl.collectors.engines.sglang_served import expected
from asyncrl.collectors.engines.sglang_server import RefusedError, SglangServer, refused
from asyncrl.collectors.engines.spans import Served
from asyncrl.collectors.engines.vllm_request import completion_of, label_of
from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights, WeightsError

ABORT_AGAIN_S, GIVE_UP_S = 0.5, 5.0
"""The server hears nothing of an abort that overtakes its request. What does not end is given up, with its tokens."""

START_S = 120.0
"""For a server to say what it is, and to hash what it was started with."""

CLOSE_S = 5.0
"""For requests to hear that the engine ended, and for the server to hear of it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Version:
    """Weights that lie ready to be loaded, or are served."""

    served: Served
    folder: Path
    live: Mapping[str, str]  # the checksums that the server must report
    checksum: str  # combined, also of a version that was published unhashed


@dataclass(slots=True, eq=False)
class _Running:
    """A request that somebody waits for. `answer` is of its newest part."""

    task: asyncio.Task[Completion] | None = None
    part: asyncio.Task[Completion] | None = None  # the newest one
    rid: str = ""  # of that part, as the server knows it
    answer: Answer = field(default_factory=Answer)  # of that part
    before: int = 0  # tokens of its earlier parts
    aborted: bool = False
    given_up: bool = False


class SglangEngine(Engine):
    """`url`: of a server that no one else uses. `slots`: requests it is given at once. `max_length` bounds prompt +
    completion in tokens; None: the server's own bound. `folder`: that the server sees under the same path; None: it
    runs on this host. `api_key_env`: the environment variable that has the server's key.

    For metrics: `generated_tokens` and `paused_s` (seconds in which generation was paused for other weights), totals.
    """

    def __init__(
        self,
        name: str,
        model_path: Path,
        *,
        url: str,
        slots: int,
        max_length: int | None,
        folder: str | None,
        api_key_env: str | None,
        trust_remote_code: bool,
    ) -> None:
        if slots < 1:
            raise ValueError(f"an engine needs at least one slot, got {slots}")
        self.name = name
        self.generated_tokens = 0
        self.paused_s = 0.0
        self._model_path, self._trust_remote_code = model_path, trust_remote_code
        self._url, self._slots, self._max_length, self._parent = url, slots, max_length, folder
        self._api_key_env = api_key_env
        self._server: SglangServer | None = None
        self._versions: Versions | None = None
        self._device = ""  # of the server
        self._live: list[str] = []  # what the server's tensors are called
        self._limit = self._vocabulary = 0
        self._served: _Version | None = None
        self._staged: _Version | None = None
        self._running: dict[str, _Running] = {}
        self._aborting: set[asyncio.Task[None]] = set()
        self._exchange = asyncio.Lock()  # one at a time: an activation, or a look at what is served
        self._open = asyncio.Event()  # requests may begin
        self._ended: EngineError | None = None

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def free_slots(self) -> int:
        return max(0, self._slots - len(self._running))

    @property
    def serving(self) -> Weights | None:
        return self._served.served.weights if self._served else None

    @property
    def checksum(self) -> str:
        return self._served.served.checksum if self._served else ""

    @property
    def device(self) -> str:
        """Where weights are to be brought to: they are written to a folder from there."""
        return "cpu"

    async def start(self) -> None:
        """Ask the server what it is. Raises EngineError if it cannot be reached, or was not started as it must be."""
        if self._server is not None:
            raise EngineError(f"engine {self.name} is running: close() it before start()")
        self._ended = None
        server = self._server = SglangServer(
            self._url, api_key=os.environ[self._api_key_env] if self._api_key_env else None
        )
        try:
            async with asyncio.timeout(START_S):
                await self._meet(server)
        except TimeoutError as error:
            raise EngineError(f"the SGLang server at {self._url} did not answer within {START_S:g} s") from error
        try:
            self._versions = Versions(self._parent)
        except OSError as error:
            raise EngineError(f"engine {self.name}: no folder for weights: {error}") from error
        self._open.set()

    async def _meet(self, server: SglangServer) -> None:
        info = await self._call(server.info())
        if why := refused(info):
            raise EngineError(f"engine {self.name}: the SGLang server at {self._url} cannot be used: {why}")
        await self._call(server.abort_all())  # of a collector that was killed
        self._device = str(info["device"])
        self._live = sorted(await self._call(server.checksums()))
        self._limit = min(self._max_length or info["max_req_input_len"], info["max_req_input_len"])
        self._vocabulary = await asyncio.to_thread(self._vocabulary_of_model)

    async def generate(self, request: Request) -> Completion:
        """See Engine. Cancelling it ends the request."""
        self._alive()
        if self._served is None:
            raise EngineError(f"engine {self.name} serves nothing yet: stage and activate weights before generate()")
        why = (
            refusal(request, limit=self._limit, vocabulary=self._vocabulary) or truncation(request) or inexact(request)
        )
        if request.id in self._running:
            why = "a request of this id is running: ids must be unique"
        if why:
            raise ValueError(f"request {request.id}: {why}")
        running = self._running[request.id] = _Running()
        running.task = asyncio.create_task(self._answered(running, request), name=f"request {request.id}")
        try:
            return await running.task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._ended is not None and not (current and current.cancelling()):
                raise self._error() from None  # `_end` cancelled the request, nobody its caller
            raise
        finally:
            del self._running[request.id]

    def abort(self, request_ids: Sequence[str]) -> None:
        """See Engine. One that has not begun ends without a token."""
        for running in [self._running[id] for id in request_ids if id in self._running]:
            if not running.aborted:
                running.aborted = True
                aborting = asyncio.create_task(self._part_ends(running))
                self._aborting.add(aborting)
                aborting.add_done_callback(self._aborting.discard)

    def progress(self, request_id: str) -> int:
        running = self._running.get(request_id)
        return running.before + len(running.answer.tokens) if running else 0

    async def stage(self, staged: StagedWeights) -> None:
        """Write a model folder and compute what the server must report of it. Raises WeightsError if the weights are
        not what the server's model consists of; EngineError if they are the first ones: then no others would fit."""
        self._alive()
        if staged.adapter is not None:
            raise WeightsError(
                f"weights {tuple(staged.weights)} are an adapter, and SGLang is given merged weights only"
            )
        try:
            version = await in_thread(lambda: self._written(staged))
        except WeightsError as error:
            wrong = f"weights {tuple(staged.weights)} do not fit the served model: {error}"
            raise (EngineError if self._served is None else WeightsError)(wrong) from error
        except OSError as error:
            raise EngineError(
                f"engine {self.name}: weights {tuple(staged.weights)} cannot be written: {error}"
            ) from error
        replaced, self._staged = self._staged, version
        if replaced is not None and replaced.folder != version.folder:
            await _removed(replaced)

    async def activate(self, kv: KvMode = "keep", *, exchanged: Callable[[], None] | None = None) -> Weights:
        """See Engine; raises WeightsError if nothing is staged, or for `keep` while requests run. What fails later
        leaves the server paused, with a model that is neither: it is an EngineError, and nothing is generated until the
        engine is started again."""
        server = self._alive()
        async with self._exchange:
            if self._staged is None:
                raise WeightsError("no weights are staged: call stage() before activate()")
            if kv == "keep" and self._running:
                raise WeightsError("SGLang cannot keep keys and values and label each token right: use recompute")
            version, self._staged = self._staged, None
            began = time.perf_counter()
            self._open.clear()
            try:
                await self._call(self._exchanged(server, version, exchanged))
            except BaseException as error:
                self._end(
                    error if isinstance(error, EngineError) else EngineError("an activation was given up half-way")
                )
                raise
            finally:
                self._open.set()
            self.paused_s += time.perf_counter() - began
        return version.served.weights

    async def verify(self) -> tuple[Weights, str]:
        """See Engine. The server does one thing at a time: decoding stands still for as long as it hashes."""
        from asyncrl.weights.manifest import combine

        server = self._alive()
        async with self._exchange:
            if self._served is None:
                raise EngineError(f"engine {self.name} serves nothing")
            live = await self._call(server.checksums())
            served = self._served
        return served.served.weights, served.checksum if live == served.live else combine(live.values())

    async def close(self) -> None:
        """Let go of the server, which goes on; what still runs raises EngineError."""
        self._end(EngineError("it was closed"))
        if ending := [running.task for running in self._running.values() if running.task is not None]:
            await asyncio.wait(ending, timeout=CLOSE_S)
        server, self._server, self._served, self._staged = self._server, None, None, None
        if server is not None:
            with suppress(EngineError, RefusedError, TimeoutError):  # it may be what failed
                async with asyncio.timeout(CLOSE_S):
                    await server.abort_all()
            await server.close()
        if self._versions is not None:
            self._versions.close()
            self._versions = None

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _answered(self, running: _Running, request: Request) -> Completion:
        """The answer, of one part, or of more where the server stopped at a token that the request does not stop at."""
        nothing = completion_of([], [], (), "abort")
        parts: list[Completion] = []
        while True:
            await self._open.wait()  # an activation ends, or `_end` cancels this
            if running.aborted:
                return joined([*parts, nothing])
            running.part = asyncio.create_task(self._part(running, request))
            try:
                part = await running.part
            except asyncio.CancelledError:
                if not running.given_up:
                    raise
                return joined([*parts, nothing])
            parts.append(part)
            if part.finish_reason != "stop" or not running.answer.elsewhere(request):
                return joined(parts)
            count = len(part.token_ids)
            if count == min(request.sampling.max_tokens, self._limit - len(request.token_ids)):
                return replace(joined(parts), finish_reason="length")
            running.before += count
            request = continued(request, part)

    async def _part(self, running: _Running, request: Request) -> Completion:
        server, answer = self._alive(), Answer()
        # The server aborts all requests whose id *begins* with the one it is told: these have one length.
        running.rid, running.answer = uuid.uuid4().hex, answer
        try:
            async with aclosing(server.generate(body_of(request, running.rid, limit=self._limit))) as parts:
                async for part in parts:
                    self.generated_tokens += answer.add(part)
                    if answer.error:
                        break  # the server ends what nobody listens to any more
        except RefusedError as error:
            raise ValueError(f"request {request.id}: SGLang refuses it: {error}") from error
        except (EngineError, LookupError, TypeError) as error:
            self._end(self._not_sglang(error))
            raise self._error() from error
        return answer.completion()

    async def _part_ends(self, running: _Running) -> None:
        """Have the server end the newest part with what it has, or give the part up."""
        if (part := running.part) is None or self._server is None:
            return  # it has not begun, and will not
        with suppress(EngineError, RefusedError, TimeoutError):  # of a dead server, which the part hears of itself
            async with asyncio.timeout(GIVE_UP_S):
                while not part.done():
                    await self._server.abort(running.rid)
                    await asyncio.wait([part], timeout=ABORT_AGAIN_S)
        if not part.done():
            running.given_up = True
            part.cancel()

    # --- weights ------------------------------------------------------------------------------------------------------

    def _written(self, staged: StagedWeights) -> _Version:
        from asyncrl.weights.manifest import combined_checksum

        assert self._versions is not None, "start() makes it"
        live = expected(staged, self._live, device=self._device)
        checksum = staged.checksum or combined_checksum(staged.tensors.items())
        return _Version(Served(staged.weights, staged.checksum), self._versions.write(staged), live, checksum)

    async def _exchanged(self, server: SglangServer, version: _Version, exchanged: Callable[[], None] | None) -> None:
        """Pause, load and label, prove, go on. Running requests stay with the server, which does no step meanwhile."""
        if self._served is not None and (label := await server.label()) != label_of(self._served.served):
            raise EngineError(
                f"the SGLang server at {self._url} serves {label}, {label_of(self._served.served)} was loaded: "
                "another process updates it. Give each collector a server of its own"
            )
        await server.pause()
        await server.load(str(version.folder), label_of(version.served))
        if exchanged is not None:
            exchanged()
        live = await server.checksums()
        if wrong := sorted(name for name in {*live, *version.live} if live.get(name) != version.live.get(name)):
            raise EngineError(
                f"what the SGLang server at {self._url} computes with is not what was published: {len(wrong)} of "
                f"{len(live)} tensors differ, {wrong[0]} among them. Is its --dtype that of model.dtype?"
            )
        self._served = version
        await server.resume()
        await _removed(version)  # it is in the server's memory, and not read again

    def _vocabulary_of_model(self) -> int:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self._model_path, trust_remote_code=self._trust_remote_code)
        return int(config.get_text_config().vocab_size)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _alive(self) -> SglangServer:
        if self._ended is not None:
            raise self._error()
        if self._server is None:
            raise EngineError(f"engine {self.name} is not started")
        return self._server

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except RefusedError as error:
            raise EngineError(f"engine {self.name}: the SGLang server at {self._url} refuses: {error}") from error
        except (LookupError, TypeError) as error:
            raise self._not_sglang(error) from error

    def _not_sglang(self, error: Exception) -> EngineError:
        """What a server failed with, or an answer that is none of SGLang's."""
        if isinstance(error, EngineError):
            return error
        return EngineError(f"engine {self.name}: the server at {self._url} does not answer as SGLang does: {error!r}")

    def _end(self, cause: EngineError) -> None:
        """Nothing is generated any more: nobody may wait for it any longer."""
        self._ended = self._ended or cause
        for running in self._running.values():
            if running.task is not None and running.task is not asyncio.current_task():
                running.task.cancel()

    def _error(self) -> EngineError:
        error = EngineError(f"engine {self.name} does not generate any more: {self._ended}")
        error.__cause__ = self._ended
        return error


async def _removed(version: _Version) -> None:
    await in_thread(lambda: shutil.rmtree(version.folder, ignore_errors=True))
