"""Where the members of collective transfers meet: a small store in the learner's process, and what is left there.

| key             | written by           | says                                                                  |
|-----------------|----------------------|-----------------------------------------------------------------------|
| `epoch`         | learner              | the newest epoch                                                      |
| `strays`        | members, appending   | who has come too late for an epoch                                    |
| `EPOCH/knocks`  | members, appending   | who is there (`roster.Knock`)                                         |
| `EPOCH/roster`  | learner, once        | who takes part (`roster.Roster`); nobody: it is called off            |
| `EPOCH/reports` | members, appending   | how it ended for them (`roster.Report`)                               |
| `EPOCH/over`    | learner, once        | that it has ended; why, if not well                                   |
| `GROUP/mesh/..` | the process group    | the addresses of its members                                          |

It is torch's TCPStore, since the process group needs one. It knows no password: whoever reaches the port can take part,
so it listens on one address only.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TypeVar

import msgspec
import psutil
from torch._C._distributed_c10d import TCPStore

from asyncrl.weights.base import WeightsError
from asyncrl.weights.group import mesh
from asyncrl.weights.roster import Knock, Report, Roster

KEPT = 64
"""Epochs whose keys stay: a member that comes so late still reads that it has missed the epoch."""

ANSWER_S = 10.0
"""For one answer from the learner's store, where no other limit applies: it is a thread that does nothing else."""

T = TypeVar("T")


class Stray(msgspec.Struct, frozen=True):
    member: str


class MeetingPoint:
    """The learner's end. For one thread."""

    def __init__(self, address: str, port: int) -> None:
        """Listens at once, on `address` only. Raises WeightsError."""
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, port), family=family, backlog=1024)
        except OSError as error:
            raise WeightsError(
                f"cannot listen on {address}, port {port}: {error.strerror}. Set weights.port to a free one (0: any), "
                "or weights.interface"
            ) from error
        self.address, self.port = address, int(listener.getsockname()[1])
        self._store = TCPStore(
            address,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=ANSWER_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._groups: dict[int, Roster] = {}  # those whose mesh may still be in the store

    def connection(self) -> TCPStore:
        """Another connection, for a thread of its own: one that waits keeps all others of the same from asking."""
        return _connect(self.address, self.port, ANSWER_S)

    def open(self, epoch: int) -> None:
        """`epoch` is the newest."""
        self._store.set("epoch", str(epoch))
        self._forget(epoch - KEPT)

    def knocks(self, epoch: int) -> dict[str, Knock]:
        """Who is there, by name; of one that knocked twice the last knock."""
        return {knock.member: knock for knock in self._read(f"{epoch}/knocks", Knock)}

    def strays(self) -> set[str]:
        """Who has come too late since the last call, by name."""
        found = {stray.member for stray in self._read("strays", Stray)}
        if found:
            self._store.delete_key("strays")  # one that came just now comes again
        return found

    def close(self, roster: Roster) -> None:
        """Nobody joins any more."""
        if roster.group == roster.epoch:
            self._groups[roster.group] = roster
        self._store.set(f"{roster.epoch}/roster", msgspec.json.encode(roster).decode())

    def reports(self, epoch: int) -> dict[str, Report]:
        """Who has reported, by name; of one that reported twice the first report."""
        return {report.member: report for report in reversed(self._read(f"{epoch}/reports", Report))}

    def end(self, epoch: int, why: str) -> None:
        """The epoch has ended; why: "" if well."""
        self._store.set(f"{epoch}/over", why or " ")  # an empty value counts as none

    def _read(self, key: str, kind: type[T]) -> list[T]:
        if not self._store.check([key]):
            return []
        return msgspec.json.Decoder(kind).decode_lines(self._store.get(key))

    def _forget(self, epoch: int) -> None:
        for name in ("knocks", "roster", "reports", "over"):
            self._store.delete_key(f"{epoch}/{name}")
        for group in [group for group in self._groups if group <= epoch]:
            roster = self._groups.pop(group)
            for rank in range(len(roster.members) + 1):
                self._store.delete_key(f"{mesh(group)}/0/{rank}")


class Visit:
    """A member's end: one connection, for one thread. All methods raise RuntimeError if the learner is gone."""

    def __init__(self, address: str, port: int, limit_s: float) -> None:
        """Raises WeightsError: nobody is there."""
        try:
            with socket.create_connection((address, port), timeout=limit_s) as probe:
                self.own_address = str(probe.getsockname()[0])
        except OSError as error:
            # TCPStore would try until its limit.
            raise WeightsError(
                f"the learner cannot be reached on {address}, port {port}: {error.strerror or error}"
            ) from error
        self.store = _connect(address, port, limit_s)

    def newest(self) -> int:
        """The epoch that is open, or was last."""
        return int(self.store.get("epoch"))

    def is_closed(self, epoch: int) -> bool:
        """Whether its roster is."""
        return bool(self.store.check([f"{epoch}/roster"]))

    def knock(self, epoch: int, knock: Knock) -> None:
        """Say that this member is there."""
        self._append(f"{epoch}/knocks", knock)

    def stray(self, member: str) -> None:
        """Say that this member was too late for an epoch, and will come to the next."""
        self._append("strays", Stray(member))

    def roster(self, epoch: int, limit_s: float) -> Roster:
        """Wait until the roster is closed."""
        key = f"{epoch}/roster"
        self.store.wait([key], timedelta(seconds=limit_s))
        return msgspec.json.decode(self.store.get(key), type=Roster)

    def report(self, epoch: int, report: Report) -> None:
        """Say how it ended."""
        self._append(f"{epoch}/reports", report)

    def over(self, epoch: int, limit_s: float) -> str:
        """Wait until the epoch has ended. Returns why, "" if well."""
        key = f"{epoch}/over"
        self.store.wait([key], timedelta(seconds=limit_s))
        return self.store.get(key).decode().strip()

    def _append(self, key: str, value: Knock | Report | Stray) -> None:
        self.store.append(key, msgspec.json.encode(value).decode() + "\n")  # type: ignore[attr-defined] # not in its stub


def own_address(interface: str | None, toward: str) -> str:
    """The address of this host's network `interface`; None: the one from which it reaches host `toward`.

    Raises WeightsError.
    """
    if interface is not None:
        found = psutil.net_if_addrs().get(interface, [])  # type: ignore[no-untyped-call]
        for family in (socket.AF_INET, socket.AF_INET6):
            for entry in found:
                if entry.family == family:
                    return str(entry.address).partition("%")[0]
        raise WeightsError(f"weights.interface {interface!r} has no address on this host")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(toward, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing: it only looks up the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WeightsError(
            f"no address of this host reaches {toward}: {error.strerror}. Set weights.interface"
        ) from error


def _connect(address: str, port: int, limit_s: float) -> TCPStore:
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=limit_s), wait_for_workers=False)
