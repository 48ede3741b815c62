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
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.buffers.concurrency import in_thread
from asyncrl.collectors.engines.base import Completion, EngineError, KvMode, Request
from asyncrl.collectors.engines.sglang_folder import Versions
from asyncrl.collectors.engines.sglang_request import SglangAnswer, body_of, inexact
from asyncrl.collectors.engines.sglang_served import expected
from asyncrl.collectors.engines.sglang_server import RefusedError, SglangServer, refused
from asyncrl.collectors.engines.spans import Served, label_of
from asyncrl.collectors.engines.streamed import ForeignWeightsError, Running, StreamedEngine
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


class SglangEngine(StreamedEngine):
    """`url`: of a server that no one else uses. `max_length` bounds prompt + completion in tokens; None: the server's
    own bound. `folder`: that the server sees under the same path; None: it runs on this host. `api_key_env`: the
    environment variable that has the server's key.
    """

    server = "SGLang"

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
        super().__init__(name, model_path, slots=slots, trust_remote_code=trust_remote_code)
        self._url, self._max_length, self._parent = url, max_length, folder
        self._api_key_env = api_key_env
        self._server: SglangServer | None = None
        self._versions: Versions | None = None
        self._device = ""  # of the server
        self._live: list[str] = []  # what the server's tensors are called
        self._version: _Version | None = None  # that is served
        self._staged: _Version | None = None

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
        self._opened()

    async def _meet(self, server: SglangServer) -> None:
        info = await self._call(server.info())
        if why := refused(info):
            raise EngineError(f"engine {self.name}: the SGLang server at {self._url} cannot be used: {why}")
        await self._call(server.abort_all())  # of a collector that was killed
        self._device = str(info["device"])
        self._live = sorted(await self._call(server.checksums()))
        self._limit = min(self._max_length or info["max_req_input_len"], info["max_req_input_len"])
        self._vocabulary = await asyncio.to_thread(self._vocabulary_of_model)

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
            async with self._exchanging():
                await self._call(self._exchanged(server, version, exchanged))
        return version.served.weights

    async def check(self) -> None:
        """See Engine. Whether the server answers: its `/health` would have it sample a token."""
        await self._call(self._alive().label())

    async def verify(self) -> tuple[Weights, str]:
        """See Engine. The server does one thing at a time: decoding stands still for as long as it hashes."""
        from asyncrl.weights.manifest import combine

        server = self._alive()
        async with self._exchange:
            if (version := self._version) is None:
                raise EngineError(f"engine {self.name} serves nothing")
            live = await self._call(server.checksums())
        return version.served.weights, version.checksum if live == version.live else combine(live.values())

    async def close(self) -> None:
        """Let go of the server, which goes on; what still runs raises EngineError."""
        await self._all_ended(CLOSE_S)
        server, self._server = self._server, None
        self._served, self._version, self._staged = None, None, None
        if server is not None:
            with suppress(EngineError, RefusedError, TimeoutError):  # it may be what failed
                async with asyncio.timeout(CLOSE_S):
                    await server.abort_all()
            await server.close()
        if self._versions is not None:
            self._versions.close()
            self._versions = None

    # --- requests -----------------------------------------------------------------------------------------------------

    def _inexact(self, request: Request) -> str:
        return inexact(request)

    def _begun(self, request: Request, served: Served) -> SglangAnswer:
        return SglangAnswer(request, served, self._stops(request), limit=self._limit)

    def _ask(self, running: Running, request: Request) -> AsyncGenerator[dict[str, Any], None]:
        # The server aborts all requests whose id *begins* with the one it is told: these have one length.
        running.name = uuid.uuid4().hex
        return self._alive().generate(body_of(request, running.name, limit=self._limit))

    def _failure(self, request: Request, error: Exception) -> EngineError:
        return self._not_sglang(error)

    def _goes_on(self, running: Running, request: Request, part: Completion) -> bool:
        """The server stopped at a token that the request does not stop at."""
        assert isinstance(running.answer, SglangAnswer), "a part has come of it"
        return part.finish_reason == "stop" and running.answer.elsewhere

    async def _parts_end(self, running: Sequence[Running]) -> None:
        """See StreamedEngine. What the server does not end is given up."""
        server = self._server
        parts = [one.part for one in running if one.part is not None]
        if server is None or not parts:
            return  # they have not begun, and will not
        with suppress(EngineError, RefusedError, TimeoutError):  # of a dead server, which the parts hear of themselves
            async with asyncio.timeout(GIVE_UP_S):
                while left := [one for one in running if one.part is not None and not one.part.done()]:
                    for one in left:
                        await server.abort(one.name)
                    await asyncio.wait(parts, timeout=ABORT_AGAIN_S)
        for one in running:
            if one.part is not None and not one.part.done():
                one.given_up = True
                one.part.cancel()

    # --- weights ------------------------------------------------------------------------------------------------------

    def _written(self, staged: StagedWeights) -> _Version:
        from asyncrl.weights.manifest import combined_checksum

        assert self._versions is not None, "start() makes it"
        live = expected(staged, self._live, device=self._device)
        checksum = staged.checksum or combined_checksum(staged.tensors.items())
        return _Version(Served(staged.weights, staged.checksum), self._versions.write(staged), live, checksum)

    async def _exchanged(self, server: SglangServer, version: _Version, exchanged: Callable[[], None] | None) -> None:
        """Pause, load and label, prove, go on. Running requests stay with the server, which does no step meanwhile."""
        if self._served is not None and (label := await server.label()) != label_of(self._served):
            raise ForeignWeightsError(
                f"the SGLang server at {self._url} serves {label}, {label_of(self._served)} was loaded: "
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
        self._version = version
        self._exchanged_for(version.served)
        await server.resume()
        await _removed(version)  # it is in the server's memory, and not read again

    def _vocabulary_of_model(self) -> int:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self._model_path, trust_remote_code=self._trust_remote_code)
        return int(config.get_text_config().vocab_size)

    # --- the end ------------------------------------------------------------------------------------------------------

    @property
    def _started(self) -> bool:
        return self._server is not None

    def _alive(self) -> SglangServer:
        self._check_started()
        assert self._server is not None
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


async def _removed(version: _Version) -> None:
    await in_thread(lambda: shutil.rmtree(version.folder, ignore_errors=True))
