"""What senders have in common that bring versions somewhere without the collectors' help: a thread, one at a time.

The newest image wins: while one is brought out, the newest of those that follow waits. A version that cannot be brought
out is tried again with a later look at the members; what was announced before goes on being announced.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from asyncrl.staleness import Weights
from asyncrl.weights.base import Late, Recipient, Transport, WeightsError, WeightsGone
from asyncrl.weights.delta_codec import Bytes
from asyncrl.weights.image import Image

logger = logging.getLogger(__name__)

RETRY_S = 5.0
"""After a version could not be brought out: a full disk may be emptied, a store may come back."""

CLOSE_S = 10.0
"""For what is being brought out when the learner ends; then the thread is left behind, with what it has begun."""


class NamedOffer(Protocol):
    """An offer, as a msgspec struct."""

    @property
    def weights(self) -> Weights: ...


class NewestSender(ABC):
    """A `Sender`. A subclass calls this constructor last: its thread begins."""

    transport: Transport

    def __init__(self, where: str, *, deadline_s: float, changed: Callable[[], None]) -> None:
        """where: the versions are brought to, for messages. deadline_s: a version that takes longer is late. changed:
        called in the thread when there is another offer."""
        self._where, self._deadline_s, self._changed = where, deadline_s, changed
        self._bytes, self._seconds = 0, 0.0
        # Shared with the thread, under the condition:
        self._condition = threading.Condition()
        self._recipients: tuple[Recipient, ...] = ()
        self._waiting: Image | None = None
        self._taken: Weights | None = None  # the newest the thread was given
        self._began: tuple[Weights, float] | None = None  # being brought out, or failing, since (unix seconds)
        self._said: Weights | None = None  # the last that was late
        self._offer: NamedOffer | None = None
        self._retry_at = 0.0  # monotonic
        self._broken: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run_thread, name=f"weights-{self.transport}", daemon=True)
        self._thread.start()

    def serve(self, image: Image, recipients: Sequence[Recipient]) -> None:
        """As `Sender.serve`. Raises what ended the thread, if anything did: a fault of this code."""
        with self._condition:
            if self._broken is not None:
                raise self._broken
            self._recipients = tuple(recipients)
            is_new = self._taken is None or image.weights > self._taken
            if recipients and is_new and time.monotonic() >= self._retry_at:
                self._waiting = image
                self._condition.notify()

    def offer(self) -> Mapping[str, Any] | None:
        with self._condition:
            offer = self._offer
        if offer is None:
            return None
        result: dict[str, Any] = msgspec.to_builtins(offer)
        return result

    def late(self) -> Sequence[Late]:
        """The learner itself, once for each version that it does not bring out in time. A collector that is slow to
        fetch one keeps nobody waiting and says so in its own beats."""
        with self._condition:
            if self._began is None or not self._recipients:
                return ()
            weights, since = self._began
            if weights == self._said or time.time() - since < self._deadline_s:
                return ()
            self._said = weights
        return (Late("learner", weights, "announce", since),)

    def measured(self) -> Mapping[str, float]:
        """`bytes` and `seconds` of all versions brought out."""
        return {"bytes": self._bytes, "seconds": self._seconds}

    def close(self) -> None:
        """End the thread, within CLOSE_S."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("%s does not answer: a version that was begun is left there unfinished", self._where)

    # --- in the thread ------------------------------------------------------------------------------------------------

    @abstractmethod
    def _publish(self, image: Image, data: Bytes, recipients: Sequence[Recipient]) -> NamedOffer:
        """Bring a version out; what can be announced of it. Raises WeightsError or OSError."""

    def _published(self, newest: Weights, recipients: Sequence[Recipient]) -> None:  # noqa: B027
        """What is to be done once it is announced; here nothing."""

    def _run_thread(self) -> None:
        try:
            while (taken := self._next()) is not None:
                self._try(*taken)
        except Exception as error:
            logger.exception("the thread that brings weights to %s ended", self._where)
            with self._condition:
                self._broken = error

    def _next(self) -> tuple[Image, tuple[Recipient, ...]] | None:
        """The newest image that waits; None: closed. Idle until `serve` or `close` notifies."""
        with self._condition:
            self._condition.wait_for(lambda: self._closed or self._waiting is not None)
            image, self._waiting = self._waiting, None
            if self._closed or image is None:
                return None
            self._taken = image.weights
            self._began = (image.weights, time.time() if self._began is None else self._began[1])
            return image, self._recipients

    def _try(self, image: Image, recipients: tuple[Recipient, ...]) -> None:
        started = time.perf_counter()
        try:
            image.retain()
            try:
                offer = self._publish(image, image.data(), recipients)
            finally:
                image.release()
        except WeightsGone:
            return  # a newer image took its place before this one was begun
        except (WeightsError, OSError) as error:
            if self._closed:
                return
            logger.error("weights %s cannot be brought to %s: %s", tuple(image.weights), self._where, error)
            with self._condition:
                self._taken = None if self._offer is None else self._offer.weights
                self._retry_at = time.monotonic() + RETRY_S
            return
        self._seconds += time.perf_counter() - started
        with self._condition:
            self._offer, self._began = offer, None
        self._changed()
        self._published(image.weights, recipients)
