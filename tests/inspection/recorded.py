"""A small run, made by hand: an embedded store with tickets in many states, an archive and a tokenizer."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.base import GroupHeader, Lease, Member, Ticket
from asyncrl.buffers.remote import RedisBuffer
from asyncrl.buffers.server import EmbeddedServer
from asyncrl.buffers.store import open_store, payload_key
from asyncrl.config.identity import recipe_hash
from asyncrl.config.loading import load_recipe
from asyncrl.config.recipe import to_builtins
from asyncrl.learners.limits import limits_of
from asyncrl.runtime import folder as folders
from asyncrl.schema import Group, decode, digest, encode, sampled_tokens, span_weights, to_batch, version_range
from asyncrl.staleness import Weights
from asyncrl.telemetry.metrics import MetricsWriter
from tests.inspection.conftest import group, trajectory

NAME = "recorded"
TRAINED, HELD, LEASED, DAMAGED, ISSUED = (0, 1), 4, (2, 3), 5, 6
"""Tickets by what became of them; ticket 7 was issued as well."""

MOVED = TRAINED[0]
"""Its row has left the store for the archive's ledger."""

OVERRIDES = (
    f"run.name={NAME}",
    "learner.groups_per_step=2",
    "collector.group_size=2",
    "buffer.max_trajectory_age=3",
    "buffer.over_age=drop",
    "buffer.lookahead=1",
)


def record(folder: Path) -> Path:
    """Make the run into `folder`; its store is stopped again."""
    (folder / "logs").mkdir(parents=True)
    loaded = load_recipe("tiny-reverse", overrides=OVERRIDES)
    folders.describe(folder, loaded)
    characters = {chr(n): n for n in range(128)}
    tokenizer = Tokenizer(WordLevel(characters, unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    (folder / "checkpoints" / "version-000001").mkdir(parents=True)
    tokenizer.save(str(folder / "checkpoints" / "version-000001" / "tokenizer.json"))

    async def work() -> None:
        async with EmbeddedServer(folder) as server:
            store = await open_store(server.url)
            try:
                limits = limits_of(loaded.recipe, max_length=64)
                buffer = await store.create_run(
                    NAME, recipe=to_builtins(loaded.recipe), recipe_hash=recipe_hash(loaded.recipe), limits=limits
                )
                await _fill(buffer, folder)
            finally:
                await store.close()

    asyncio.run(work())
    return folder


async def _fill(buffer: RedisBuffer, folder: Path) -> None:
    member = Member("collector-0", "one")
    lineage = await buffer.new_lineage(parent=None, limits=buffer.limits)
    await buffer.announce(Weights(lineage, 0), {"transport": "none"})
    await buffer.join(member, {})
    await buffer.beat(member, serving=Weights(lineage, 0), checksum="", progress={}, info={})
    tickets = await buffer.tickets(member, seq=1, want=8, wait_s=5.0)
    for ticket in tickets[:ISSUED]:
        made = group_of(ticket)
        await buffer.put(member, header_of(made), encode(made))
    await _train(buffer, folder, await _leased(buffer, lineage, 0))
    await _leased(buffer, lineage, 1)
    await buffer.store.client.set(payload_key(buffer.prefix, f"{DAMAGED}:{tickets[DAMAGED].attempt}"), b"junk")


async def _leased(buffer: RedisBuffer, lineage: int, step: int) -> Lease:
    lease = await buffer.lease(lineage, step, wait_s=5.0)
    assert isinstance(lease, Lease)
    return lease


async def _train(buffer: RedisBuffer, folder: Path, lease: Lease) -> None:
    payloads = await buffer.payloads(lease)
    Archive(folder / "archive").write(lease.lineage, lease.step, [decode(payload) for payload in payloads])
    commit = await buffer.commit(lease.lineage, lease.step)
    metrics = MetricsWriter(folder / "metrics.jsonl")
    metrics.write({"event": "start", "lineage": lease.lineage, "parent": [0, 0], "version": 0})
    metrics.write({"step": 1, "version": 1, "lineage": lease.lineage, "time": time.time()})
    metrics.close()
    await buffer.checkpointed(lease.lineage, commit.version)
    (moved,) = await buffer.settled(lease.lineage, limit=1)
    assert moved.ordinal == MOVED
    Archive(folder / "archive").ledger.write(Weights(lease.lineage, commit.version), [moved])
    await buffer.archived(lease.lineage, [MOVED])


def group_of(ticket: Ticket) -> Group:
    rows = [
        trajectory(
            f"reverse {ticket.ordinal}>", [(f"{ticket.ordinal}!".encode(), 0)], member=member, reward=1.0 - member
        )
        for member in range(2)
    ]
    return group(*rows, ticket=ticket.ordinal, attempt=ticket.attempt)


def header_of(made: Group) -> GroupHeader:
    batch = to_batch(made)
    oldest, newest = version_range(batch)
    return GroupHeader(
        ordinal=made.ticket,
        attempt=made.attempt,
        weights=Weights(made.lineage, newest),
        oldest=oldest,
        newest=newest,
        spans=span_weights(batch),
        tokens=sampled_tokens(batch),
        seconds=0.1,
        digest=digest(encode(made)),
    )
