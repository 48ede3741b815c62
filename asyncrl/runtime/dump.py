"""`asyncrl buffer dump`: what lies in the buffer now, as one Parquet file that any tool opens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.buffers.base import State
from asyncrl.buffers.remote import RedisBuffer
from asyncrl.runtime.inspection import rows_of
from asyncrl.schema import SUPPORTED_SCHEMA, decode

DUMPABLE = (State.HELD, State.LEASED)
"""States whose groups lie in the store. Trained ones lie in the archive, as Parquet already."""

STATE_COLUMN = "state"


@dataclass(slots=True)
class Dumped:
    """What a dump came to. `moved_on`: tickets that were trained, or given back, between listing and reading them."""

    groups: int = 0
    trajectories: int = 0
    moved_on: int = 0
    damaged: list[str] = field(default_factory=list)


async def dump(buffer: RedisBuffer, path: Path, states: Sequence[State]) -> Dumped:
    """Write the groups of tickets in `states` to `path`: the record's columns (`schema.SUPPORTED_SCHEMA`, null where a
    group has none) and `state`, a row per trajectory, a row group per ticket, by ordinal.

    Nothing in the store changes, and the run goes on; so each group is as it was when it was read, and one at a time is
    in memory. The file appears whole or not. A group that cannot be read is left out and named in the result.
    """
    result = Dumped()
    schema = SUPPORTED_SCHEMA.append(pa.field(STATE_COLUMN, pa.string()))
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
            async for row in rows_of(buffer, *states):
                payload = await buffer.payload(row.ordinal)
                if payload is None:
                    result.moved_on += 1
                    continue
                try:
                    group = decode(payload)
                except ValueError as error:
                    result.damaged.append(f"ticket {row.ordinal}: {error}")
                    continue
                columns = {name: group.column(name) for name in group.schema.names}
                columns[STATE_COLUMN] = pa.array([row.state.value] * group.num_rows, pa.string())
                whole = [columns.get(field.name, pa.nulls(group.num_rows, field.type)) for field in schema]
                writer.write_batch(pa.RecordBatch.from_arrays(whole, schema=schema))
                result.groups += 1
                result.trajectories += group.num_rows
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return result
