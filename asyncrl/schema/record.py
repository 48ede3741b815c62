"""A group as a collector has it, and as Arrow has it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from asyncrl.schema.columns import ROW, SAMPLING, SCHEMA, SUPPORT_COLUMNS, SUPPORTED_SCHEMA, TOKEN_COLUMNS
from asyncrl.schema.support import Support
from asyncrl.staleness import Weights


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) (positions in `token_ids`) sampled by `weights` with `checksum`."""

    weights: Weights
    start: int
    end: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One training row. Per-token arrays cover the WHOLE sequence (prompt, sampled tokens, tool text), length T."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]  # 1 on sampled tokens
    logprobs: NDArray[np.float32]  # behaviour, nats; 0 where the mask is 0
    versions: NDArray[np.int32]  # -1 where the mask is 0
    member: int
    prompt_length: int
    spans: tuple[VersionSpan, ...]
    reward: float  # NaN = unscored
    reward_parts: Mapping[str, float | None]
    finish_reason: str  # stop | length | abort | error
    failure: str = ""  # reward NaN: why, from verifier or engine; else the class of what is wrong, "" if nothing is
    segment: int = 0
    turn_offsets: tuple[int, ...] = ()  # where each turn's sampled tokens begin
    turn_rewards: tuple[float, ...] = ()  # empty, or one per turn
    first_token: float = 0.0
    done: float = 0.0
    scored: float = 0.0
    seed: int = 0  # of its request
    info: Mapping[str, Any] = field(default_factory=dict)
    support: Support | None = None  # of T draws, free ones where the mask is 0; None: all are


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one ticket, as the collector hands them over."""

    ticket: int
    attempt: int
    lineage: int  # of the newest span
    task: str
    row_id: str
    collector: str
    engine: str
    sampling: Mapping[str, Any]  # temperature, top_p, top_k, min_p
    issued: float
    put: float
    trajectories: Sequence[Trajectory]


def to_batch(group: Group) -> pa.RecordBatch:
    """The group as an Arrow record batch of `SCHEMA`, or of `SUPPORTED_SCHEMA` where a draw was restricted.

    Raises ValueError for per-token arrays of another dtype or of different lengths, and for unknown sampling keys:
    those would give a batch whose buffers say something else than the group did.
    """
    tokens, starts, rows = plain(group)
    return batch_of(arrays(tokens, starts, rows, support_in(group)))


def batch_of(columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """Of what `arrays` returns."""
    schema = SCHEMA if len(columns) == len(SCHEMA) else SUPPORTED_SCHEMA
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)


def support_in(group: Group) -> Support | None:
    """Of all tokens of the group, back to back. Raises ValueError for one of another size than its row."""
    for n, row in enumerate(group.trajectories):
        if row.support is None:
            continue
        shapes = row.support.counts.shape, row.support.ids.shape
        if shapes != (row.token_ids.shape, (row.support.counts.sum(),)):
            raise ValueError(
                f"row {n}, column support_counts: {shapes[0]} draws with {shapes[1]} ids; must be one count per token "
                f"{row.token_ids.shape}, and as many ids as they add up to"
            )
        if row.support.counts.dtype != np.int32 or row.support.ids.dtype != np.int32:
            raise ValueError(f"row {n}, column support_ids: {row.support.ids.dtype}; counts and ids must be int32")
    return Support.joined([(row.support, len(row.token_ids)) for row in group.trajectories])


def plain(group: Group) -> tuple[dict[str, NDArray[Any]], NDArray[np.int32], list[tuple[Any, ...]]]:
    """The group out of Arrow: per-token columns back to back, where each row starts in them (and, at the end, where the
    last one ends), and the rows' values in the columns of `ROW`."""
    rows = group.trajectories
    if not rows:
        raise ValueError(f"group of ticket {group.ticket} has no trajectory: fail the ticket instead")
    if unknown := set(group.sampling) - set(SAMPLING):
        raise ValueError(f"sampling has {sorted(unknown)}; the record knows {sorted(SAMPLING)}")
    for n, row in enumerate(rows):
        shape = row.token_ids.shape
        for name, (_, dtype) in TOKEN_COLUMNS.items():
            values = getattr(row, name)
            if values.dtype != dtype or values.shape != shape or values.ndim != 1:
                raise ValueError(
                    f"row {n}, column {name}: {values.dtype}{list(values.shape)}; "
                    f"must be {dtype}{list(shape)}, one entry per token"
                )
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row.token_ids) for row in rows], out=starts[1:])
    tokens = {name: np.concatenate([getattr(row, name) for row in rows]) for name in TOKEN_COLUMNS}
    sampling = tuple(group.sampling.get(name, neutral) for name, (_, neutral) in SAMPLING.items())
    return tokens, starts, [_row_values(group, row, sampling) for row in rows]


def arrays(
    tokens: Mapping[str, NDArray[Any]],
    starts: NDArray[np.int32],
    rows: Sequence[tuple[Any, ...]],
    support: Support | None,
) -> dict[str, pa.Array]:
    """The columns of `SCHEMA`, in its order, of what `plain` returns, and those of the support, if there is one. The
    per-token ones share one offsets buffer."""
    shared = pa.py_buffer(starts)
    columns = [_lists(tokens[name], shared, kind, len(rows)) for name, (kind, _) in TOKEN_COLUMNS.items()]
    # One conversion for all other columns: a call for each costs more than the conversion of a group's few rows.
    columns += pa.array(rows, type=ROW).flatten()
    found = dict(zip(SCHEMA.names, columns, strict=True))
    if support is not None:
        ends = np.concatenate([[0], np.cumsum(support.counts)])[starts].astype(np.int32)
        halves = ((support.counts, shared), (support.ids, pa.py_buffer(ends)))
        for name, (values, offsets) in zip(SUPPORT_COLUMNS, halves, strict=True):
            found[name] = _lists(values, offsets, pa.int32(), len(rows))
    return found


def _lists(values: NDArray[Any], offsets: pa.Buffer, kind: pa.DataType, rows: int) -> pa.ListArray:
    items = pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])
    return pa.ListArray.from_buffers(pa.list_(kind), rows, [None, offsets], children=[items])


def _row_values(group: Group, row: Trajectory, sampling: tuple[float | int, ...]) -> tuple[Any, ...]:
    """What stands in the columns of `ROW`, in its order."""
    return (
        group.ticket,
        group.attempt,
        row.member,
        row.segment,
        group.lineage,
        row.prompt_length,
        row.turn_offsets,
        row.turn_rewards,
        row.reward,
        list(row.reward_parts.items()),
        row.finish_reason,
        row.failure,
        group.issued,
        row.first_token,
        row.done,
        row.scored,
        group.put,
        group.collector,
        group.engine,
        (*sampling, row.seed),
        [(*span.weights, span.start, span.end, span.checksum) for span in row.spans],
        group.task,
        group.row_id,
        json.dumps(row.info, allow_nan=False) if row.info else "{}",
    )
