"""The trajectory record: one group is one Arrow record batch in IPC stream form, one row per trajectory.

| columns                                    | type                                  | note                          |
|--------------------------------------------|---------------------------------------|-------------------------------|
| token_ids, loss_mask, logprobs, versions   | list of int32, uint8, float32, int32  | one entry per token, aligned  |
| ticket; attempt, member, segment, lineage  | int64; int32                          | lineage: of the newest span   |
| prompt_length; turn_offsets, turn_rewards  | int32; list of int32, list of float64 | positions in token_ids        |
| reward; reward_parts                       | float64; map of string to float64     | unscored: NaN; null           |
| finish_reason, failure                     | string                                |                               |
| issued, first_token, done, scored, put     | float64, unix seconds                 | 0: did not happen             |
| collector, engine, task, row_id            | string                                |                               |
| sampling                                   | struct: temperature ... min_p, seed   | seed: of the row's own request|
| spans                                      | list of struct                        | which weights, by checksum    |
| info                                       | string                                | a JSON object                 |

The per-token columns are built on ONE offsets buffer, so that putting batches back to back gives packed arrays and
`cu_seqlens` with no loop over rows. Further columns may be added without a new schema version; a reader ignores what
it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from asyncrl.staleness import Weights

SCHEMA_VERSION = 1
FINISH_REASONS = ("stop", "length", "abort", "error")

TOKEN_COLUMNS: Mapping[str, tuple[pa.DataType, np.dtype[Any]]] = {
    "token_ids": (pa.int32(), np.dtype(np.int32)),
    "loss_mask": (pa.uint8(), np.dtype(np.uint8)),
    "logprobs": (pa.float32(), np.dtype(np.float32)),
    "versions": (pa.int32(), np.dtype(np.int32)),
}
_SAMPLING: Mapping[str, tuple[pa.DataType, float | int]] = {  # the value that changes nothing stands for a key left out
    "temperature": (pa.float64(), 1.0),
    "top_p": (pa.float64(), 1.0),
    "top_k": (pa.int32(), -1),
    "min_p": (pa.float64(), 0.0),
}
_SPAN = pa.struct(
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
        ("sampling", pa.struct([*((name, kind) for name, (kind, _) in _SAMPLING.items()), ("seed", pa.int64())])),
        ("spans", pa.list_(_SPAN)),
        ("task", pa.string()),
        ("row_id", pa.string()),
        ("info", pa.string()),
    ],
    metadata={"schema_version": str(SCHEMA_VERSION)},
)

TOKEN_BYTES = 4 + 1 + 4 + 4
ROW_BYTES = 8192
"""What a row may take beside its tokens: names, spans, reward parts, `info`. `encode` holds every group to it, so that
the bytes reserved with a ticket are a bound and not a guess."""
FIXED_BYTES = 8192  # the schema message, the batch's header and the padding of its buffers: about 5 KB
_ROW = pa.struct(list(SCHEMA)[len(TOKEN_COLUMNS) :])  # the columns that are not per token
_CHECKED = (  # those of them that `_check` looks at, beside the spans
    *("ticket", "attempt", "member", "segment", "lineage", "prompt_length", "turn_offsets", "turn_rewards"),
    *("finish_reason", "task", "row_id", "info"),
)
_SCHEMA_MESSAGE = SCHEMA.serialize().to_pybytes()  # a stream begins with it
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


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
    failure: str = ""  # class, from the verifier or the engine
    segment: int = 0
    turn_offsets: tuple[int, ...] = ()  # where each turn's sampled tokens begin
    turn_rewards: tuple[float, ...] = ()  # empty, or one per turn
    first_token: float = 0.0
    done: float = 0.0
    scored: float = 0.0
    seed: int = 0  # of its request
    info: Mapping[str, Any] = field(default_factory=dict)


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
    """The group as an Arrow record batch of `SCHEMA`.

    Raises ValueError for per-token arrays of another dtype or of different lengths, and for unknown sampling keys:
    those would give a batch whose buffers say something else than the group did.
    """
    return pa.RecordBatch.from_arrays(list(_arrays(*_plain(group)).values()), schema=SCHEMA)


def _plain(group: Group) -> tuple[dict[str, NDArray[Any]], NDArray[np.int32], list[tuple[Any, ...]]]:
    """The group out of Arrow: per-token columns back to back, where each row starts in them (and, at the end, where the
    last one ends), and the rows' values in the columns of `_ROW`."""
    rows = group.trajectories
    if not rows:
        raise ValueError(f"group of ticket {group.ticket} has no trajectory: fail the ticket instead")
    if unknown := set(group.sampling) - set(_SAMPLING):
        raise ValueError(f"sampling has {sorted(unknown)}; the record knows {sorted(_SAMPLING)}")
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
    sampling = tuple(group.sampling.get(name, neutral) for name, (_, neutral) in _SAMPLING.items())
    return tokens, starts, [_row_values(group, row, sampling) for row in rows]


