"""The learner's outlet: writes each version as an image, announces it, and sees to it that collectors elsewhere get it.

Training waits for the image and its announcement only. Beside it a task looks at the collectors, has a sender for each
transport that one of them has chosen, and announces the newest version again whenever the offers have changed:

| waits         | for                                 | who ends it, and when at the latest                        |
|---------------|-------------------------------------|------------------------------------------------------------|
| the task      | news                                | a publication, a sender with another offer; LOOK_S         |
| a publication | a look that is under way, the store | the store's answer, within the limit of its outage         |
| a collector   | a sender that is being made         | the sender; it is named after `weights.deadline_s`, and if |
|               |                                     | the recipe names its transport ends the run                |
| `close`       | senders                             | they themselves: seconds                                   |
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from asyncrl.buffers.base import Buffer
from asyncrl.buffers.concurrency import end_all, in_thread
from asyncrl.buffers.store import StoreAway
from asyncrl.learners.lora import in_dtype
from asyncrl.learners.recipients import Lateness, by_transport, document, recipients
from asyncrl.weights.base import Late, Recipient, Sender, Transport, WeightsError, WeightsLate
from asyncrl.weights.build import sender
from asyncrl.weights.image import Image, Images
from asyncrl.weights.manifest import combine, combined_checksum, tensors_in
from asyncrl.weights.memory import borrowed
from asyncrl.weights.shm import shm_offer

if TYPE_CHECKING:
    import torch

    from asyncrl.config.recipe import Recipe
    from asyncrl.staleness import Weights
    from asyncrl.weights.adapter import ServedWeights
    from asyncrl.weights.manifest import Pieces
    from asyncrl.weights.reach import Place

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Between two looks at the collectors: a collector's beats come about as often."""

REMIND_S = 10.0
"""Between two looks at what the store has announced, while a collector is behind. A store that was restarted may have
lost the announcement and not the commit before it; nobody else would ever notice."""


