"""Transport `collective`, the learner's side: brings the newest image to all who come for it, in one broadcast.

Epoch by epoch (`roster.py`): offer, wait for knocks, close the roster, broadcast, hear the reports. One member that
dies, freezes or loses its network ends the round for all; it is named, and the next round, with the newest image, does
not wait for it. What each side waits for is bounded:

| waits   | for                       | at most                    | who ends it                                       |
|---------|---------------------------|----------------------------|---------------------------------------------------|
| sender  | a first knock             | while the offer stands     | any member; a newer image; the outlet: nobody left|
| sender  | the other members' knocks | MEETING of the deadline    | they, or the limit: who is missing is late        |
| sender  | group, broadcast, reports | TRANSFER of the deadline   | the members; one that fails or leaves; the limit  |
| sender  | reports of a failed round | REPORTS_S                  | they, or the limit: who says nothing is late      |
| member  | roster, group, weights    | the deadline               | the sender, which ends each epoch; the limit      |
| `close` | the sender's thread       | CLOSE_S                    | the sender, which looks every REST_S              |

No thread that keeps these limits makes a call that could outlast them (`attempts.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.staleness import Weights
from asyncrl.weights.attempts import Attempt, first_line
from asyncrl.weights.base import Late, Recipient, Transport, WeightsGone, WeightsPhase
from asyncrl.weights.group import Group
from asyncrl.weights.image import Image
from asyncrl.weights.meeting import MeetingPoint, own_address
from asyncrl.weights.offers import ManifestOffer, parse_manifest_offer
from asyncrl.weights.roster import (
    MEETING,
    TRANSFER,
    Knock,
    Meeting,
    Report,
    Roster,
    blame,
    form,
    lacking,
    waited_for,
)

logger = logging.getLogger(__name__)

LOOK_S, REST_S = 0.01, 0.1
"""Between two looks at what members say: while they are there, or may come at any moment; and after PROMPT_S without
any. The first is short against a transfer and costs 3 % of a core, the second a third of a percent."""

PROMPT_S = 1.0

REPORTS_S = 5.0
"""For the members' word on a round that failed. They say it at once, so this is for a machine that is busy."""

CLOSE_S = 10.0


class CollectiveOffer(ManifestOffer, frozen=True, kw_only=True):
    """What a receiver needs to take part in one epoch."""

    transport: str = "collective"
    epoch: int
    address: str
    port: int

    def __str__(self) -> str:
        return f"weights {tuple(self.weights)}, epoch {self.epoch} with the learner on {self.address}:{self.port}"


