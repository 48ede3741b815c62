"""Where requests of episodes go: to one of a collector's engines, and on to another or a restarted one if it is lost.

An episode stays with its engine, which may still hold the conversation, for as long as that takes work. A request whose
engine failed goes on from what it had sampled, where the engine can tell, and begins again where it cannot.

What holds for weights: within an episode versions never fall, and none is below what its ticket was issued for. An
engine that serves older weights (it was started again, and its transport lags) gets no such request: it waits until one
serves what it needs, for `wait_s` at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from asyncrl.collectors.again import PAUSES_S
from asyncrl.collectors.engines.base import Completion, EngineError, Request
from asyncrl.collectors.engines.parts import continued, ended, joined
from asyncrl.collectors.entrance import EngineLost
from asyncrl.collectors.episode import Sampler
from asyncrl.collectors.fleet import Fleet, Host
from asyncrl.collectors.routing import Ask, spread
from asyncrl.staleness import Weights


@dataclass(slots=True)
class _Session:
    host: Host | None = None
    newest: Weights | None = None  # that sampled tokens of it


@dataclass(slots=True)
class _Answer:
    """A request that runs."""

    heard: Callable[[], None] | None
    host: Host | None = None
    parts: list[Completion] = field(default_factory=list)  # of engines that are lost; the last one once it has ended


class Seats(Sampler):
    """The places of some episodes at the engines of a fleet."""

    def __init__(self, fleet: Fleet, *, may: Callable[[Weights], bool], wait_s: float) -> None:
        """may: whether weights may sample for these episodes. wait_s: how long a request waits for an engine that
        serves such weights."""
        self.touched: set[Weights] = set()  # served while requests ran: those of all tokens are among them
        self.engines: set[str] = set()  # by name, that sampled something
        self._fleet, self._may, self._wait_s = fleet, may, wait_s
        self._sessions: dict[str, _Session] = {}
        self._placed: dict[str, Host] = {}  # requests that have a slot, some before they are asked
        self._unasked: dict[int, str] = {}  # member -> the request that a slot is reserved for
        self._answers: dict[str, _Answer] = {}
        self._heard: dict[str, Callable[[], None]] = {}
        self._sampled = 0  # by requests that have ended

    @property
    def tokens(self) -> int:
        """Sampled so far."""
        return self._sampled + sum(self._progress(id, answer) for id, answer in self._answers.items())

    def reserve(self, requests: Iterable[Request]) -> bool:
        """Slots for the first requests of episodes, which are asked soon. False: no engine takes them now."""
        hosts = [host for host in self._fleet.usable if host.engine.serving and self._may(host.engine.serving)]
        if not hosts:
            return False
        first = list(requests)
        for request, n in zip(first, spread([host.load() for host in hosts], [*map(_ask, first)]), strict=True):
            self._sessions[request.session] = _Session(hosts[n])
            self._place(request, hosts[n])
            self._unasked[request.member] = request.id
        return True

    async def generate(self, request: Request) -> Completion:
        """See Sampler. Raises EngineError when no engine serves what it needs in time, or it lost too many."""
        if request.id in self._answers:
            raise ValueError(f"request {request.id}: a request of this id is running: ids must be unique")
        if (reserved := self._unasked.pop(request.member, request.id)) != request.id:
            self._leave(reserved)  # its episode was lost before it asked, and has begun again under another name
        answer = self._answers[request.id] = _Answer(self._heard.get(request.id))
        try:
            await self._sample(request, answer)
            return joined(answer.parts)
        finally:
            self._sampled += self._progress(request.id, answer)
            del self._answers[request.id]
            self._heard.pop(request.id, None)
            self._leave(request.id)

    def partial(self, request_id: str) -> Completion | None:
        """See Sampler."""
        if (answer := self._answers.get(request_id)) is None:
            return None
        host = answer.host
        newest = None if host is None else host.entrance.partial(host.engine, request_id)
        known = [*answer.parts, *(() if newest is None else (newest,))]
        return joined(known) if known else None

    def listen(self, request_id: str, heard: Callable[[], None]) -> None:
        """See Sampler. Before `generate`, too."""
        self._heard[request_id] = heard
        if (answer := self._answers.get(request_id)) is not None:
            answer.heard = heard
            if answer.host is not None:
                answer.host.entrance.listen(answer.host.engine, request_id, heard)

    def touch(self) -> None:
        """Other weights may be served now: note what runs on under which."""
        for answer in self._answers.values():
            if answer.host is not None and answer.host.engine.serving is not None:
                self.touched.add(answer.host.engine.serving)

    def release(self) -> None:
        """The episodes have ended: no slot is theirs any more."""
        for request_id in list(self._placed):
            self._leave(request_id)

    async def _sample(self, request: Request, answer: _Answer) -> None:
        """Until `answer.parts` are the whole answer."""
        session = self._sessions.setdefault(request.session, _Session())
        rest, lost = request, 0
        while True:
            host = answer.host = await self._seat(rest, session)
            engine = host.engine
            self.touch()
            try:
                part = await host.entrance.generate(engine, rest, heard=answer.heard)
            except EngineLost as error:
                self._fleet.fail(host, engine, str(error))
                if lost == len(PAUSES_S):
                    raise
                pause_s, lost, found = PAUSES_S[lost], lost + 1, error.sampled
            else:
                host.restarts = 0
                self._keep(part, answer, session, engine.name)
                return
            finally:
                answer.host = None
                self._leave(request.id)
            if found is not None and found.spans:
                if (whole := ended(rest, found)) is not None:
                    self._keep(whole, answer, session, engine.name)
                    return
                self._keep(found, answer, session, engine.name)
                rest = continued(rest, found)
            await asyncio.sleep(pause_s)

    def _keep(self, part: Completion, answer: _Answer, session: _Session, engine: str) -> None:
        answer.parts.append(part)
        if part.spans:
            self.engines.add(engine)
            self.touched.update(span.weights for span in part.spans)
            newest = part.spans[-1].weights
            session.newest = newest if session.newest is None else max(session.newest, newest)

    async def _seat(self, request: Request, session: _Session) -> Host:
        """The engine that takes the request, with a slot for it."""
        host = session.host
        if host is None or not self._takes(host, session):
            self._leave(request.id)
            host = self._best(request, session) or await self._awaited(request, session)
        session.host = host
        self._place(request, host)
        return host

    async def _awaited(self, request: Request, session: _Session) -> Host:
        """An engine that takes the request, once there is one: the next activation looks again."""
        self._fleet.waiting[request.id] = time.monotonic()
        try:
            async with asyncio.timeout(self._wait_s):
                while (host := self._best(request, session)) is None:
                    await self._fleet.until_activated()
                return host
        except TimeoutError:
            why = "; ".join(f"{host.engine.name}: {host.failed}" for host in self._fleet.hosts if host.failed)
            raise EngineError(
                f"for {self._wait_s:g} s no engine served weights that request {request.id} may go on with"
                + (f" ({why})" if why else "")
            ) from None
        finally:
            del self._fleet.waiting[request.id]

    def _best(self, request: Request, session: _Session) -> Host | None:
        hosts = [host for host in self._fleet.hosts if self._takes(host, session)]
        if len(hosts) < 2:
            return hosts[0] if hosts else None
        (n,) = spread([host.load() for host in hosts], [_ask(request)])
        return hosts[n]

    def _takes(self, host: Host, session: _Session) -> bool:
        serving = host.engine.serving
        if host.failed or serving is None or not self._may(serving):
            return False
        return session.newest is None or serving >= session.newest

    def _place(self, request: Request, host: Host) -> None:
        if request.id not in self._placed:
            host.take(request.id, _ask(request))
            self._placed[request.id] = host

    def _leave(self, request_id: str) -> None:
        if (host := self._placed.pop(request_id, None)) is not None:
            self._fleet.release(host, [request_id])

    def _progress(self, request_id: str, answer: _Answer) -> int:
        host = answer.host
        running = 0 if host is None else host.entrance.progress(host.engine, request_id)
        return running + sum(len(part.token_ids) for part in answer.parts)


def _ask(request: Request) -> Ask:
    return Ask(request.group, len(request.token_ids), request.sampling.max_tokens)
