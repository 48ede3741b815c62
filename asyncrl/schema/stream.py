"""A group as bytes: an Arrow IPC stream of one record batch, and the digest that goes with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import xxhash

from asyncrl.schema.columns import FIXED_BYTES, ROW, ROW_BYTES, SCHEMA, TOKEN_BYTES, check_schema
from asyncrl.schema.packed import together
from asyncrl.schema.record import Group, arrays, plain
from asyncrl.schema.rules import check_columns, check_memory, check_nulls, check_rules, validate

_SCHEMA_MESSAGE = SCHEMA.serialize().to_pybytes()  # a stream begins with it
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def encode(group: Group) -> bytes:
    """Arrow IPC stream: schema with `schema_version` in its metadata, one record batch.

    Raises ValueError for a group that `decode` would refuse, or that is larger than `max_group_bytes` promises.
    """
    tokens, starts, rows = plain(group)
    columns = arrays(tokens, starts, rows)
    check_nulls(columns)
    # From what is at hand: getting it back out of Arrow takes twice as long as checking it.
    check_rules(tokens, starts, dict(zip(ROW.names, zip(*rows, strict=True), strict=True)), [0] * len(rows))
    batch = pa.RecordBatch.from_arrays(list(columns.values()), schema=SCHEMA)
    payload = b"".join((_SCHEMA_MESSAGE, batch.serialize(), _END_OF_STREAM))
    bound = TOKEN_BYTES * len(tokens["token_ids"]) + len(rows) * ROW_BYTES + FIXED_BYTES
    if len(payload) > bound:
        raise ValueError(
            f"group of ticket {group.ticket} takes {len(payload)} bytes, the bound is {bound}: "
            f"beside its tokens a row may take {ROW_BYTES} bytes; put less into info or reward_parts"
        )
    return payload


def decode(payload: bytes | memoryview, *, check: bool = True) -> pa.RecordBatch:
    """The record batch of a payload, without copying: its columns keep the payload alive.

    Raises ValueError: not an Arrow stream, another schema version, a column missing or of another type, truncated, not
    exactly one record batch, bytes after the end, and (unless `check` is false, for bytes this process made itself)
    whatever `validate` refuses.
    """
    source = pa.BufferReader(pa.py_buffer(payload))
    try:
        with pa.ipc.open_stream(source) as reader:
            check_schema(reader.schema)
            batches = list(reader)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"not a whole Arrow stream ({len(payload)} bytes): {error}") from error
    if bytes(payload[-8:]) != _END_OF_STREAM and source.tell() == len(payload):
        raise ValueError(f"truncated: {len(payload)} bytes end without the stream's end mark")
    if source.tell() != len(payload):
        raise ValueError(f"{len(payload) - source.tell()} bytes after the end of the stream")
    if len(batches) != 1:
        raise ValueError(f"{len(batches)} record batches in one payload; a group is exactly one")
    if check:
        validate(batches[0])
    return batches[0]


def decode_all(payloads: Sequence[bytes | memoryview]) -> list[pa.RecordBatch]:
    """`decode` of each, at a third of the price: what the groups say is checked for all rows of all groups at once.

    Raises ValueError, with the place of the first payload that is refused.
    """
    batches: list[pa.RecordBatch] = []
    for n, payload in enumerate(payloads):
        try:
            batches.append(decode(payload, check=False))
            check_memory(batches[-1])
        except ValueError as error:
            raise ValueError(f"payload {n}: {error}") from error
    if not batches:
        return []
    table = together(batches).combine_chunks()
    firsts = np.cumsum([0, *(batch.num_rows for batch in batches[:-1])])
    try:
        check_columns({name: table.column(name).chunk(0) for name in SCHEMA.names}, firsts)
    except ValueError:
        for n, batch in enumerate(batches):  # which of them, and which of its own rows
            try:
                validate(batch)
            except ValueError as error:
                raise ValueError(f"payload {n}: {error}") from error
        raise
    return batches


def digest(payload: bytes | memoryview) -> str:
    """xxh3_64 hex of a payload."""
    return xxhash.xxh3_64_hexdigest(payload)


def max_group_bytes(group_size: int, max_length: int) -> int:
    """Upper bound of an encoded group's bytes: what is reserved with a ticket. `encode` refuses anything above it."""
    return group_size * (TOKEN_BYTES * max_length + ROW_BYTES) + FIXED_BYTES
