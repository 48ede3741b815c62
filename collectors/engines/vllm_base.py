"""What every vLLM engine is: requests, updates and their proof, over what vLLM's `AsyncLLM` can do. Whose processes
vLLM computes in, and how they are called, is the matter of `vllm.py` (the engine's own) and `vllm_server.py` (a
server's).

What is asyncrl's own: weights come through vLLM's weight transfer as images in shared memory (`vllm_worker.py`), and no
token is sampled from them before what the worker computes with was read back and compared with what was published.
vLLM labels every token with the version its step ran under; the label is exact because it changes only while generation
is paused. A prefix computed under one version is never found by a request that begins under another: its cache key is
salted with the label.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from asyncrl.collectors.engines.base import Completion, EngineError, KvMode, Request
from asyncrl.collectors.engines.spans import Served, label_of
from asyncrl.collectors.engines.streamed import Running, StreamedEngine
from asyncrl.collectors.engines.vllm_request import VllmAnswer, inexact, prompt_of
from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights, WeightsError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from asyncrl.collectors.engines.vllm_client import VllmClient
    from asyncrl.weights.image import Images

    Llm: TypeAlias = AsyncLLM | VllmClient

ABORT_AGAIN_S = 0.05

CLOSE_S = 30.0
"""For what ends to end."""

T = TypeVar("T")


class VllmBase(StreamedEngine):
    """An engine over vLLM.

    What it asks of vLLM it calls by the names of `AsyncLLM`, whose place another object with them may take.
    """

    server = "vLLM"

    def __init__(self, name: str, model_path: Path, *, slots: int, trust_remote_code: bool) -> None:
        super().__init__(name, model_path, slots=slots, trust_remote_code=trust_remote_code)
        self._llm: Llm | None = None
        self._images: Images | None = None  # of weights that do not lie in shared memory yet
        self._most = 0  # log-probs that vLLM gives for a token
        self._parts = 0  # named so far
        self._staged: tuple[StagedWeights, dict[str, Any]] | None = None  # with the offer that the worker maps

    async def start(self) -> None:
        """See Engine. Raises EngineError, which says what to do if there is no vLLM that asyncrl could use."""
        if self._llm is not None:
            raise EngineError(f"engine {self.name} is running: close() it before start()")
        self._ended = None
        self._llm = await self._begin()
        self._opened()

    async def stage(self, staged: StagedWeights) -> None:
        """Have the weights in memory that vLLM's worker can map: where they lie, if another process can map them there,
        else as a copy. Raises WeightsError if they are not what the served model consists of; EngineError if they are
        the first ones: then vLLM has this architecture in another form, and no others would fit."""
        llm = self._alive()
        if staged.adapter is not None:
            raise WeightsError(f"weights {tuple(staged.weights)} are an adapter, and vLLM is given merged weights only")
        from asyncrl.weights.manifest import dtype_name

        forms = [(name, dtype_name(tensor.dtype), list(tensor.shape)) for name, tensor in staged.tensors.items()]
        (wrong,) = await self._call(llm.collective_rpc("asyncrl_check", args=(forms, dict(staged.tied))))
        if wrong:
            wrong = f"weights {tuple(staged.weights)} do not fit the served model: {wrong}"
            raise EngineError(wrong) if self._served is None else WeightsError(wrong)
        offer = await asyncio.to_thread(self._copied, staged) if staged.offer is None else dict(staged.offer)
        self._staged = (staged, offer)

    async def activate(self, kv: KvMode = "keep", *, exchanged: Callable[[], None] | None = None) -> Weights:
        """See Engine. Raises WeightsError if nothing is staged. What fails later leaves a model that is neither: it is
        an EngineError, after which nothing is generated until the engine is started again."""
        llm = self._alive()
        async with self._exchange:
            if self._staged is None:
                raise WeightsError("no weights are staged: call stage() before activate()")
            (staged, offer), self._staged = self._staged, None
            served = Served(staged.weights, staged.checksum)
            async with self._exchanging():
                await self._call(self._exchanged(llm, served, offer, kv, exchanged))
        return served.weights

    async def check(self) -> None:
        """See Engine. Whether vLLM's processes live: it says so beside what its worker does."""
        await self._call(self._alive().check_health())

    async def verify(self) -> tuple[Weights, str]:
        """See Engine. vLLM's worker does one thing at a time: decoding stands still for as long as it reads."""
        llm = self._alive()
        async with self._exchange:
            if self._served is None:
                raise EngineError(f"engine {self.name} serves nothing")
            return self._served.weights, await self._call(self._proven(llm))

    async def close(self) -> None:
        """See Engine."""
        await self._all_ended(CLOSE_S)
        llm, self._llm, self._served, self._staged = self._llm, None, None, None
        if llm is not None:
            await self._release(llm)
        if self._images is not None:
            self._images.close()
            self._images = None

    # --- requests -----------------------------------------------------------------------------------------------------

    def _inexact(self, request: Request) -> str:
        return inexact(request, vocabulary=self._vocabulary, most=self._most)

    def _begun(self, request: Request, served: Served) -> VllmAnswer:
        return VllmAnswer(request, served, self._stops(request), vocabulary=self._vocabulary)

    def _ask(self, running: Running, request: Request) -> AsyncGenerator[Any, None]:
        llm, served = self._alive(), self._served
        assert served is not None, "`_part` sees to it"
        self._parts += 1
        running.name = f"{request.id}#{self._parts}"
        return llm.generate(prompt_of(request, served), self._sampling(request), running.name)

    def _failure(self, request: Request, error: Exception) -> EngineError:
        if isinstance(error, EngineError):
            return error
        failure = EngineError(f"vLLM failed at request {request.id}: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure

    def _goes_on(self, running: Running, request: Request, part: Completion) -> bool:
        """An activation came before the part's first token: `_begin_again`."""
        again, running.again = running.again, False
        return again and part.finish_reason == "abort" and not running.aborted

    async def _parts_end(self, running: Sequence[Running]) -> None:
        """See StreamedEngine. They end with the engine at the latest (`_end`)."""
        while (llm := self._llm) and (parts := [one.part for one in running if one.part and not one.part.done()]):
            with suppress(Exception):  # of a dead engine, which the parts hear of themselves
                await llm.abort([one.name for one in running])
            await asyncio.wait(parts, timeout=ABORT_AGAIN_S)

    # --- weights ------------------------------------------------------------------------------------------------------

    async def _exchanged(
        self,
        llm: Llm,
        served: Served,
        offer: dict[str, Any],
        kv: KvMode,
        exchanged: Callable[[], None] | None,
    ) -> None:
        """Pause, load, prove, label, resume. Running requests stay with vLLM, which does no step meanwhile."""
        # clear_cache: what runs is preempted, and its keys and values are computed anew when it goes on.
        await llm.pause_generation(mode="keep", clear_cache=kv == "recompute")
        if kv == "keep":
            await self._begin_again()
        await llm.start_weight_update()
        await self._load(llm, offer)
        await llm.finish_weight_update()
        if exchanged is not None:
            exchanged()
        if served.checksum and (found := await self._proven(llm)) != served.checksum:
            raise EngineError(f"the vLLM model has checksum {found}, {served.checksum} was published")
        await llm.update_weight_version(label_of(served))
        self._exchanged_for(served)
        await llm.resume_generation()

    async def _begin_again(self) -> None:
        """What has no token yet would find its prompt under the salt of the old version, or leave it there, computed by
        the new one: it ends, and begins again when the exchange is over. Nothing here waits for a step of vLLM's; the
        whole activation has a deadline."""
        waiting = [one for one in self._running.values() if one.part and one.answer and not one.answer.sampled]
        for one in waiting:
            one.again = True
        await self._parts_end(waiting)

    async def _proven(self, llm: Llm) -> str:
        """The checksum of what the worker computes with. Raises EngineError if it contradicts itself."""
        ((checksum, wrong),) = await llm.collective_rpc("asyncrl_prove")
        if wrong:
            raise EngineError(f"the vLLM model is not what was published: {wrong}")
        return str(checksum)

    def _copied(self, staged: StagedWeights) -> dict[str, Any]:
        """The offer of a copy in shared memory."""
        from asyncrl.weights.image import Images
        from asyncrl.weights.shm import shm_offer

        if self._images is None:
            self._images = Images(f"engine {self.name}")
        image = self._images.write(staged.weights, staged.tensors.items(), tied=staged.tied, hashed=False)
        return shm_offer(image)

    # --- whose vLLM it is ---------------------------------------------------------------------------------------------

    @abstractmethod
    async def _begin(self) -> Llm:
        """vLLM, of which `_limit`, `_vocabulary` and `_most` are known then. Raises EngineError."""

    @abstractmethod
    def _sampling(self, request: Request) -> Any:
        """How the request is sampled, as `generate` of this vLLM takes it."""

    @abstractmethod
    async def _load(self, llm: Llm, offer: dict[str, Any]) -> None:
        """Have vLLM load the image of an offer, between the start and the end of an update."""

    @abstractmethod
    async def _release(self, llm: Llm) -> None:
        """Nothing is asked of it any more."""

    # --- the end ------------------------------------------------------------------------------------------------------

    @property
    def _started(self) -> bool:
        return self._llm is not None

    def _alive(self) -> Llm:
        self._check_started()
        assert self._llm is not None
        return self._llm

    async def _call(self, call: Awaitable[T]) -> T:
        """What a call to vLLM returns. Raises EngineError for all that it raises."""
        try:
            return await call
        except (EngineError, WeightsError):
            raise
        except Exception as error:
            raise EngineError(f"engine {self.name}: vLLM failed: {type(error).__name__}: {error}") from error
