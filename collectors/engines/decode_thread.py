"""The thread that decodes: it owns model, cache and rows, and takes commands from its inbox between two steps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from traceback import clear_frames

import torch

from asyncrl.collectors.engines.base import KvMode
from asyncrl.collectors.engines.decode import Decoder, Generation
from asyncrl.collectors.engines.live import LiveModel
from asyncrl.collectors.engines.spans import Served
from asyncrl.weights.base import WeightsError


@dataclass(frozen=True, slots=True)
class Submit:
    generation: Generation


@dataclass(frozen=True, slots=True)
class Abort:
    ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class Activate:
    kv: KvMode
    exchanged: Callable[[], None]
    answer: asyncio.Future[Served]


@dataclass(frozen=True, slots=True)
class Close:
    pass


Command = Submit | Abort | Activate | Close


class DecodeThread(threading.Thread):
    """Owns the decoder. `served`, `paused_s` and the decoder's counters are written here and read from anywhere;
    `heard_by`, how many want to hear of new tokens, the other way round."""

    def __init__(
        self,
        name: str,
        decoder: Decoder,
        live: LiveModel,
        loop: asyncio.AbstractEventLoop,
        *,
        on_finished: Callable[[list[Generation]], None],
        on_tokens: Callable[[], None],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        super().__init__(name=name, daemon=True)  # daemon: a process that forgot close() can still exit
        self.decoder = decoder
        self.served: Served | None = None
        self.paused_s = 0.0
        self.heard_by = 0
        self._live = live
        self._loop = loop
        self._on_finished = on_finished
        self._on_tokens = on_tokens
        self._told = True  # the loop has taken the last news: no second one waits behind it
        self._on_end = on_end
        self._queue: dict[str, Generation] = {}  # waiting for a slot, first come first served
        self._inbox: SimpleQueue[Command] = SimpleQueue()

    def put(self, command: Command) -> None:
        """Hand over a command; it is looked at before the next decode step."""
        self._inbox.put(command)

    def run(self) -> None:
        cause: BaseException | None = None
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except BaseException as error:
            # Everything, SystemExit of model code included: whoever waits for this thread must hear of its end.
            # Its frames would keep the tensors of the step that failed for as long as somebody keeps the error.
            clear_frames(error.__traceback__)
            cause = error
        self._post(self._on_end, cause)

    def _turn(self) -> bool:
        """Commands, newcomers, one decode step. False: it was the last turn."""
        commands = self._take()
        finished: list[Generation] = []
        for command in commands:
            match command:
                case Submit(generation):
                    self._queue[generation.request.id] = generation
                case Abort(ids):
                    finished += self._abort(ids)
                case Activate():
                    self._activate(command)
                case Close():
                    return False
        if self.served is not None:
            newcomers = [self._queue.pop(id) for id in list(self._queue)[: self.decoder.free]]
            if newcomers:
                finished += self.decoder.join(newcomers, self.served)
            if self.decoder.running:
                finished += self.decoder.step(self.served)
        if finished:
            self._post(self._on_finished, finished)
        if self.heard_by and self._told and self.decoder.running:
            self._told = False
            self._post(self._tell)
        return True

    def _tell(self) -> None:
        """In the loop. What comes from here on is news again, which this turn may not see any more."""
        self._told = True
        self._on_tokens()

    def _take(self) -> list[Command]:
        """All commands at hand. With nothing to decode it sleeps without a limit: every event that could change that
        (submit, abort, activate, close) comes through `put`, which wakes it."""
        commands = [] if self.decoder.running or self._queue else [self._inbox.get()]
        with suppress(Empty):
            while True:
                commands.append(self._inbox.get_nowait())
        return commands

    def _abort(self, ids: frozenset[str]) -> list[Generation]:
        aborted = [self._queue.pop(id) for id in ids if id in self._queue]
        for generation in (*aborted, *self.decoder.running):
            if generation.request.id in ids:
                generation.finish_reason = "abort"
        return aborted + self.decoder.sweep()

    def _activate(self, command: Activate) -> None:
        began = time.perf_counter()
        try:
            served = self._live.activate(partial(self._post, command.exchanged))
        except WeightsError as error:
            self._post(_resolve, command.answer, None, error)
            return
        if command.kv == "recompute":
            self.decoder.rebuild(served)
        self.served = served
        self.paused_s += time.perf_counter() - began
        self._post(_resolve, command.answer, served, None)

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            # The loop is closed, and with it everybody who could wait for an answer.
            self.put(Close())


def _resolve(answer: asyncio.Future[Served], served: Served | None, error: WeightsError | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    elif served is not None:
        answer.set_result(served)
