"""A group as bytes: an Arrow IPC stream of one record batch, and the digest that goes with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import xxhash

from asyncrl.schema.columns import (
    FIXED_BYTES,
    ROW,
    ROW_BYTES,
    SCHEMA,
    SUPPORTED_SCHEMA,
    TOKEN_BYTES,
    check_schema,
    starts_of,
)
from asyncrl.schema.packed import together
from asyncrl.schema.record import Group, arrays, batch_of, plain, support_in
from asyncrl.schema.rules import (
    check_columns,
    check_memory,
    check_nulls,
    check_rules,
    check_support,
    check_supports,
    validate,
)

_SCHEMA_MESSAGE, _SUPPORTED_SCHEMA_MESSAGE = (  # a stream begins with one of them
    schema.serialize().to_pybytes() for schema in (SCHEMA, SUPPORTED_SCHEMA)
)
SUPPORT_BYTES = 4
"""Of each count and each id of a support."""
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def encode(group: Group) -> bytes:
    """Arrow IPC stream: schema with `schema_version` in its metadata, one record batch.

    Raises ValueError for a group that `decode` would refuse, or that is larger than `max_group_bytes` promises.
    """
    tokens, starts, rows = plain(group)
    support = support_in(group)
    columns = arrays(tokens, starts, rows, support)
    check_nulls(columns)
    # From what is at hand: getting it back out of Arrow takes twice as long as checking it.
    check_rules(tokens, starts, dict(zip(ROW.names, zip(*rows, strict=True), strict=True)), [0] * len(rows))
    message, masks = _SCHEMA_MESSAGE, 0
    if support is not None:
        check_support(support, starts, starts_of(columns["support_ids"]), tokens)
        message, masks = _SUPPORTED_SCHEMA_MESSAGE, SUPPORT_BYTES * (len(support.counts) + len(support.ids))
    payload = b"".join((message, batch_of(columns).serialize(), _END_OF_STREAM))
    bound = TOKEN_BYTES * len(tokens["token_ids"]) + masks + len(rows) * ROW_BYTES + FIXED_BYTES
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
        for batch in batches:
            check_supports(batch)
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


def max_group_bytes(group_size: int, max_length: int, *, segments: int = 1, support: int = 0) -> int:
    """Upper bound of an encoded group's bytes: what is reserved with a ticket. `encode` refuses anything above it.

    max_length: tokens of a row. segments: rows of a member, at most. support: ids that the record has of what a token
    was drawn between, at most; 0: every token is drawn between all of the vocabulary."""
    token = TOKEN_BYTES + (SUPPORT_BYTES * (1 + support) if support else 0)
    return group_size * segments * (token * max_length + ROW_BYTES) + FIXED_BYTES
