"""The columns of the record, what they may take, and how to read one without copying."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

SCHEMA_VERSION = 1
FINISH_REASONS = ("stop", "length", "abort", "error")

TOKEN_COLUMNS: Mapping[str, tuple[pa.DataType, np.dtype[Any]]] = {
    "token_ids": (pa.int32(), np.dtype(np.int32)),
    "loss_mask": (pa.uint8(), np.dtype(np.uint8)),
    "logprobs": (pa.float32(), np.dtype(np.float32)),
    "versions": (pa.int32(), np.dtype(np.int32)),
}
SAMPLING: Mapping[str, tuple[pa.DataType, float | int]] = {  # the value that changes nothing stands for a key left out
    "temperature": (pa.float64(), 1.0),
    "top_p": (pa.float64(), 1.0),
    "top_k": (pa.int32(), -1),
    "min_p": (pa.float64(), 0.0),
}
SPAN = pa.struct(
    [
        ("lineage", pa.int32()),
        ("version", pa.int32()),
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("checksum", pa.string()),
    ]
)
SCHEMA = pa.schema(
    [
        *((name, pa.list_(kind)) for name, (kind, _) in TOKEN_COLUMNS.items()),
        ("ticket", pa.int64()),
        *((name, pa.int32()) for name in ("attempt", "member", "segment", "lineage", "prompt_length")),
        ("turn_offsets", pa.list_(pa.int32())),
        ("turn_rewards", pa.list_(pa.float64())),
        ("reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("finish_reason", pa.string()),
        ("failure", pa.string()),
        *((name, pa.float64()) for name in ("issued", "first_token", "done", "scored", "put")),
        ("collector", pa.string()),
        ("engine", pa.string()),
        ("sampling", pa.struct([*((name, kind) for name, (kind, _) in SAMPLING.items()), ("seed", pa.int64())])),
        ("spans", pa.list_(SPAN)),
        ("task", pa.string()),
        ("row_id", pa.string()),
        ("info", pa.string()),
    ],
    metadata={"schema_version": str(SCHEMA_VERSION)},
)

SUPPORT_COLUMNS = ("support_counts", "support_ids")
"""The two halves of a `Support`, a list a row: counts on the offsets of the per-token columns, ids on their own. Only
groups have them in which a draw was restricted."""
SUPPORTED_SCHEMA = pa.schema(
    [*SCHEMA, *(pa.field(name, pa.list_(pa.int32())) for name in SUPPORT_COLUMNS)], metadata=SCHEMA.metadata
)

TOKEN_BYTES = 4 + 1 + 4 + 4
ROW_BYTES = 8192
"""What a row may take beside its tokens: names, spans, reward parts, `info`. `encode` holds every group to it, so that
the bytes reserved with a ticket are a bound and not a guess."""
FIXED_BYTES = 8192  # the schema message, the batch's header and the padding of its buffers: about 5 KB
ROW = pa.struct(list(SCHEMA)[len(TOKEN_COLUMNS) :])  # the columns that are not per token
CHECKED = (  # those of them that `check_rules` looks at, beside the spans
    *("ticket", "attempt", "member", "segment", "lineage", "prompt_length", "turn_offsets", "turn_rewards"),
    *("reward", "finish_reason", "task", "row_id", "info"),
)
OF_MEMBER = ("reward", "reward_parts", "failure")
"""What is said of a member, and so in all of its rows."""


def check_schema(schema: pa.Schema, *, version: bool = True) -> None:
    """Raise ValueError for another schema version (unless `version` is false), a column missing or of another type."""
    found = (schema.metadata or {}).get(b"schema_version", b"none").decode(errors="replace")
    if version and found != str(SCHEMA_VERSION):
        raise ValueError(
            f"schema version {found}, this program reads {SCHEMA_VERSION}: run the same asyncrl everywhere"
        )
    if schema.equals(SCHEMA):
        return
    supported = any(name in schema.names for name in SUPPORT_COLUMNS)
    for wanted in SUPPORTED_SCHEMA if supported else SCHEMA:
        at = schema.get_all_field_indices(wanted.name)
        if len(at) != 1:
            raise ValueError(f"column {wanted.name}: {len(at)} of that name, must be one")
        if schema.field(at[0]).type != wanted.type:
            raise ValueError(f"column {wanted.name}: {schema.field(at[0]).type}, must be {wanted.type}")


def values_of(batch: pa.RecordBatch, name: str) -> NDArray[Any]:
    values: NDArray[Any] = entries(batch.column(name)).to_numpy()
    return values


def entries(column: pa.ListArray) -> pa.Array:
    """What the rows hold, back to back, where no row is null. `column.flatten()` would look for null rows first, which
    takes several times as long as the rest for the few hundred tokens of a group."""
    offsets = column.offsets.to_numpy()
    return column.values.slice(offsets[0], offsets[-1] - offsets[0])


def starts_of(column: pa.ListArray) -> NDArray[np.int32]:
    """Where each row's entries start in `entries`, and, at the end, where the last row's end: int32 [rows + 1]."""
    offsets = column.offsets.to_numpy()
    starts: NDArray[np.int32] = offsets - offsets[0]
    return starts