def _arrays(
    tokens: Mapping[str, NDArray[Any]], starts: NDArray[np.int32], rows: Sequence[tuple[Any, ...]]
) -> dict[str, pa.Array]:
    """The columns of `SCHEMA`, in its order, of what `_plain` returns. The per-token ones share one offsets buffer."""
    shared = pa.py_buffer(starts)
    columns = []
    for name, (kind, _) in TOKEN_COLUMNS.items():
        items = pa.Array.from_buffers(kind, len(tokens[name]), [None, pa.py_buffer(tokens[name])])
        columns.append(pa.ListArray.from_buffers(pa.list_(kind), len(rows), [None, shared], children=[items]))
    # One conversion for all other columns: a call for each costs more than the conversion of a group's few rows.
    columns += pa.array(rows, type=_ROW).flatten()
    return dict(zip(SCHEMA.names, columns, strict=True))


def _row_values(group: Group, row: Trajectory, sampling: tuple[float | int, ...]) -> tuple[Any, ...]:
    """What stands in the columns of `_ROW`, in its order."""
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


def encode(group: Group) -> bytes:
    """Arrow IPC stream: schema with `schema_version` in its metadata, one record batch.

    Raises ValueError for a group that `decode` would refuse, or that is larger than `max_group_bytes` promises.
    """
    tokens, starts, rows = _plain(group)
    columns = _arrays(tokens, starts, rows)
    _check_nulls(columns)
    # From what is at hand: getting it back out of Arrow takes twice as long as checking it.
    _check(tokens, starts, dict(zip(_ROW.names, zip(*rows, strict=True), strict=True)), [0] * len(rows))
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
            _check_memory(batches[-1])
        except ValueError as error:
            raise ValueError(f"payload {n}: {error}") from error
    if not batches:
        return []
    table = _together(batches)
    firsts = np.cumsum([0, *(batch.num_rows for batch in batches[:-1])])
    try:
        _check_columns({name: table.column(name).chunk(0) for name in SCHEMA.names}, firsts)
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


def version_range(batch: pa.RecordBatch) -> tuple[int, int]:
    """(oldest, newest) version over the trainable tokens. Raises ValueError if there is none."""
    trained = _values(batch, "versions")[_values(batch, "loss_mask") == 1]
    if not len(trained):
        raise ValueError("no trainable token in the group")
    return int(trained.min()), int(trained.max())


def span_weights(batch: pa.RecordBatch) -> tuple[Weights, ...]:
    """Every (lineage, version) that sampled a token of the group, ascending; the last is the newest."""
    spans = _entries(batch.column("spans"))
    lineages, versions = (spans.field(name).to_numpy().tolist() for name in ("lineage", "version"))
    return tuple(Weights(*pair) for pair in sorted(set(zip(lineages, versions, strict=True))))


