"""The transformers engine: any `AutoModelForCausalLM`, continuous batching, weights exchanged between two decode steps.

Two threads. The asyncio thread checks requests and hands out futures. The decode thread owns model, cache and rows; it
takes commands from an inbox between steps and reports back through the loop. All shared state is the inbox, and numbers
and lists that one side only writes and the other only reads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from asyncrl.collectors.engines.base import Completion, Engine, EngineError, KvMode, Request
from asyncrl.collectors.engines.decode import Decoder, Generation
from asyncrl.collectors.engines.decode_thread import Abort, Activate, Close, DecodeThread, Submit
from asyncrl.collectors.engines.live import LiveModel, load_base, load_model
from asyncrl.collectors.engines.refusal import refusal
from asyncrl.collectors.engines.spans import Served
from asyncrl.collectors.engines.stops import StopStrings, load_tokenizer
from asyncrl.staleness import Weights
from asyncrl.weights.adapter import Base
from asyncrl.weights.base import StagedWeights
from asyncrl.weights.reach import device_of

_CLOSE_S = 30.0
"""How long `close` waits for the decode thread: it looks at its inbox after every forward, and none takes so long."""


_LOADING = threading.Lock()
"""transformers builds a model under settings of the whole process: of two that load at once, one may lack tensors."""


@dataclass(slots=True)
class _Listener:
    heard: Callable[[], None]
    heard_of: int  # tokens


class TransformersEngine(Engine):
    """`slots` requests decode at once. `max_length` bounds prompt + completion in tokens; None: the model's own bound.

    dtype: a torch dtype's name. attn: transformers' attn_implementation, or "auto". For metrics: `generated_tokens`
    and `paused_s` (seconds in which decoding stood still for other weights), totals.
    """

    def __init__(
        self,
        name: str,
        model_path: Path,
        *,
        slots: int,
        max_length: int | None,
        dtype: str,
        attn: str,
        trust_remote_code: bool,
        adapters: bool = False,
        place: int = 0,
    ) -> None:
        """adapters: keep the model it starts with, so that weights can come as an adapter of it. place: its number
        among the engines of its process, by which they share out the GPUs that are seen."""
        if slots < 1:
            raise ValueError(f"an engine needs at least one slot, got {slots}")
        self.name = name
        self._model_path = model_path
        self._slots = slots
        self._max_length = max_length
        self._dtype = dtype
        self._load_arguments: dict[str, Any] = {"attn": attn, "trust_remote_code": trust_remote_code, "place": place}
        self._adapters = adapters
        self._thread: DecodeThread | None = None
        self._live: LiveModel | None = None
        self._vocabulary = 0
        self._limit = 0
        self._tokenizer: asyncio.Future[Tokenizer] | None = None  # of stop strings, once somebody asked for one
        self._loading: set[str] = set()  # requests that wait for it
        self._active: dict[str, tuple[Generation, asyncio.Future[Completion]]] = {}
        self._lost: dict[str, Generation] = {}  # what ran when the decode thread ended
        self._listeners: dict[str, _Listener] = {}
        self._activations: set[asyncio.Future[Served]] = set()
        self._ended: BaseException | None = None  # why the decode thread no longer runs

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def free_slots(self) -> int:
        return max(0, self._slots - len(self._active))

    @property
    def serving(self) -> Weights | None:
        served = self._thread.served if self._thread else None
        return served.weights if served else None

    @property
    def checksum(self) -> str:
        served = self._thread.served if self._thread else None
        return served.checksum if served else ""

    @property
    def device(self) -> str:
        """Where the model is: "cpu", or the UUID of its GPU."""
        return device_of(self._live.model.device) if self._live else "cpu"

    @property
    def generated_tokens(self) -> int:
        return self._thread.decoder.sampled if self._thread else 0

    @property
    def paused_s(self) -> float:
        return self._thread.paused_s if self._thread else 0.0

    async def start(self) -> None:
        """Load the model and start the decode thread. An engine that died or was closed starts afresh, without weights.

        Raises EngineError if the model cannot be loaded or decoded exactly.
        """
        if self._thread is not None and self._ended is not None:
            await asyncio.to_thread(self._thread.join, _CLOSE_S)  # its last words come before its end
        if self._thread is not None and self._thread.is_alive():
            raise EngineError(f"engine {self.name} is running: close() it before start()")
        self._thread = self._live = self._tokenizer = None  # before the next model is loaded: memory need not hold two
        loop = asyncio.get_running_loop()
        try:
            model, base = await asyncio.to_thread(self._load)
        except Exception as error:
            raise EngineError(
                f"engine {self.name} cannot load {self._model_path}: {type(error).__name__}: {error}"
            ) from error
        text = model.config.get_text_config()
        self._vocabulary = text.vocab_size
        own = getattr(text, "max_position_embeddings", None)
        if self._max_length is None and own is None:
            raise EngineError(f"{self._model_path} states no max_position_embeddings: set model.max_length")
        self._limit = min(length for length in (self._max_length, own) if length is not None)
        decoder = Decoder(model, slots=self._slots)
        await asyncio.to_thread(_check_exact, decoder)
        self._live = LiveModel(model, base)
        self._thread = DecodeThread(
            f"decode-{self.name}",
            decoder,
            self._live,
            loop,
            on_finished=self._finish,
            on_tokens=self._tell,
            on_end=self._end,
        )
        self._ended = None
        self._lost.clear()
        self._thread.start()

    async def generate(self, request: Request) -> Completion:
        """See Engine. Cancelling it aborts the request."""
        try:
            tokenizer = await self._stop_tokenizer(request) if request.sampling.stop else None
            return await self._answer(request, tokenizer)
        finally:
            self._loading.discard(request.id)
            self._listeners.pop(request.id, None)
            self._listening()

    def abort(self, request_ids: Sequence[str]) -> None:
        self._loading.difference_update(request_ids)
        if self._thread is not None and self._ended is None:
            self._thread.put(Abort(frozenset(request_ids)))

    def progress(self, request_id: str) -> int:
        active = self._active.get(request_id)
        return len(active[0].tokens) if active else 0

    def partial(self, request_id: str) -> Completion | None:
        """See Engine. After the engine died until it is started again."""
        active = self._active.get(request_id)
        generation = active[0] if active else self._lost.get(request_id)
        return generation.partial() if generation else None

    def listen(self, request_id: str, heard: Callable[[], None]) -> None:
        """See Engine. Before the request's `generate` has begun, too."""
        self._listeners[request_id] = _Listener(heard, heard_of=self.progress(request_id))
        self._listening()

    async def stage(self, staged: StagedWeights) -> None:
        """Copy verified weights beside the served ones. Raises WeightsError if they do not fit the model."""
        if self._ended is not None:
            raise self._error()
        if self._live is None:
            raise EngineError(f"engine {self.name} is not started")
        await asyncio.to_thread(self._live.stage, staged)

    async def activate(self, kv: KvMode = "keep", *, exchanged: Callable[[], None] | None = None) -> Weights:
        """See Engine. Raises WeightsError if nothing is staged or the live tensors do not have the announced checksum;
        the old weights then go on being served."""
        if self._ended is not None:
            raise self._error()
        if self._thread is None:
            raise EngineError(f"engine {self.name} is not started")
        answer: asyncio.Future[Served] = asyncio.get_running_loop().create_future()
        self._activations.add(answer)
        answer.add_done_callback(self._activations.discard)
        self._thread.put(Activate(kv, exchanged or (lambda: None), answer))
        return (await answer).weights

    async def check(self) -> None:
        """See Engine. Whether the decode thread lives: one forward may take as long as it takes."""
        if self._ended is not None:
            raise self._error()

    async def verify(self) -> tuple[Weights, str]:
        """See Engine. In a thread beside the one that decodes."""
        if self._ended is not None:
            raise self._error()
        if self._live is None or self._thread is None or self._thread.served is None:
            raise EngineError(f"engine {self.name} serves nothing")
        return await asyncio.to_thread(self._live.verify)

    async def close(self) -> None:
        """End the decode thread; what still runs raises EngineError. Raises EngineError if it does not end in time."""
        if self._thread is None:
            return
        self._thread.put(Close())
        await asyncio.to_thread(self._thread.join, _CLOSE_S)
        self._end(None)
        if self._thread.is_alive():
            raise EngineError(f"engine {self.name}: the decode thread is still in a forward after {_CLOSE_S:.0f} s")

    def _load(self) -> tuple[PreTrainedModel, Base | None]:
        with _LOADING:
            base = load_base(self._model_path, **self._load_arguments) if self._adapters else None
            return load_model(self._model_path, dtype=self._dtype, **self._load_arguments), base

    async def _answer(self, request: Request, tokenizer: Tokenizer | None) -> Completion:
        if self._ended is not None:
            raise self._error()
        if self._thread is None or self._thread.served is None:
            raise EngineError(f"engine {self.name} serves nothing yet: stage and activate weights before generate()")
        generation = self._admit(request, tokenizer)
        if tokenizer is not None and request.id not in self._loading:
            return generation.partial()  # aborted while the tokenizer was loaded
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._active[request.id] = (generation, future)
        self._thread.put(Submit(generation))
        try:
            return await future
        except asyncio.CancelledError:
            self.abort([request.id])
            raise

    async def _stop_tokenizer(self, request: Request) -> Tokenizer:
        """Loaded once, off the loop, when the first request with stop strings comes."""
        self._loading.add(request.id)
        if self._tokenizer is None:
            trust: bool = self._load_arguments["trust_remote_code"]
            self._tokenizer = asyncio.ensure_future(
                asyncio.to_thread(load_tokenizer, self._model_path, trust_remote_code=trust)
            )
        return await asyncio.shield(self._tokenizer)  # a request that is cancelled leaves it to the others

    def _admit(self, request: Request, tokenizer: Tokenizer | None) -> Generation:
        """The request as something that runs. Raises ValueError if it cannot be served exactly."""
        why = refusal(request, limit=self._limit, vocabulary=self._vocabulary)
        if request.id in self._active:
            why = "a request of this id is running: ids must be unique"
        if why:
            raise ValueError(f"request {request.id}: {why}")
        begun = request.token_ids[len(request.token_ids) - request.position :]
        return Generation(
            request,
            budget=min(request.sampling.max_tokens, self._limit - len(request.token_ids)),
            stops=StopStrings(tokenizer, request.sampling.stop, begun) if tokenizer else None,
        )

    def _listening(self) -> None:
        if self._thread is not None:
            self._thread.heard_by = len(self._listeners)

    def _tell(self) -> None:
        for request_id, listener in list(self._listeners.items()):
            if (progress := self.progress(request_id)) > listener.heard_of:
                listener.heard_of = progress
                listener.heard()

    def _finish(self, finished: Sequence[Generation]) -> None:
        for generation in finished:
            _, future = self._active.pop(generation.request.id, (generation, None))
            if future is not None and not future.done():
                future.set_result(generation.completion())

    def _end(self, cause: BaseException | None) -> None:
        """The decode thread is gone: nobody may wait for it any longer."""
        self._ended = self._ended or cause or EngineError("it was closed")
        ended, self._active = self._active, {}
        for request_id, (generation, future) in ended.items():
            if future.done():
                continue
            if generation.finish_reason is not None:  # it was whole already when the thread died
                future.set_result(generation.completion())
            else:
                self._lost[request_id] = generation
                future.set_exception(self._error())
        for answer in self._activations:
            if not answer.done():
                answer.set_exception(self._error())

    def _error(self) -> EngineError:
        cause = self._ended
        detail = str(cause) if isinstance(cause, EngineError) else f"{type(cause).__name__}: {cause}"
        error = EngineError(f"engine {self.name} does not decode any more: {detail}")
        error.__cause__ = cause
        return error


def _check_exact(decoder: Decoder) -> None:
    with torch.inference_mode():
        decoder.check_exact()
