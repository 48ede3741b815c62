"""Why somebody waits, said so that a person can act. The store knows guards and ordinals; the words are made here."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.buffers.base import Blocked, Waiting


def waiting_words(ordinals: tuple[int, ...], owners: tuple[str, ...], members: int, since: float) -> Waiting:
    """Who a learner waits for, said so that a person can act. A returned ticket has no owner: ""."""
    owners = tuple(filter(None, owners))
    if ordinals:
        shown = ", ".join(map(str, ordinals[:4])) + (f" and {len(ordinals) - 4} more" if len(ordinals) > 4 else "")
        reason = f"tickets {shown} on {', '.join(owners) or 'no collector'}"
    elif members == 0:
        reason = "a collector to join (none is connected)"
    else:
        reason = "collectors to serve weights of this lineage and take tickets"
    return Waiting(ordinals, owners, reason, since)


REFUSALS = {
    "no_weights": ("weights of this lineage to serve", "the learner's announcement, then its own staging"),
    "settling": ("the weights that were just published", "its own activation of them; it waits two seconds at most"),
    "no_rows": ("a row that is not given out yet", "nobody: the data's rows and epochs are used up"),
    "room": ("room: as much as the age bound allows is in work", "the learner's next commit"),
    "due": ("room: another ticket would make a held one expire", "the learner's next commit"),
    "steps": ("room: the steps that are left have their groups", "nobody, unless a ticket comes back"),
    "bytes": ("bytes: buffer.max_bytes is reserved or held", "the learner's next commit"),
    "turn": ("its turn among the waiting collectors", "its next beat"),
}
"""Guard that refuses a ticket (`Tickets._admit`) -> what its collector waits for, and who could end that."""


def blocked_words(waiting: Waiting | None, refused: Sequence[tuple[str, str, float]]) -> tuple[Blocked, ...]:
    """The learner, and (name, guard, since) of collectors, as rows of `asyncrl status`."""
    found = []
    if waiting is not None:
        by = ", ".join(waiting.members) or (
            "a collector" if not waiting.for_ordinals else "a collector that takes them"
        )
        found.append(Blocked("learner", waiting.reason, waiting.since, by))
    for name, guard, since in sorted(refused):
        what, by = REFUSALS[guard]
        found.append(Blocked(name, what, since, by))
    return tuple(found)
