"""What the server's scripts answer, as types. JSON on the way, since Lua has no other that both sides read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.buffers.base import GroupHeader, MemberStats, State, Stats, TicketRow
from asyncrl.buffers.words import blocked_words, waiting_words
from asyncrl.staleness import Weights


def weights_of(pair: Sequence[int] | None) -> Weights | None:
    return Weights(int(pair[0]), int(pair[1])) if pair else None


def header_of(doc: Mapping[str, Any]) -> GroupHeader:
    return GroupHeader(
        ordinal=doc["ordinal"],
        attempt=doc["attempt"],
        weights=Weights(*doc["weights"]),
        oldest=doc["oldest"],
        newest=doc["newest"],
        spans=tuple(Weights(*s) for s in doc["spans"]),
        tokens=doc["tokens"],
        seconds=float(doc["seconds"]),
        digest=doc["digest"],
        reward=doc.get("reward"),
        length=float(doc["length"]),
    )


def row_of(doc: Mapping[str, Any]) -> TicketRow:
    uses = tuple(Weights(*use) for use in doc["uses"] or ())
    return TicketRow(
        ordinal=doc["ordinal"],
        state=State(doc["state"]),
        attempt=doc["attempt"],
        reason=doc["reason"],
        trained=uses[-1] if uses else None,
        owner=doc["owner"],
        lo=doc["lo"],
        has_payload=doc["has_payload"],
        size=doc["size"],
        uses=uses,
        losses=doc["losses"],
        requeues=doc["requeues"],
        left=doc["left"],
        times={name: float(at) for name, at in (doc["times"] or {}).items()},
    )


def stats_of(run: str, reply: Mapping[str, Any]) -> Stats:
    waiting = reply["waiting"] and waiting_words(
        tuple(reply["waiting"]["ordinals"] or ()),
        tuple(reply["waiting"]["owners"] or ()),
        len(reply["members"] or ()),
        float(reply["waiting"]["since"]),
    )
    members = [
        MemberStats(
            name=m["name"],
            incarnation=m["incarnation"],
            serving=weights_of(m["serving"]),
            checksum=m["checksum"],
            alive=m["alive"],
            beat_age_s=float(m["age"]),
            issued=m["issued"],
            progress=m["info"],
        )
        for m in sorted(reply["members"] or [], key=lambda m: (m["name"], m["incarnation"]))
    ]
    return Stats(
        run=run,
        phase=reply["phase"],
        lineage=reply["lineage"],
        version=reply["version"],
        tickets=reply["tickets"],
        states={state: int(reply["states"].get(state, 0)) for state in State},
        reasons={k: int(v) for k, v in reply["reasons"].items() if v},
        lost_tokens={k: int(v) for k, v in reply["lost_tokens"].items()},
        lost_seconds={k: float(v) for k, v in reply["lost_seconds"].items()},
        refused_puts=reply["refused"],
        bytes_reserved=reply["reserved"],
        bytes_held=reply["held"],
        bytes_kept=reply["kept"],
        members=members,
        waiting=waiting,
        checkpoint=reply["checkpoint"],
        forks={int(lineage): Weights(*origin) for lineage, origin in reply["forks"].items()},
        dues={int(step): int(uses) for step, uses in reply["dues"].items()},
        error=reply["error"],
        returns={k: int(v) for k, v in reply["returns"].items()},
        lost_reward=_means(reply["worth"], "reward"),
        lost_length=_means(reply["worth"], "length"),
        filtered_in_row=reply["filtered_in_row"],
        quarantined=reply["quarantined"],
        archived={k: int(v) for k, v in reply["archived"].items()},
        blocked=blocked_words(waiting, [(name, why, float(at)) for name, why, at in reply["blocked"] or ()]),
        time=float(reply["time"]),
    )


def _means(worth: Mapping[str, str], what: str) -> dict[str, float]:
    """ "key|what" is a sum, "key|whats" how many it sums."""
    ending = f"|{what}"
    keys = [name.removesuffix(ending) for name in worth if name.endswith(ending)]
    return {key: float(worth[f"{key}{ending}"]) / int(worth[f"{key}{ending}s"]) for key in keys}