class Outlet:
    """One learner's. `publish` and `check` are called by the training loop, in the loop that `start` was called in."""

    def __init__(self, recipe: Recipe, buffer: Buffer, *, stop: asyncio.Event) -> None:
        """`stop`: when set, a store that is away is no error any more."""
        self._config = recipe.weights
        self._run = recipe.run.name
        self._store_url = recipe.buffer.url
        self._buffer = buffer
        self._stop = stop
        self._images = Images(recipe.run.name)
        self._kept = recipe.buffer.max_trajectory_age + 2  # versions that collectors may still serve
        self._senders: dict[Transport, Sender] = {}
        self._making: dict[Transport, tuple[asyncio.Future[Sender], float]] = {}  # since when, monotonic seconds
        self._refused: dict[Transport, str] = {}
        self._found: list[Recipient] = []
        self._lateness = Lateness(recipe.weights.deadline_s)
        self._late: list[Late] = []
        self._image: Image | None = None
        self._fork: Weights | None = None
        self._sums: ServedWeights | None = None  # of `_image`, where that is an adapter
        self._dtype = recipe.model.dtype
        self._checksums: dict[str, str] = {}
        self._published = 0
        self._announced: dict[str, Any] = {}
        self._remembered_at = time.monotonic()
        self._turn = asyncio.Lock()  # an image is handed to senders, or the next one is written
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, place: Place) -> None:
        """Begin to look after the collectors. `place`: where this process is."""
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run_looks())

    def check(self) -> None:
        """Raises what has ended the task, if something has: Fenced, BufferError, WeightsError."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    async def publish(
        self,
        weights: Weights,
        source: Iterable[tuple[str, torch.Tensor | Pieces]],
        *,
        tied: Mapping[str, str],
        fork: Weights,
        sums: ServedWeights | None = None,
    ) -> Image:
        """Make `weights` available to the collectors of this host, and soon to all others. `source` is consumed in a
        thread. sums: what engines make of it, where it gives the factors of an adapter and no weights. Raises
        WeightsError, or what ended the task."""
        self.check()
        hashed = self._published % self._config.verify_every == 0

        def write() -> Image:
            adapter = None if sums is None else sums.adapter
            if sums is not None and adapter is not None and hashed:
                adapter = msgspec.structs.replace(adapter, served=self._of_sums(sums))
            return self._images.write(weights, source, tied=tied, hashed=hashed, adapter=adapter)

        async with self._turn:
            image = await asyncio.to_thread(write)
            self._image, self._fork, self._sums = image, fork, sums
            self._published += 1
            self._remember(image, image.manifest.served)
            self._serve(image)
            await self._announce(image, fork)
        self._news.set()
        return image

    def take_late(self) -> list[Late]:
        """Who was found late since the last call."""
        late, self._late = self._late, []
        return late

    def measured(self) -> dict[str, Mapping[str, float]]:
        """What each transport has cost so far."""
        return {transport: sender.measured() for transport, sender in self._senders.items()}

    async def close(self) -> None:
        """End the task, the senders and the images."""
        if self._task is not None:
            await end_all([self._task])
        for one in self._senders.values():
            await asyncio.to_thread(one.close)
        self._images.close()

    # --- beside training --------------------------------------------------------------------------------------------

    async def _run_looks(self) -> None:
        try:
            while True:
                await self._look()
                try:
                    async with asyncio.timeout(LOOK_S):
                        await self._news.wait()
                except TimeoutError:
                    continue
                self._news.clear()
        except StoreAway:
            if not self._stop.is_set():  # else nobody waits for it any longer
                raise

    async def _look(self) -> None:
        """Once: who is there, who is late, what each sender has to do, what is to be announced."""
        self._found = recipients((await self._buffer.stats()).members)
        async with self._turn:
            image, fork = self._image, self._fork
            if image is None or fork is None:
                return
            self._note(self._lateness.look(self._found, image.weights))
            for one in self._senders.values():
                late = list(one.late())
                self._lateness.mark(late, self._found)
                self._note(late)
            if any(one.serving is None for one in self._found):
                await self._hash(image)
            self._serve(image)
            if await self._is_forgotten(image):
                self._announced = {}
            await self._announce(image, fork)

    async def _is_forgotten(self, image: Image) -> bool:
        """Whether the store, which has acknowledged the announcement of `image`, does not have it."""
        now = time.monotonic()
        behind = any(one.serving is None or one.serving < image.weights for one in self._found)
        if not behind or now - self._remembered_at < REMIND_S:
            return False
        self._remembered_at = now
        known = await self._buffer.announcement()
        return known is None or known[0] < image.weights

    def _serve(self, image: Image) -> None:
        """Tell each sender for whom `image` is; have those made that are needed and not there. Raises WeightsError
        where the recipe names one that cannot be made."""
        ways = by_transport(self._found, self._config, learner=self._place, left_out=self._lateness.left_out)
        self._take_made()
        for transport in ways.keys() - self._senders.keys() - self._making.keys():
            self._make(transport)
        for transport, one in self._senders.items():
            one.serve(image, ways.get(transport, []))

    def _make(self, transport: Transport) -> None:
        """Begin to make a sender. It looks for its network or its folder, which may take as long as it likes: in a
        thread that keeps neither training nor the end of this process waiting."""
        made = in_thread(
            partial(
                sender,
                *(transport, self._config),
                run=self._run,
                changed=self._wake,
                store_url=self._store_url,
                device=self._place.device,
            )
        )
        made.add_done_callback(lambda _: self._news.set())
        self._making[transport] = made, time.monotonic()

    def _take_made(self) -> None:
        """The senders that have been made, and why others could not be."""
        for transport, (made, since) in list(self._making.items()):
            try:
                if made.done():
                    del self._making[transport]
                    self._senders[transport] = made.result()
                elif time.monotonic() - since > self._config.deadline_s:
                    raise WeightsLate(f"it was not ready within weights.deadline_s {self._config.deadline_s:g}")
            except WeightsError as error:
                if transport == self._config.transport:
                    raise type(error)(f"no weights over {transport}: {error}") from error
                if self._refused.get(transport) != str(error):  # said once, tried at every look
                    self._refused[transport] = str(error)
                    log.error("no weights over %s: %s", transport, error)

    async def _announce(self, image: Image, fork: Weights) -> None:
        """Say what there is, if it is not what was said last."""
        said = document(
            image.weights,
            fork=fork,
            place=self._place,
            checksums=self._checksums,
            offers=[shm_offer(image), *(one.offer() for one in self._senders.values())],
        )
        if said != self._announced:
            await self._buffer.announce(image.weights, said)
            self._announced = said

    async def _hash(self, image: Image) -> None:
        """A collector that has no weights yet samples from none that are not proved: what was published without a
        checksum gets one in the document."""
        if f"{image.weights.lineage}/{image.weights.version}" not in self._checksums:
            self._remember(image, await asyncio.to_thread(self._served, image, self._sums))

    def _served(self, image: Image, sums: ServedWeights | None) -> str:
        """The combined checksum of what engines serve of `image`, as its manifest has none."""
        image.retain()
        try:
            data = image.data()
            if sums is not None:  # the model's factors are being trained, its base stands still
                return self._of_sums(replace(sums, factors=tensors_in(borrowed(data), image.manifest)))
            contents = (data[spec.offset : spec.offset + spec.nbytes] for spec in image.manifest.tensors)
            return combine(xxhash.xxh3_64_hexdigest(content.data) for content in contents)
        finally:
            image.release()

    def _of_sums(self, sums: ServedWeights) -> str:
        """One after the other: there is never a second model in memory."""
        return combined_checksum(in_dtype(sums, self._dtype))

    def _remember(self, image: Image, checksum: str) -> None:
        """The checksums of the last versions, of those that have one."""
        if checksum:
            self._checksums[f"{image.weights.lineage}/{image.weights.version}"] = checksum
        for name in list(self._checksums)[: -self._kept]:
            del self._checksums[name]

    def _note(self, late: Iterable[Late]) -> None:
        for one in late:
            log.warning(
                "%s is late with weights %s: in phase %s for %.0f s (weights.deadline_s %g)",
                one.member,
                tuple(one.weights),
                one.phase,
                time.time() - one.since,
                self._config.deadline_s,
            )
            self._late.append(one)

    def _wake(self) -> None:
        """From any thread: a sender has a new offer."""
        self._loop.call_soon_threadsafe(self._news.set)
