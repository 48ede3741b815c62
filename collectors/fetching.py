"""Fetching weights in a thread, where nothing that hangs there holds anything else up.

A receiver blocks: in a copy, on a network, on a filesystem. It bounds itself; one that does not come back all the same,
because it is stuck in the kernel, cannot be ended from here. It is abandoned then, with its thread, and the next try
has a receiver of its own. The threads are daemons: a process does not wait for them at its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from asyncrl.buffers.concurrency import in_thread
from asyncrl.weights.base import Receiver, StagedWeights, WeightsLate

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""What a receiver gets beyond the deadline that it was given: it then ends with an error that says where it was."""

CLOSE_S = 5.0
"""For all receivers to let go of what they hold: what they leave is let go of at the end of the process."""


class Fetcher:
    """The receivers of one collector, made when an offer asks for one."""

    def __init__(self, me: str, *, device: str, deadline_s: float) -> None:
        """`me`: the collector's incarnation, as transfers with a roster know it. `device`: as in its `Place`."""
        self._me, self._device, self._deadline_s = me, device, deadline_s
        self._receivers: dict[str, Receiver] = {}

    async def fetch(self, offer: Mapping[str, Any]) -> StagedWeights:
        """Verified weights, one call at a time. Raises WeightsError; WeightsLate after deadline and GRACE_S at the
        latest."""
        transport = str(offer.get("transport"))
        if transport not in self._receivers:
            from asyncrl.weights.build import receiver  # imports torch, of no use to a simulated collector

            self._receivers[transport] = receiver(offer, me=self._me, device=self._device)
        stage = self._receivers[transport].stage
        fetching = in_thread(lambda: stage(offer, deadline_s=self._deadline_s))
        try:
            async with asyncio.timeout(self._deadline_s + GRACE_S):
                return await asyncio.shield(fetching)
        except TimeoutError:
            self._receivers.pop(transport, None)
            raise WeightsLate(
                f"the receiver of weights over {transport} did not come back within weights.deadline_s "
                f"{self._deadline_s:g} and {GRACE_S:g} s: it was given up, a new one tries again"
            ) from None
        finally:
            if not fetching.done():
                fetching.add_done_callback(_heard)

    async def close(self) -> None:
        """Let go of what the transports hold on this side."""
        closing = [in_thread(receiver.close) for receiver in self._receivers.values()]
        self._receivers.clear()
        if closing:
            done, _ = await asyncio.wait(closing, timeout=CLOSE_S)
            for error in filter(None, (outcome.exception() for outcome in done)):
                logger.warning("a receiver of weights did not close cleanly: %s", error)


def _heard(late: asyncio.Future[StagedWeights]) -> None:
    """What comes back after nobody waits for it any more is dropped; an error is looked at, so that it is not taken for
    one that nobody handled."""
    if not late.cancelled():
        late.exception()
