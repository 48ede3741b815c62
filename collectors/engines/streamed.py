"""The frame of engines whose answers a server streams: requests, their aborts, what is known of them while they run,
and the end of all. What is asked of the server, and how weights get there, is the matter of each engine.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from asyncrl.buffers.concurrency import in_thread
from asyncrl.collectors.engines.answer import Answer, nothing
from asyncrl.collectors.engines.base import Completion, Engine, EngineError, Request
from asyncrl.collectors.engines.parts import continued, joined
from asyncrl.collectors.engines.refusal import refusal
from asyncrl.collectors.engines.spans import Served
from asyncrl.collectors.engines.stops import StopStrings, load_tokenizer
from asyncrl.staleness import Weights

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ForeignWeightsError(EngineError):
    """Somebody else puts weights into the server: nothing can be said of what was sampled there."""


@dataclass(slots=True, eq=False)
class Running:
    """A request that somebody waits for. `part`, `name` and `answer` are of its newest part."""

    heard: list[Callable[[], None]] = field(default_factory=list)  # told of new tokens
    task: asyncio.Task[Completion] | None = None
    part: asyncio.Task[Completion] | None = None
    name: str = ""  # as the server knows it
    answer: Answer | None = None
    before: list[Completion] = field(default_factory=list)  # its earlier parts
    aborted: bool = False  # by the caller
    ending: bool = False  # its answer is whole, and the server does not know
    again: bool = False  # its part ends to begin again under other weights
    given_up: bool = False  # the server does not end its part

    @property
    def count(self) -> int:
        """Tokens so far."""
        count = sum(len(part.token_ids) for part in self.before)
        if self.answer is not None:
            self.answer.read()
            count += len(self.answer.tokens)
        return count


class StreamedEngine(Engine):
    """`slots` requests are given to the server at once, and more, which wait there. model_path: of the tokenizer, which
    is loaded if a request has stop strings. server: its kind, for what is said of it.

    For metrics: `generated_tokens` and `paused_s` (seconds in which generation was paused for other weights), totals.
    """

    server: ClassVar[str]

    def __init__(self, name: str, model_path: Path, *, slots: int, trust_remote_code: bool) -> None:
        if slots < 1:
            raise ValueError(f"an engine needs at least one slot, got {slots}")
        self.name = name
        self.generated_tokens = 0
        self.paused_s = 0.0
        self._model_path, self._trust_remote_code = model_path, trust_remote_code
        self._slots = slots
        self._limit = self._vocabulary = 0  # tokens of prompt and answer; ids
        self._served: Served | None = None
        self._running: dict[str, Running] = {}
        self._lost: dict[str, Running] = {}  # that ran when the engine ended
        self._aborting: set[asyncio.Task[None]] = set()
        self._exchange = asyncio.Lock()  # one at a time: an activation, or a look at what is served
        self._open = asyncio.Event()  # requests may begin: the version they begin under stays until they have
        self._ended: EngineError | None = None
        self._tokenizer: Tokenizer | None = None

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
        """Where weights are to be brought to: the server gets them from the memory of this host."""
        return "cpu"

    # --- requests -----------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        """See Engine. Cancelling it ends the request."""
        if self._ended is not None:
            raise self._error()
        if self._served is None:
            raise EngineError(f"engine {self.name} serves nothing yet: stage and activate weights before generate()")
        why = refusal(request, limit=self._limit, vocabulary=self._vocabulary) or self._inexact(request)
        if request.id in self._running:
            why = "a request of this id is running: ids must be unique"
        if why:
            raise ValueError(f"request {request.id}: {why}")
        running = self._running[request.id] = Running()
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
            if self._ended is not None:
                self._lost[request.id] = running

    def abort(self, request_ids: Sequence[str]) -> None:
        """See Engine. One that has not begun ends without a token."""
        aborted = [self._running[id] for id in request_ids if id in self._running and not self._running[id].aborted]
        for running in aborted:
            running.aborted = True
        self._end_soon(aborted)

    def progress(self, request_id: str) -> int:
        running = self._running.get(request_id)
        return running.count if running else 0

    def partial(self, request_id: str) -> Completion | None:
        """See Engine. Versions are told apart by when tokens came: while generation is paused for other weights none is
        sampled, and what was sampled before has come. Those of the whole answer are the server's own."""
        running = self._running.get(request_id) or self._lost.get(request_id)
        if running is None or isinstance(self._ended, ForeignWeightsError):
            return None
        newest = nothing() if running.answer is None else running.answer.partial()
        return None if newest is None else joined([*running.before, newest])

    def listen(self, request_id: str, heard: Callable[[], None]) -> None:
        if (running := self._running.get(request_id)) is not None:
            running.heard.append(heard)

    async def _answered(self, running: Running, request: Request) -> Completion:
        """The answer, of one part or more."""
        if request.sampling.stop and self._tokenizer is None:
            self._tokenizer = await in_thread(
                lambda: load_tokenizer(self._model_path, trust_remote_code=self._trust_remote_code)
            )
        while True:
            await self._open.wait()  # an activation ends, or `_end` cancels this
            if running.aborted:
                return joined([*running.before, nothing()])
            running.part = asyncio.create_task(self._part(running, request))
            try:
                part = await running.part
            except asyncio.CancelledError:
                if not running.given_up:
                    raise
                return joined([*running.before, nothing()])
            if not self._goes_on(running, request, part):
                return joined([*running.before, part])
            running.before.append(part)
            running.answer = None
            request = continued(request, part)

    async def _part(self, running: Running, request: Request) -> Completion:
        self._check_started()
        served = self._served
        assert served is not None, "generate() refuses requests before the first activation"
        answer: Answer = self._begun(request, served)
        running.answer = answer
        loop = asyncio.get_running_loop()
        try:
            async with aclosing(self._ask(running, request)) as parts:
                async for part in parts:  # for nearly every token: nothing here may take long
                    self.generated_tokens += answer.add(part)
                    if answer.error:
                        break  # the server ends what nobody listens to any more
                    if answer.stopped_by and not (answer.ended or running.ending):
                        running.ending = True
                        self._end_soon([running])  # and go on: at the end it says which weights sampled what
                    for heard in running.heard:
                        loop.call_soon(heard)
        except ValueError as error:
            raise ValueError(f"request {request.id}: {self.server} refuses it: {error}") from error
        except Exception as error:
            self._end(self._failure(request, error))
            raise self._error() from error
        return answer.completion()

    def _stops(self, request: Request) -> StopStrings | None:
        """What looks for the stop strings of a part."""
        if not request.sampling.stop:
            return None
        assert self._tokenizer is not None, "`_answered` loads it"
        begun = request.token_ids[len(request.token_ids) - request.position :]
        return StopStrings(self._tokenizer, request.sampling.stop, begun)

    def _end_soon(self, running: Sequence[Running]) -> None:
        """Have the server end these parts with what they have. Waits for nothing."""
        if running:
            aborting = asyncio.create_task(self._parts_end(running))
            self._aborting.add(aborting)
            aborting.add_done_callback(self._aborting.discard)

    # --- weights ------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _exchanging(self) -> AsyncIterator[None]:
        """Other weights come: requests begin before or after it. What fails in it leaves a model that is neither, and
        ends the engine."""
        began = time.perf_counter()
        self._open.clear()
        try:
            yield
        except BaseException as error:
            given_up = EngineError("an activation was given up half-way")
            self._end(error if isinstance(error, EngineError) else given_up)
            raise
        finally:
            self._open.set()
        self.paused_s += time.perf_counter() - began

    def _exchanged_for(self, served: Served) -> None:
        """Generation is paused: what is sampled from here on is sampled from these weights."""
        self._served = served
        for running in self._running.values():
            if running.answer is not None:
                running.answer.changed(served)

    # --- what each engine has of its own ------------------------------------------------------------------------------

    @abstractmethod
    def _inexact(self, request: Request) -> str:
        """Why this server cannot sample the request exactly as it asks; "" if it can."""

    @abstractmethod
    def _begun(self, request: Request, served: Served) -> Answer:
        """An answer that begins."""

    @abstractmethod
    def _ask(self, running: Running, request: Request) -> AsyncGenerator[Any, None]:
        """Name a part in `running` and ask the server for it: what `Answer.add` takes, as it comes. Raises ValueError
        for what the server refuses of this request, anything else if it failed."""

    @abstractmethod
    async def _parts_end(self, running: Sequence[Running]) -> None:
        """Have the server end these parts until they have ended: it hears nothing of an abort that overtakes its
        request. One that it does not end may be given up."""

    @abstractmethod
    def _goes_on(self, running: Running, request: Request, part: Completion) -> bool:
        """Whether the answer goes on with another part behind this one."""

    @abstractmethod
    def _failure(self, request: Request, error: Exception) -> EngineError:
        """What the server failed with."""

    # --- the end ------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _started(self) -> bool:
        """Whether there is a server to ask."""

    def _check_started(self) -> None:
        if self._ended is not None:
            raise self._error()
        if not self._started:
            raise EngineError(f"engine {self.name} is not started")

    def _opened(self) -> None:
        """The server is there: requests may begin, once weights are served."""
        self._lost.clear()
        self._ended = None
        self._open.set()

    def _end(self, cause: EngineError) -> None:
        """Nothing is generated any more: nobody may wait for it any longer."""
        self._ended = self._ended or cause
        for running in self._running.values():
            if running.task is not None and running.task is not asyncio.current_task():
                running.task.cancel()

    async def _all_ended(self, limit_s: float) -> None:
        """Of a closed engine: wait until every request has heard of it."""
        self._end(EngineError("it was closed"))
        if ending := [running.task for running in self._running.values() if running.task is not None]:
            await asyncio.wait(ending, timeout=limit_s)

    def _error(self) -> EngineError:
        error = EngineError(f"engine {self.name} does not generate any more: {self._ended}")
        error.__cause__ = self._ended
        return error
