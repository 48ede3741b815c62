"""Who is to get the weights, by which way, and who is late with them: what `outlet.py` decides, without doing it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncrl.buffers.base import MemberStats
from asyncrl.config.weights import WeightsConfig
from asyncrl.staleness import Weights
from asyncrl.weights.base import Late, Recipient, Transport, WeightsPhase
from asyncrl.weights.reach import Place, choose


class _Way(msgspec.Struct, frozen=True):
    """What a collector's beat says under `weights`."""

    transport: Transport | None = None
    weights: Weights | None = None
    phase: WeightsPhase | None = None
    since: float = 0.0


class _Told(msgspec.Struct, frozen=True):
    """What of a collector's beat is about weights."""

    place: Place | None = None
    weights: _Way | None = None


def recipients(members: Iterable[MemberStats]) -> list[Recipient]:
    """The collectors that are alive. One that says what this version does not understand has said nothing."""
    found = []
    for member in members:
        if not member.alive:
            continue
        try:
            told = msgspec.convert(dict(member.progress), _Told)
        except msgspec.ValidationError:
            told = _Told()
        way = told.weights or _Way()
        found.append(
            Recipient(
                name=member.name,
                incarnation=member.incarnation,
                place=told.place,
                transport=way.transport,
                serving=member.serving,
                weights=way.weights,
                phase=way.phase,
                since=way.since,
            )
        )
    return found


def by_transport(
    found: Sequence[Recipient], config: WeightsConfig, *, learner: Place, left_out: frozenset[str] = frozenset()
) -> dict[Transport, list[Recipient]]:
    """What each transport but shm, which needs no sender, has to serve: those that chose it, or will by what they say.

    A transport that the recipe names is served though nobody has come yet: what it lacks shows at the start. left_out:
    names of collectors for which no collective transfer waits.
    """
    ways: dict[Transport, list[Recipient]] = {}
    if config.transport != "auto" and config.transport != "shm":
        ways[config.transport] = []
    for one in found:
        transport = one.transport
        if transport is None and one.place is not None:
            transport = choose(learner, one.place, config.transport).transport
        if transport is None or transport == "shm" or (transport == "collective" and one.name in left_out):
            continue
        ways.setdefault(transport, []).append(one)
    return ways


def document(
    weights: Weights,
    *,
    fork: Weights,
    place: Place,
    checksums: Mapping[str, str],
    offers: Iterable[Mapping[str, Any] | None],
) -> dict[str, Any]:
    """What is announced (`asyncrl.weights.base`). fork: what this lineage goes on from."""
    return {
        "lineage": weights.lineage,
        "version": weights.version,
        "fork": {"parent": fork.lineage, "version": fork.version},
        "place": msgspec.to_builtins(place),
        "checksums": dict(checksums),
        "offers": [dict(offer) for offer in offers if offer is not None],
    }


@dataclass(slots=True)
class _Stay:
    """A collector, where it is with its weights."""

    where: tuple[object, ...]
    since: float  # monotonic seconds; when it was first seen there
    late: bool = False
    left_out: bool = False


@dataclass(slots=True)
class Lateness:
    """Since when each collector is where it is, by this process's clock: other hosts have clocks of their own, and a
    collector that was stopped still says what it said last."""

    deadline_s: float
    _stays: dict[str, _Stay] = field(default_factory=dict)

    @property
    def left_out(self) -> frozenset[str]:
        """Names of those for which no collective transfer is to wait: found late, and not moved on since. Whoever waits
        for an announcement is none of them unless a sender says so: what it waits for may be that very transfer."""
        return frozenset(name for name, stay in self._stays.items() if stay.left_out)

    def look(self, found: Sequence[Recipient], newest: Weights, *, now: float | None = None) -> list[Late]:
        """Who has just become late on the way to `newest`. now: monotonic seconds."""
        now = time.monotonic() if now is None else now
        stays: dict[str, _Stay] = {}
        late = []
        for one in found:
            if one.phase is None and (one.weights or (one.serving is not None and one.serving >= newest)):
                continue
            stay = self._stays.get(one.name)
            where = _where(one)
            if stay is None or stay.where != where:
                stay = _Stay(where, now)
            elif not stay.late and now - stay.since > self.deadline_s:
                stay.late, stay.left_out = True, one.phase not in (None, "announce")
                late.append(Late(one.name, newest, one.phase or "announce", time.time() - (now - stay.since)))
            stays[one.name] = stay
        self._stays = stays
        return late

    def mark(self, late: Iterable[Late], found: Iterable[Recipient], *, now: float | None = None) -> None:
        """A sender has found these late: they are, until they move on."""
        now = time.monotonic() if now is None else now
        names = {one.member for one in late}
        for one in found:
            if one.name in names:
                self._stays[one.name] = _Stay(_where(one), now, late=True, left_out=True)


def _where(one: Recipient) -> tuple[object, ...]:
    return (one.incarnation, one.serving, one.phase, one.weights)