def sampled_tokens(batch: pa.RecordBatch) -> int:
    """How many tokens of the group were sampled."""
    return int(_values(batch, "loss_mask").sum(dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Packed:
    """Groups back to back: per-token columns of all rows, and where each row starts. Zero-copy where Arrow allows; the
    arrays are read-only. N tokens, R rows."""

    token_ids: NDArray[np.int32]  # [N]
    loss_mask: NDArray[np.uint8]  # [N]
    logprobs: NDArray[np.float32]  # [N]
    versions: NDArray[np.int32]  # [N]
    cu_seqlens: NDArray[np.int64]  # [R + 1]
    rewards: NDArray[np.float64]  # [R]; NaN = unscored
    groups: NDArray[np.int64]  # [R] index of the row's group in the batch
    table: pa.Table


def pack(batches: Sequence[pa.RecordBatch]) -> Packed:
    """Put groups back to back, in the order given. Columns that only some of them have are filled with nulls."""
    if not batches:
        raise ValueError("nothing to pack: no group")
    table = _together(batches)
    columns = {name: table.column(name).chunk(0) for name in TOKEN_COLUMNS}
    offsets = columns["token_ids"].offsets.to_numpy()
    return Packed(
        **{name: column.flatten().to_numpy() for name, column in columns.items()},
        cu_seqlens=(offsets - offsets[0]).astype(np.int64),
        rewards=table.column("reward").chunk(0).to_numpy(),
        groups=np.repeat(np.arange(len(batches)), [batch.num_rows for batch in batches]),
        table=table,
    )


def _together(batches: Sequence[pa.RecordBatch]) -> pa.Table:
    """One table of one chunk a column. Batches must be sound: joining broken offsets reads what is not theirs."""
    if all(batch.schema.equals(batches[0].schema) for batch in batches):  # no columns to compare one by one
        return pa.Table.from_batches(batches).combine_chunks()
    tables = [pa.Table.from_batches([batch]) for batch in batches]
    return pa.concat_tables(tables, promote_options="default").combine_chunks()


def validate(batch: pa.RecordBatch) -> None:
    """Refuse what a learner could not train honestly. Raises ValueError that names row and column.

    Arrow's own full validation (offsets, UTF-8, sizes of buffers); no nulls but in reward parts; per-token columns
    aligned; version -1 and logprob 0 where the mask is 0; prompts never trained; every sampled token in one span that
    says its version; one ticket, one attempt, one lineage (that of the newest span), no member twice.
    """
    _check_memory(batch)
    _check_columns({name: batch.column(name) for name in SCHEMA.names}, np.zeros(1, np.int64))


def _check_memory(batch: pa.RecordBatch) -> None:
    """That its columns are those of the record, sound by Arrow's rules, and that there is a row."""
    check_schema(batch.schema, version=False)
    try:
        batch.validate(full=True)  # names the column
    except pa.ArrowInvalid as error:
        raise ValueError(f"not a valid record batch: {error}") from error
    if not batch.num_rows:
        raise ValueError("no row: a group has one trajectory at least")


def _check_columns(columns: Mapping[str, pa.Array], firsts: NDArray[np.int64]) -> None:
    """What `validate` refuses beyond Arrow's own rules. firsts [groups]: where each group's first row is."""
    _check_nulls(columns)
    starts = _starts(columns["token_ids"])
    for name in TOKEN_COLUMNS:
        if np.count_nonzero(_starts(columns[name]) != starts):
            found, wanted = np.diff(_starts(columns[name])), np.diff(starts)
            n = int(np.argmax(found != wanted))
            raise ValueError(f"row {n}, column {name}: {found[n]} entries, token_ids has {wanted[n]}")
    tokens = {name: _entries(columns[name]).to_numpy() for name in TOKEN_COLUMNS}
    values = {name: columns[name].to_pylist() for name in _CHECKED}
    spans = _entries(columns["spans"])
    numbers = (spans.field(name).to_numpy().tolist() for name in ("lineage", "version", "start", "end"))
    flat = list(zip(*numbers, spans.field("checksum").to_pylist(), strict=True))
    values["spans"] = [flat[start:end] for start, end in pairwise(_starts(columns["spans"]).tolist())]
    _check(tokens, starts, values, np.repeat(firsts, np.diff(firsts, append=len(starts) - 1)).tolist())


def _check_nulls(columns: Mapping[str, pa.Array]) -> None:
    for name, column in columns.items():
        if column.null_count:
            raise ValueError(f"row {int(np.argmax(column.is_null()))}, column {name}: null")
        if _has_inner_null(column):
            raise ValueError(f"column {name}: a null inside")


def _has_inner_null(column: pa.Array) -> bool:
    """Whether a list or struct holds a null. A map may: an unscored reward part is one."""
    if pa.types.is_list(column.type):
        # All that its buffers hold comes first: mostly there is no null, and what the rows hold is a part of it.
        return _has_null(column.values) and _has_null(_entries(column))
    if pa.types.is_struct(column.type):
        return any(column.field(at).null_count for at in range(column.type.num_fields))
    return False


def _has_null(array: pa.Array) -> bool:
    return bool(array.null_count) or _has_inner_null(array)


def check_schema(schema: pa.Schema, *, version: bool = True) -> None:
    """Raise ValueError for another schema version (unless `version` is false), a column missing or of another type."""
    found = (schema.metadata or {}).get(b"schema_version", b"none").decode(errors="replace")
    if version and found != str(SCHEMA_VERSION):
        raise ValueError(
            f"schema version {found}, this program reads {SCHEMA_VERSION}: run the same asyncrl everywhere"
        )
    if schema.equals(SCHEMA):
        return
    for wanted in SCHEMA:
        at = schema.get_all_field_indices(wanted.name)
        if len(at) != 1:
            raise ValueError(f"column {wanted.name}: {len(at)} of that name, must be one")
        if schema.field(at[0]).type != wanted.type:
            raise ValueError(f"column {wanted.name}: {schema.field(at[0]).type}, must be {wanted.type}")


def _values(batch: pa.RecordBatch, name: str) -> NDArray[Any]:
    values: NDArray[Any] = _entries(batch.column(name)).to_numpy()
    return values


def _entries(column: pa.ListArray) -> pa.Array:
    """What the rows hold, back to back, where no row is null. `column.flatten()` would look for null rows first, which
    takes several times as long as the rest for the few hundred tokens of a group."""
    offsets = column.offsets.to_numpy()
    return column.values.slice(offsets[0], offsets[-1] - offsets[0])


def _starts(column: pa.ListArray) -> NDArray[np.int32]:
    """Where each row's entries start in `_entries`, and, at the end, where the last row's end: int32 [rows + 1]."""
    offsets = column.offsets.to_numpy()
    starts: NDArray[np.int32] = offsets - offsets[0]
    return starts


def _check(
    tokens: Mapping[str, NDArray[Any]],
    starts: NDArray[np.int32],
    values: Mapping[str, Sequence[Any]],
    first_of: Sequence[int],
) -> None:
    """The record's rules. tokens, starts: as `_plain` returns them; values: by column, those of `_CHECKED` and the
    spans; first_of [rows]: the first row of each row's group."""
    _check_tokens(tokens, starts, np.array(values["prompt_length"]))
    _check_rows(values, (starts[1:] - starts[:-1]).tolist(), first_of)
    _check_spans(values, tokens["versions"], starts, first_of)


def _check_tokens(tokens: Mapping[str, NDArray[Any]], starts: NDArray[np.int32], prompts: NDArray[np.int64]) -> None:
    def refuse(wrong: NDArray[np.bool_], column: str, why: str) -> None:
        if np.count_nonzero(wrong):
            at = int(np.argmax(wrong))
            n = int(np.searchsorted(starts, at, side="right")) - 1
            raise ValueError(f"row {n}, column {column}: {tokens[column][at]} at position {at - starts[n]}; {why}")

    mask, versions = tokens["loss_mask"], tokens["versions"]
    refuse(mask > 1, "loss_mask", "must be 0 or 1")
    sampled = mask == 1
    refuse(tokens["token_ids"] < 0, "token_ids", "must be >= 0")
    refuse(sampled == (versions < 0), "versions", "must be >= 0 exactly where the mask is 1")
    refuse(versions < -1, "versions", "must be -1 where the mask is 0")
    refuse((tokens["logprobs"] != 0) & ~sampled, "logprobs", "must be 0 where the mask is 0")
    lengths = starts[1:] - starts[:-1]
    if np.count_nonzero(wrong := (prompts < 0) | (prompts > lengths) | (lengths == 0)):
        n = int(np.argmax(wrong))
        raise ValueError(f"row {n}, column prompt_length: {prompts[n]} in a sequence of {lengths[n]} tokens")
    in_prompt = np.arange(len(mask)) < (starts[:-1] + prompts).repeat(lengths)
    refuse(sampled & in_prompt, "loss_mask", "must be 0 on the prompt")


def _check_rows(values: Mapping[str, Sequence[Any]], lengths: Sequence[int], first_of: Sequence[int]) -> None:
    for name in ("ticket", "attempt", "lineage", "task", "row_id"):
        column = values[name]
        for n, (value, first) in enumerate(zip(column, first_of, strict=True)):
            if value != column[first]:
                wanted = f"row {first} has {column[first]}"
                raise ValueError(f"row {n}, column {name}: {value}, but {wanted}; a group is one ticket")
    seen: set[tuple[int, int, int]] = set()
    names = ("member", "segment", "finish_reason", "turn_offsets", "turn_rewards", "info")
    for n, (member, segment, finish, offsets, rewards, info) in enumerate(
        zip(*(values[name] for name in names), strict=True)
    ):
        if (first_of[n], member, segment) in seen:
            raise ValueError(f"row {n}, column member: member {member} segment {segment} a second time")
        seen.add((first_of[n], member, segment))
        if finish not in FINISH_REASONS:
            raise ValueError(f"row {n}, column finish_reason: {finish!r}; must be one of {', '.join(FINISH_REASONS)}")
        if offsets and (list(offsets) != sorted(offsets) or offsets[0] < 0 or offsets[-1] > lengths[n]):
            raise ValueError(f"row {n}, column turn_offsets: {offsets}; must ascend within 0..{lengths[n]}")
        if rewards and len(rewards) != len(offsets):
            raise ValueError(f"row {n}, column turn_rewards: {len(rewards)} rewards for {len(offsets)} turns")
        if not info.startswith("{"):
            raise ValueError(f"row {n}, column info: {info[:40]!r}; must be a JSON object")


def _check_spans(
    values: Mapping[str, Sequence[Any]],
    versions: NDArray[np.int32],
    starts: NDArray[np.int32],
    first_of: Sequence[int],
) -> None:
    named = np.full_like(versions, -1)  # by the spans
    bounds = starts.tolist()
    newest: dict[int, tuple[int, int]] = {}  # by first row: (lineage, version)
    for n, (first_row, spans) in enumerate(zip(first_of, values["spans"], strict=True)):
        end, length = 0, bounds[n + 1] - bounds[n]
        for lineage, version, first, last, _ in spans:
            if not end <= first < last <= length:
                raise ValueError(f"row {n}, column spans: [{first}, {last}) after {end} of {length}")
            named[bounds[n] + first : bounds[n] + last] = version
            newest[first_row] = max(newest.get(first_row, (lineage, version)), (lineage, version))
            end = last
    if np.count_nonzero(wrong := (versions >= 0) & (versions != named)):
        at = int(np.argmax(wrong))
        n = int(np.searchsorted(starts, at, side="right")) - 1
        row = slice(bounds[n], bounds[n + 1])
        sampled = versions[row] >= 0
        if named[at] < 0:
            counts = f"{np.count_nonzero(sampled & (named[row] >= 0))} of {np.count_nonzero(sampled)}"
            raise ValueError(f"row {n}, column spans: cover {counts} sampled tokens")
        where = f"the span at position {at - bounds[n]} says version {named[at]}"
        raise ValueError(f"row {n}, column spans: {where}, the token has {versions[at]}")
    for first_row, (lineage, _) in newest.items():
        if lineage != (own := values["lineage"][first_row]):
            raise ValueError(f"row {first_row}, column lineage: {own}, but the newest span is of lineage {lineage}")
