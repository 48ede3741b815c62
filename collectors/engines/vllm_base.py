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
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from asyncrl.collectors.engines.base import Completion, Engine, EngineError, KvMode, Request
from asyncrl.collectors.engines.parts import continued, joined
from asyncrl.collectors.engines.refusal import refusal, truncation
from asyncrl.collectors.engines.spans import Served
from asyncrl.collectors.engines.vllm_request import Answer, completion_of, label_of, prompt_of, too_cold
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


@dataclass(slots=True, eq=False)
class _Running:
    """A request that somebody waits for. `answer` is of its newest part."""

    task: asyncio.Task[Completion] | None = None
    part: asyncio.Task[Completion] | None = None  # the newest one
    name: str = ""  # of that part, as vLLM knows it
    answer: Answer = field(default_factory=Answer)  # of that part
    before: int = 0  # tokens of its earlier parts
    aborted: bool = False  # by the caller
    again: bool = False  # its part ends to begin again under other weights


class VllmBase(Engine):
    """An engine over vLLM; `slots` requests decode at once. For metrics: `generated_tokens` and `paused_s` (seconds in
    which generation was paused for other weights), totals.

    What it asks of vLLM it calls by the names of `AsyncLLM`, whose place another object with them may take.
    """

    def __init__(self, name: str, *, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"an engine needs at least one slot, got {slots}")
        self.name = name
        self.generated_tokens = 0
        self.paused_s = 0.0
        self._slots = slots
        self._llm: Llm | None = None
        self._images: Images | None = None  # of weights that do not lie in shared memory yet
        self._limit = self._vocabulary = 0  # tokens of prompt and answer; ids
        self._parts = 0  # named so far
        self._served: Served | None = None
        self._staged: tuple[StagedWeights, dict[str, Any]] | None = None  # with the offer that the worker maps
        self._running: dict[str, _Running] = {}
        self._aborting: set[asyncio.Task[None]] = set()
        self._exchange = asyncio.Lock()  # one at a time: an activation, or a look at what is served
        self._open = asyncio.Event()  # requests may begin: the version they begin under stays until they have
        self._ended: BaseException | None = None

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def free_slots(self) -> int:
        return max(0, self._slots - len(self._running))

    @property
    def serving(self) -> Weights | None:
        return self._served.weights if self._served else None

    @property
    def checksum(self) -> str:
        return self._served.checksum if self._served else ""

    @property
    def device(self) -> str:
        """Where weights are to be brought to: vLLM's worker fetches them from shared memory, wherever it computes."""
        return "cpu"

    async def start(self) -> None:
        """See Engine. Raises EngineError, which says what to do if there is no vLLM that asyncrl could use."""
        if self._llm is not None:
            raise EngineError(f"engine {self.name} is running: close() it before start()")
        self._ended = None
        self._llm, self._limit, self._vocabulary = await self._begin()
        self._open.set()

    async def generate(self, request: Request) -> Completion:
        """See Engine. Cancelling it aborts the request."""
        if self._ended is not None:
            raise self._error()
        if self._served is None:
            raise EngineError(f"engine {self.name} serves nothing yet: stage and activate weights before generate()")
        why = (
            refusal(request, limit=self._limit, vocabulary=self._vocabulary) or truncation(request) or too_cold(request)
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
        aborted = [self._running[request_id] for request_id in request_ids if request_id in self._running]
        for running in aborted:
            running.aborted = True
        if aborted:
            self._abort(aborted)

    def progress(self, request_id: str) -> int:
        running = self._running.get(request_id)
        return running.before + len(running.answer.tokens) if running else 0

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
            began = time.perf_counter()
            self._open.clear()
            try:
                await self._call(self._exchanged(llm, served, offer, kv, exchanged))
            except BaseException as error:
                self._end(error if isinstance(error, Exception) else EngineError("an activation was given up half-way"))
                raise
            finally:
                self._open.set()
            self.paused_s += time.perf_counter() - began
        return served.weights

    async def verify(self) -> tuple[Weights, str]:
        """See Engine. vLLM's worker does one thing at a time: decoding stands still for as long as it reads."""
        llm = self._alive()
        async with self._exchange:
            if self._served is None:
                raise EngineError(f"engine {self.name} serves nothing")
            return self._served.weights, await self._call(self._proven(llm))

    async def close(self) -> None:
        """See Engine."""
        self._end(EngineError("it was closed"))
        if ending := [running.task for running in self._running.values() if running.task is not None]:
            await asyncio.wait(ending, timeout=CLOSE_S)
        llm, self._llm, self._served, self._staged = self._llm, None, None, None
        if llm is not None:
            await self._release(llm)
        if self._images is not None:
            self._images.close()
            self._images = None

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _answered(self, running: _Running, request: Request) -> Completion:
        """The answer, of one part, or of more where an activation came before a part's first token."""
        parts: list[Completion] = []
        while True:
            await self._open.wait()  # an activation ends, or `_end` cancels this
            if running.aborted:
                return joined([*parts, completion_of([], [], (), "abort")])
            running.part = asyncio.create_task(self._part(running, request))
            parts.append(await running.part)
            if not running.again or parts[-1].finish_reason != "abort" or running.aborted:
                return joined(parts)
            running.again = False
            running.before += len(parts[-1].token_ids)
            request = continued(request, parts[-1])

    async def _part(self, running: _Running, request: Request) -> Completion:
        llm, served = self._alive(), self._served
        assert served is not None, "generate() refuses requests before the first activation"
        self._parts += 1
        running.name = f"{request.id}#{self._parts}"
        answer = running.answer = Answer()
        params = self._sampling(request)
        try:
            async for output in llm.generate(prompt_of(request, served), params, running.name):
                self.generated_tokens += answer.add(output.outputs[0])
                if answer.error and not output.finished:
                    self._abort([running])
        except ValueError as error:
            raise ValueError(f"request {request.id}: vLLM refuses it: {error}") from error
        except Exception as error:
            failed = EngineError(f"vLLM failed at request {request.id}: {type(error).__name__}: {error}")
            failed.__cause__ = error
            self._end(failed)
            raise self._error() from error
        return answer.completion()

    def _abort(self, running: Sequence[_Running]) -> None:
        """Have vLLM end these parts with what they have. Waits for nothing."""
        aborting = asyncio.create_task(self._parts_end(running))
        self._aborting.add(aborting)
        aborting.add_done_callback(self._aborting.discard)

    async def _parts_end(self, running: Sequence[_Running]) -> None:
        """Abort these parts until they have ended: vLLM hears nothing of an abort that overtakes its request. They end
        with the engine at the latest (`_end`)."""
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
        self._served = served
        await llm.resume_generation()

    async def _begin_again(self) -> None:
        """What has no token yet would find its prompt under the salt of the old version, or leave it there, computed by
        the new one: it ends, and begins again when the exchange is over. Nothing here waits for a step of vLLM's; the
        whole activation has a deadline."""
        waiting = [one for one in self._running.values() if one.part and not one.answer.tokens]
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
    async def _begin(self) -> tuple[Llm, int, int]:
        """vLLM, the tokens that a prompt and its answer may have, and the number of ids. Raises EngineError."""

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

    def _alive(self) -> Llm:
        if self._ended is not None:
            raise self._error()
        if self._llm is None:
            raise EngineError(f"engine {self.name} is not started")
        return self._llm

    async def _call(self, call: Awaitable[T]) -> T:
        """What a call to vLLM returns. Raises EngineError for all that it raises."""
        try:
            return await call
        except (EngineError, WeightsError):
            raise
        except Exception as error:
            raise EngineError(f"engine {self.name}: vLLM failed: {type(error).__name__}: {error}") from error

    def _end(self, cause: BaseException) -> None:
        """Nothing is generated any more: nobody may wait for it any longer."""
        if self._ended is None:
            self._ended = cause
        for running in self._running.values():
            if running.task is not None and running.task is not asyncio.current_task():
                running.task.cancel()

    def _error(self) -> EngineError:
        cause = self._ended
        detail = str(cause) if isinstance(cause, EngineError) else f"{type(cause).__name__}: {cause}"
        error = EngineError(f"engine {self.name} does not generate any more: {detail}")
        error.__cause__ = cause
        return error