class CollectiveSender:
    """See `base.Sender`. Holds one image while it is offered or sent."""

    transport: Transport = "collective"

    def __init__(
        self,
        *,
        deadline_s: float,
        toward: str,
        interface: str | None = None,
        port: int = 0,
        device: str = "cpu",
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`toward`: a host that the collectors reach as well, the store's; decides on which address the learner listens
        unless `interface` does. `device`: of the learner, as in its `Place`. `changed` is called, in the sender's
        thread, when the offer is another.

        Raises WeightsError: no such address, or its port is taken.
        """
        self._point = MeetingPoint(own_address(interface, toward), port)
        self._deadline_s = deadline_s
        self._device = device
        self._changed = changed
        self._news = threading.Condition()  # guards what `serve`, `late`, `close` and the thread share:
        self._newest: Image | None = None
        self._recipients: tuple[Recipient, ...] = ()
        self._late: list[Late] = []
        self._stirred = self._closed = False
        self._offer: CollectiveOffer | None = None
        self._measured = {"bytes": 0.0, "seconds": 0.0}
        # Of the thread alone:
        self._epoch = 0
        self._group: Group | None = None
        self._last: Roster | None = None  # whose group that is
        self._delivered: dict[str, Weights] = {}
        self._excused: set[str] = set()
        self._strays: set[str] = set()
        self._given_up: Image | None = None
        self._missed: float | None = None  # since when somebody has been waited for, over offers that were renewed
        self._thread = threading.Thread(target=self._run, name="weights-collective", daemon=True)
        self._thread.start()

    def serve(self, image: Image, recipients: Sequence[Recipient]) -> None:
        """Offer `image` to `recipients`, and to who comes without having been seen yet."""
        with self._news:
            self._newest, self._recipients = image, tuple(recipients)
            self._stirred = True
            self._news.notify()

    def offer(self) -> Mapping[str, Any] | None:
        """The newest epoch. It stays announced when it is over: who comes then is told, and makes the sender open the
        next."""
        offer = self._offer
        return None if offer is None else msgspec.to_builtins(offer)

    def late(self) -> Sequence[Late]:
        """Who did not come (announce), or stopped receiving (stage), since the last call."""
        with self._news:
            late, self._late = self._late, []
        return late

    def measured(self) -> Mapping[str, float]:
        """`bytes`: of the weights, times the members that have them; `seconds`: of the broadcasts, failed ones too."""
        with self._news:
            return dict(self._measured)

    def close(self) -> None:
        """Call off what is under way, and end the thread."""
        with self._news:
            self._closed = self._stirred = True
            self._news.notify()
        self._thread.join(CLOSE_S)
        self._offer = None

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            image = None
            try:
                image = self._due()
                if image is not None:
                    self._round(image)
                    continue
            except WeightsGone as error:
                logger.info("%s: the next image takes its place", error)
            except Exception:
                # Nothing that a member did: the learner and the other transports go on.
                self._given_up = image or self._newest
                logger.exception("weights could not be sent, the next version is tried again")
            self._pause(REST_S)

    def _due(self) -> Image | None:
        """The image to offer next, if anybody lacks it."""
        with self._news:
            image, recipients = self._newest, self._recipients
        if image is None or image is self._given_up:
            return None
        self._hear_strays()
        return image if self._strays or lacking(recipients, image.weights, self._delivered) else None

    def _hear_strays(self) -> None:
        """Whoever came too late is alive, and lacks weights whatever it has reported."""
        strays = self._point.strays()
        self._strays |= strays
        self._excused -= strays
        for stray in strays:
            self._delivered.pop(stray, None)

    def _round(self, image: Image) -> None:
        """One epoch, from its offer to its end."""
        image.retain()
        try:
            self._open(image)
            roster = self._meet(image.weights)
            self._point.close(roster)
            if roster.members:
                self._transfer(image, roster)
        except BaseException:
            # Whatever it was: nobody is to wait for what does not come.
            self._point.close(self._roster({}))
            self._point.end(self._epoch, "the learner cannot send them")
            raise
        finally:
            image.release()

    def _open(self, image: Image) -> None:
        self._epoch += 1
        self._point.open(self._epoch)
        self._offer = CollectiveOffer(
            lineage=image.weights.lineage,
            version=image.weights.version,
            epoch=self._epoch,
            address=self._point.address,
            port=self._point.port,
            manifest=image.manifest,
        )
        self._changed()

    def _meet(self, weights: Weights) -> Roster:
        """Wait for the members. Returns a roster without any if the epoch is called off."""
        meeting = Meeting(weights, time.monotonic(), self._deadline_s)
        since = time.time()
        first: float | None = None
        while True:
            now = time.monotonic()
            self._hear_strays()
            knocks = self._point.knocks(self._epoch)
            if knocks and first is None:
                first = now
            self._excused -= knocks.keys()
            self._strays -= knocks.keys()
            with self._news:
                recipients, newest, closed = self._recipients, self._newest, self._closed
            behind = lacking(recipients, weights, self._delivered)
            missing = waited_for(recipients, behind, self._excused) - knocks.keys()
            step = meeting.decide(
                now,
                first=first,
                missing=missing,
                newest=weights if newest is None else newest.weights,
                wanted=bool(behind or self._strays),
            )
            if closed or step in ("renew", "cancel"):
                return self._roster({})
            if step == "close":
                self._missed = None
                self._note(missing, weights, "announce", since)
                return self._roster(knocks)
            if not missing or self._missed is None:
                self._missed = now
            if now - self._missed >= self._deadline_s:
                self._note(missing, weights, "announce", since)  # excused from then on: named once
            self._pause(REST_S if first is None and now - meeting.opened > PROMPT_S else LOOK_S)

    def _roster(self, knocks: Mapping[str, Knock]) -> Roster:
        return form(self._epoch, knocks, self._last, device=self._device, limit_s=TRANSFER * self._deadline_s)

    def _transfer(self, image: Image, roster: Roster) -> None:
        """Broadcast to `roster`, hear its reports, and end the epoch."""
        since, began = time.time(), time.monotonic()
        with self._news:
            known = {recipient.incarnation for recipient in self._recipients} & set(roster.members)
        # The attempt's until it has ended well. A group of others is dropped here.
        held = [self._group] if self._group is not None and self._group.id == roster.group else []
        self._group = self._last = None
        image.retain()  # for as long as the attempt may read, which may be longer than this round
        attempt = Attempt(lambda: self._send(image, roster, held), name=f"weights-epoch-{roster.epoch}")
        reports, why = self._watch(attempt, roster, known, until=began + roster.limit_s)
        self._point.end(roster.epoch, why)
        if why:
            expired = time.monotonic() - began >= roster.limit_s
            for group in held:
                group.abort()
            reports = self._last_words(roster)
            late = [] if self._closed else blame(roster.members, reports, expired=expired)
            self._note(late, image.weights, "stage", since)
            logger.log(
                logging.INFO if self._closed else logging.WARNING,
                "weights %s, epoch %d: called off: %s. Late: %s. The next epoch does not wait for them",
                *(tuple(image.weights), roster.epoch, why, ", ".join(self._names(late)) or "nobody"),
            )
        elif not any(report.error for report in reports.values()):
            self._group, self._last = held[0], roster
        self._count(image, reports, seconds=time.monotonic() - began)

    def _watch(
        self, attempt: Attempt[None], roster: Roster, known: set[str], *, until: float
    ) -> tuple[dict[str, Report], str]:
        """Wait until all has been sent and all members have reported. Returns the reports, and why it cannot end well
        any more, "" if it has."""
        while True:
            ended = attempt.has_ended()
            reports = self._point.reports(roster.epoch)
            with self._news:
                gone = known - {recipient.incarnation for recipient in self._recipients} - reports.keys()
                closed = self._closed
            failed = [report for report in reports.values() if report.error]
            if ended and (error := attempt.error()) is not None:
                return reports, first_line(error)
            if ended and len(reports) == len(roster.members):
                return reports, ""
            if closed:
                return reports, "the learner ends"
            if gone:
                return reports, f"{', '.join(self._names(sorted(gone)))} left"
            if failed and not ended:
                return reports, f"{self._names([failed[0].member])[0]}: {failed[0].error}"
            if time.monotonic() >= until:
                return reports, f"not everybody had the weights within {roster.limit_s:g} s"
            self._pause(LOOK_S)

    def _send(self, image: Image, roster: Roster, held: list[Group]) -> None:
        """In an attempt: join the group unless it is `held`, and broadcast."""
        try:
            if not held:
                store = self._point.connection()
                held.append(Group(roster, store, 0, address=self._point.address, device=self._device))
            held[0].send(roster.epoch, image.weights, image.data(), limit_s=roster.limit_s)
        finally:
            image.release()

    def _last_words(self, roster: Roster) -> dict[str, Report]:
        """The members' reports on a round that was called off, as many as come in time."""
        until = time.monotonic() + min(REPORTS_S, self._deadline_s * (1 - MEETING - TRANSFER))
        reports = self._point.reports(roster.epoch)
        while len(reports) < len(roster.members) and time.monotonic() < until and not self._closed:
            self._pause(LOOK_S)
            reports = self._point.reports(roster.epoch)
        return reports

    def _pause(self, seconds: float) -> None:
        """Until there is something new from `serve` or `close`, also since the last pause, or for so long."""
        with self._news:
            if not self._stirred:
                self._news.wait(seconds)
            self._stirred = False

    def _count(self, image: Image, reports: Mapping[str, Report], *, seconds: float) -> None:
        done = [report.member for report in reports.values() if not report.error]
        with self._news:
            present = {recipient.incarnation for recipient in self._recipients}
            self._measured["bytes"] += image.manifest.nbytes * len(done)
            self._measured["seconds"] += seconds
        kept = {member: weights for member, weights in self._delivered.items() if member in present}
        self._delivered = kept | dict.fromkeys(done, image.weights)

    def _note(self, members: Sequence[str] | set[str], weights: Weights, phase: WeightsPhase, since: float) -> None:
        """These are late, and are not waited for until they come by themselves."""
        self._excused |= set(members)
        names = self._names(sorted(members))
        with self._news:
            self._late.extend(Late(name, weights, phase, since) for name in names)

    def _names(self, members: Sequence[str]) -> list[str]:
        """The collectors' names, as far as they are known."""
        with self._news:
            names = {recipient.incarnation: recipient.name for recipient in self._recipients}
        return [names.get(member, member) for member in members]


def parse(offer: Mapping[str, Any]) -> CollectiveOffer:
    """The announced offer, checked in itself. Raises WeightsError."""
    return parse_manifest_offer(offer, CollectiveOffer, "collective")
