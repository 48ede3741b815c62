"""The rules of the contract that must hold after every act, on the reference model and on two buffers side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import zip_longest
from typing import Any

from asyncrl.buffers.base import TERMINAL, Lease, State, TicketRow
from asyncrl.buffers.limits import Limits
from asyncrl.buffers.reference.model import Model
from asyncrl.staleness import Weights, due_test, promised


class Broken(AssertionError):
    """A rule of the contract does not hold."""


def differences(here: Any, there: Any) -> str:
    """Of two snapshots only what differs."""
    if not isinstance(here, tuple) or not isinstance(there, tuple) or not is_dataclass(here[0]):
        return f"{here!r} here, {there!r} there"
    found = [
        f"{name}: {getattr(here[0], name)!r} here, {getattr(there[0], name)!r} there"
        for name in (f.name for f in fields(here[0]))
        if getattr(here[0], name) != getattr(there[0], name)
    ]
    rows = zip_longest(here[1], there[1])
    return "\n".join([*found, *(f"{mine!r} here,\n{theirs!r} there" for mine, theirs in rows if mine != theirs)])


def check_model(model: Model) -> None:
    """The sums of contract 1 and 8, recomputed from the rows."""
    limits, tickets = model.limits, list(model.all.values())
    if (
        len(tickets) + sum(model.gone.values()) != model.next_ordinal
        or sum(model.counts().values()) != model.next_ordinal
    ):
        raise Broken(f"{model.next_ordinal} tickets, but states sum to {model.counts()}")
    dues: dict[int, int] = {}
    for t in tickets:
        if t.state in (State.ISSUED, State.HELD, State.LEASED):
            left = promised(
                model.edge(t), limits.max_age, t.left, used=bool(t.uses), fresh_per_step=limits.fresh_per_step
            )
            for step in left[1:] if t.state is State.LEASED else left:
                dues[step] = dues.get(step, 0) + 1
    if dues != model.dues:
        raise Broken(f"dues {model.dues}, the rows say {dues}")
    issued = sum(t.state is State.ISSUED for t in tickets)
    if model.reserved != issued * limits.group_bytes:
        raise Broken(f"{model.reserved} bytes reserved for {issued} issued tickets")
    if model.held_bytes != sum(t.size for t in tickets if t.state in (State.HELD, State.LEASED)):
        raise Broken(f"held bytes are {model.held_bytes}")
    if model.kept_bytes != sum(t.size for t in tickets if t.state is State.TRAINED):
        raise Broken(f"kept bytes are {model.kept_bytes}")
    if model.phase == "running" and model.version < limits.max_steps and limits.over_age == "wait":
        first = model.version + (1 if model.leased else 0)
        if not due_test(dues, first_step=first, groups_per_step=limits.groups_per_step):
            raise Broken(f"V {model.version}: due test fails with {dues}")
    for t in tickets:
        if t.state is State.STALE and t.reason == "over_age" and limits.over_age == "wait":
            raise Broken(f"ticket {t.ordinal} expired under `wait`")


def check_batch(
    lease: Lease,
    weights: Weights,
    limits: Limits,
    tokens_of: Mapping[tuple[int, int], Sequence[Weights]],
    *,
    survives: Callable[[Weights], bool],
) -> None:
    """The batch that makes the step of `weights` is whole, young and of weights that survive. tokens_of: (ordinal,
    attempt) -> what sampled the group."""
    if len(set(lease.ordinals)) != len(lease.ordinals):
        raise Broken(f"a ticket twice in one batch: {lease.ordinals}")
    for header in lease.headers:
        edge = header.newest if limits.over_age == "mask" else header.oldest
        if weights.version - edge > limits.max_age:
            raise Broken(f"step {weights.version} trains ticket {header.ordinal} of age {weights.version - edge}")
        for span in tokens_of[(header.ordinal, header.attempt)]:
            if not survives(span) or span.version > weights.version:
                raise Broken(f"step {tuple(weights)} trains tokens of dead weights {span}")
    if len(lease.ordinals) != limits.groups_per_step:
        raise Broken(f"a batch of {len(lease.ordinals)} groups, not {limits.groups_per_step}")
    if lease.uses.count(0) < limits.fresh_per_step:
        raise Broken(f"{lease.uses} in a batch, at least {limits.fresh_per_step} must be fresh")


def check_uses(
    model: Model,
    trained: Mapping[int, Sequence[Weights]],
    archive: Mapping[int, TicketRow],
    *,
    survives: Callable[[Weights], bool],
) -> None:
    """Relative to the surviving weights, each ticket is trained exactly as often as the ledger says. trained: ordinal
    -> (lineage, step) of every use; archive: rows that have left the store."""
    for ordinal, uses in trained.items():
        surviving = [u for u in uses if survives(Weights(u.lineage, u.version + 1))]
        row = archive.get(ordinal) or model.all[ordinal]
        if surviving != list(row.uses):
            raise Broken(f"ticket {ordinal}: trained by {surviving} of the surviving weights, ledger: {row}")
        if len(surviving) > model.limits.max_uses:
            raise Broken(f"ticket {ordinal} is trained {len(surviving)} times: {surviving}")
        if row.state is State.TRAINED and not surviving:
            raise Broken(f"ticket {ordinal} is trained by no surviving weights: {row}")
    for ordinal, row in archive.items():
        if ordinal in model.all:
            raise Broken(f"ticket {ordinal} is in the store and in the archive")
        if row.state not in TERMINAL:
            raise Broken(f"ticket {ordinal} left the store as {row.state}")
