"""How far new weights are on their way to one collector: over which transport, in which phase, since when, what failed.

Pure: events and times (monotonic seconds) go in; what to look for, when to look again and what beats say comes out.

One rule for what fails: a transport that could not bring weights, by error or by deadline, is given up until something
has arrived for what reaches as well, or for `weights.fallback`, where there is one; then the first choice has its turn
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.staleness import Weights
from asyncrl.weights.base import Transport, WeightsError, WeightsLate, WeightsPhase
from asyncrl.weights.reach import Choice

FIRST_PAUSE_S, MOST_PAUSE_S = 0.5, 30.0  # between tries that failed; a newer announcement ends the pause

Offer = Mapping[str, Any]


class Course:
    """The bookkeeping of `updates.py`. What stands in its attributes goes out with every beat."""

    def __init__(self, *, deadline_s: float, fallback: Transport | None) -> None:
        self.first: Choice | None = None  # by what both sides can reach; None before the first document
        self.weights: Weights | None = None  # on their way
        self.phase: WeightsPhase | None = None  # None: none are, or they wait for an evaluation or for running requests
        self.since = 0.0  # when the phase began
        self.error = ""  # of the last try; "" once weights arrived
        self.failed_at = 0.0
        self._deadline_s = deadline_s
        self._fallback = fallback
        self._fallen = False
        self._behind_since: float | None = None  # newer weights are known, and none have arrived since
        self._pause_s = FIRST_PAUSE_S
        self._waits_until: float | None = None  # after a failure

    @property
    def choice(self) -> Choice | None:
        """The transport in use now, and why."""
        if self._fallen and self.first is not None and self._second is not None:
            why = "reaches as well" if self._second == self.first.instead else "weights.fallback"
            return Choice(self._second, f"{why}, until {self.first.transport} has its turn again")
        return self.first

    @property
    def _second(self) -> Transport | None:
        """What is taken when the first choice has failed."""
        return (self.first and self.first.instead) or self._fallback

    def announced(self, weights: Weights, now: float) -> None:
        """`weights` are newer than what is served. The phase is as old as the first announcement after which nothing
        arrived: a learner that publishes often can be late as well."""
        if self._behind_since is None:
            self._behind_since = now
        self._enter("announce", weights, self._behind_since)

    def enter(self, phase: WeightsPhase | None, now: float) -> None:
        """The weights on their way are in another phase; None: staged, and somebody else has to end something first."""
        if phase != self.phase:
            self._enter(phase, self.weights, now)

    def fetching(self, weights: Weights, now: float) -> None:
        """`weights` are being fetched from here on."""
        self._enter("stage", weights, now)

    def arrived(self) -> None:
        """What was on its way is served, or there is nothing newer than what is."""
        self.error, self._fallen = "", False
        self._pause_s, self._waits_until, self._behind_since = FIRST_PAUSE_S, None, None
        self._enter(None, None, 0.0)

    def gone(self, now: float) -> None:
        """What was offered is not there any more: the newest announcement is looked at soon."""
        self._waits_until = now + FIRST_PAUSE_S
        self._enter("announce", self.weights, now if self._behind_since is None else self._behind_since)

    def failed(self, error: str, now: float) -> None:
        """The try failed; the next one takes the other transport, where there is one."""
        self.error, self.failed_at = error, now
        self._fallen = self._second is not None and not self._fallen
        # Newer weights in the meantime, or the other transport, may do: both have the whole deadline again.
        self._behind_since = None
        self._waits_until = now + (FIRST_PAUSE_S if self._fallen else self._pause_s)
        self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S)
        self._enter(None, None, 0.0)

    def engine_failed(self, error: str, now: float) -> None:
        """Weights were brought and an engine did not take them: no transport's fault, and it is started again."""
        self.error, self.failed_at = error, now
        self._enter(None, None, 0.0)

    def look_in_s(self, now: float) -> float | None:
        """Seconds until the announcement is looked at again without news; None: only news help."""
        if self._waits_until is not None:
            return max(0.0, self._waits_until - now)
        if self.phase == "announce":
            return max(0.0, self.since + self._deadline_s - now)
        return None

    def looked(self) -> None:
        """The announcement is being looked at. The pause after a failure is over, by time or by news."""
        self._waits_until = None

    def check(self, now: float, offers: str) -> None:
        """Nothing was found to fetch. Raises WeightsLate once that is so for longer than the deadline. offers: what
        there is, for the message."""
        late = now - self.since
        if self.phase == "announce" and self.weights is not None and late >= self._deadline_s:
            transport = "no transport" if self.choice is None else self.choice.transport
            raise WeightsLate(
                f"weights {tuple(self.weights)} are announced for {late:.0f} s (weights.deadline_s "
                f"{self._deadline_s:g}) and not to be had over {transport}; offered are {offers}"
            )

    def told(self, now: float, unix: float) -> dict[str, Any]:
        """For a beat's `info["weights"]`, JSON-able. now, unix: the same moment by both clocks."""
        choice = self.choice
        return {
            "transport": choice and choice.transport,
            "why": "" if choice is None else choice.why,
            "phase": self.phase,
            "weights": None if self.weights is None else list(self.weights),
            "since": round(unix - (now - self.since), 3) if self.phase else 0.0,
            "error": self.error,
        }

    def _enter(self, phase: WeightsPhase | None, weights: Weights | None, since: float) -> None:
        self.phase, self.weights, self.since = phase, weights, since


def offer_of(document: Mapping[str, Any], transport: str) -> tuple[Weights, Offer] | None:
    """What the document offers over `transport`, which may lag behind what it announces; None: nothing yet. Raises
    WeightsError for an offer without a name."""
    for offer in document.get("offers") or ():
        match offer:
            case {"transport": found} if found != transport:
                continue
            case {"lineage": int(lineage), "version": int(version)}:
                return Weights(lineage, version), offer
            case _:
                raise WeightsError(f"the announced offer names no weights: {offer!r:.200}")
    return None


def shown_offers(document: Mapping[str, Any]) -> str:
    """The offers of a document in words.

    >>> shown_offers({"offers": [{"transport": "shm", "lineage": 1, "version": 7}]}), shown_offers({})
    ('shm 1/7', 'none')
    """
    offers = [f"{o.get('transport')} {o.get('lineage')}/{o.get('version')}" for o in document.get("offers") or ()]
    return ", ".join(offers) or "none"
