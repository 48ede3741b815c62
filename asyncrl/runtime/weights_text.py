"""How weights on their way, and proofs of what is served, read for a person. Pure: from what collectors' beats say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from asyncrl.buffers.base import MemberStats, Stats
from asyncrl.staleness import Weights
from asyncrl.telemetry.table import aligned, visible
from asyncrl.telemetry.text import duration

# --- on their way -----------------------------------------------------------------------------------------------------


class _Way(msgspec.Struct, frozen=True):
    """A beat's `info["weights"]` (`collectors/course.py`)."""

    transport: str | None
    why: str
    phase: str | None
    weights: Weights | None
    since: float
    error: str


def weights_lines(stats: Stats) -> list[str]:
    """A row for each collector that has said how its weights come: transport and why, phase and since when, and what
    went wrong last. [] where none has."""
    rows = []
    for member in stats.members:
        way = _read(member.progress.get("weights"), _Way)
        if way is None or way.transport is None:
            continue
        rows.append(
            (visible(member.name), visible(way.transport), named(member.serving), _phase(way, stats.time), _why(way))
        )
    return aligned([("weights", "over", "serves", "phase", ""), *rows]) if rows else []


def _phase(way: _Way, now: float) -> str:
    if way.weights is None:
        return "-"
    if way.phase is None:
        return f"{named(way.weights)} staged, waits for what runs"
    return f"{visible(way.phase)} {named(way.weights)} for {duration(max(0.0, now - way.since))}"


def _why(way: _Way) -> str:
    return visible(way.why + (f"; last error: {way.error}" if way.error else ""))


def named(weights: Weights | None) -> str:
    """`lineage/version`, as in the archive's names."""
    return "-" if weights is None else f"{weights.lineage}/{weights.version}"


# --- what is served ---------------------------------------------------------------------------------------------------


class _Engine(msgspec.Struct, frozen=True):
    engine: str
    weights: Weights | None
    checksum: str
    error: str


class _Proof(msgspec.Struct, frozen=True):
    """A beat's `info["verified"]` (`collectors/updates.py`)."""

    id: str
    engines: list[_Engine]


Verdict = Literal["equal", "differs", "not comparable", "serves nothing", "failed", "no answer"]


@dataclass(frozen=True, slots=True)
class Checked:
    """What one engine, or a collector that did not answer, was found to serve."""

    collector: str
    engine: str
    weights: Weights | None
    expected: str
    found: str
    verdict: Verdict
    detail: str = ""

    @property
    def wrong(self) -> bool:
        """Whether it is not, or may not be, what was published."""
        return self.verdict in ("differs", "failed", "no answer")


def answered(member: MemberStats, request_id: str) -> bool:
    """Whether its last beat has the answer to this request."""
    proof = _read(member.progress.get("verified"), _Proof)
    return proof is not None and proof.id == request_id


def checked(members: Iterable[MemberStats], request_id: str, published: Mapping[str, str]) -> list[Checked]:
    """Each engine of the collectors that are alive, against what was published: `lineage/version` -> checksum."""
    found = []
    for member in members:
        if not member.alive:
            continue
        proof = _read(member.progress.get("verified"), _Proof)
        if proof is None or proof.id != request_id:
            found.append(Checked(member.name, "-", member.serving, "", "", "no answer"))
            continue
        found += [_compared(member.name, engine, published) for engine in proof.engines]
    return found


def _compared(collector: str, engine: _Engine, published: Mapping[str, str]) -> Checked:
    expected = published.get(named(engine.weights), "")
    detail = ""
    verdict: Verdict
    if engine.error:
        verdict, detail = "failed", engine.error
    elif engine.weights is None:
        verdict = "serves nothing"
    elif not expected:
        verdict, detail = "not comparable", "no checksum was published of it, or not lately (weights.verify_every)"
    else:
        verdict = "equal" if engine.checksum == expected else "differs"
    return Checked(collector, engine.engine, engine.weights, expected, engine.checksum, verdict, detail)


def proof_lines(found: Sequence[Checked]) -> list[str]:
    """The table, and a line for each collector that is not proved."""
    rows = [("collector", "engine", "serves", "published", "found", "")]
    rows += [
        (
            visible(one.collector),
            visible(one.engine),
            named(one.weights),
            one.expected or "-",
            visible(one.found) or "-",
            one.verdict + (f": {visible(one.detail)}" if one.detail else ""),
        )
        for one in found
    ]
    return [*aligned(rows), *(line for one in found if (line := _sentence(one)))]


def _sentence(one: Checked) -> str:
    who, what = visible(one.collector), named(one.weights)
    if one.verdict == "differs":
        return f"{who} serves other weights than were published as {what}: expected {one.expected}, found {one.found}"
    if one.verdict == "no answer":
        return f"{who} did not answer in time: what it serves is not proved"
    return ""


def _read(told: Any, form: type[_Way] | type[_Proof]) -> Any:
    """A beat is another program's word: what is not of that form is left out rather than trusted."""
    try:
        return msgspec.convert(told, form)
    except msgspec.ValidationError:
        return None
