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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from asyncrl.staleness import Weights

SCHEMA_VERSION = 1
FINISH_REASONS = ("stop", "length", "abort", "error")

TOKEN_COLUMNS: Mapping[str, tuple[pa.DataType, Any]] = {
    "token_ids": (pa.int32(), np.int32),
    "loss_mask": (pa.uint8(), np.uint8),
    "logprobs": (pa.float32(), np.float32),
    "versions": (pa.int32(), np.int32),
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
    rows = group.trajectories
    if not rows:
        raise ValueError(f"group of ticket {group.ticket} has no trajectory: fail the ticket instead")
    if unknown := set(group.sampling) - set(_SAMPLING):
        raise ValueError(f"sampling has {sorted(unknown)}; the record knows {sorted(_SAMPLING)}")
    columns = _token_columns(rows)

    def same(name: str, value: Any) -> None:
        columns[name] = pa.array([value] * len(rows), type=SCHEMA.field(name).type)

    def each(name: str, values: Iterable[Any]) -> None:
        # The explicit type matters: inferring it costs twenty times the conversion.
        columns[name] = pa.array(list(values), type=SCHEMA.field(name).type)

    for name in ("ticket", "attempt", "lineage", "issued", "put", "collector", "engine", "task", "row_id"):
        same(name, getattr(group, name))
    for name in ("member", "segment", "prompt_length", "turn_offsets", "turn_rewards", "reward"):
        each(name, (getattr(row, name) for row in rows))
    for name in ("finish_reason", "failure", "first_token", "done", "scored"):
        each(name, (getattr(row, name) for row in rows))
    each("reward_parts", (list(row.reward_parts.items()) for row in rows))
    each("info", (json.dumps(row.info, allow_nan=False) if row.info else "{}" for row in rows))
    each("spans", ([(*s.weights, s.start, s.end, s.checksum) for s in row.spans] for row in rows))
    sampling = tuple(group.sampling.get(name, neutral) for name, (_, neutral) in _SAMPLING.items())
    each("sampling", ((*sampling, row.seed) for row in rows))
    return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _token_columns(rows: Sequence[Trajectory]) -> dict[str, pa.Array]:
    """The four per-token columns, each from one concatenated buffer, all on the same offsets buffer."""
    for n, row in enumerate(rows):
        for name, (_, dtype) in TOKEN_COLUMNS.items():
            values = getattr(row, name)
            if values.dtype != dtype or values.shape != row.token_ids.shape or values.ndim != 1:
                raise ValueError(
                    f"row {n}, column {name}: {values.dtype}{list(values.shape)}; "
                    f"must be {np.dtype(dtype)}{list(row.token_ids.shape)}, one entry per token"
                )
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row.token_ids) for row in rows], out=offsets[1:])
    shared = pa.py_buffer(offsets)
    columns = {}
    for name, (kind, _) in TOKEN_COLUMNS.items():
        values = np.concatenate([getattr(row, name) for row in rows])
        items = pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])
        columns[name] = pa.ListArray.from_buffers(pa.list_(kind), len(rows), [None, shared], children=[items])
    return columns


def encode(group: Group) -> bytes:
    """Arrow IPC stream: schema with `schema_version` in its metadata, one record batch.

    Raises ValueError for a group that `decode` would refuse, or that is larger than `max_group_bytes` promises.
    """
    batch = to_batch(group)
    validate(batch)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(batch)
    payload: bytes = sink.getvalue().to_pybytes()
    bound = TOKEN_BYTES * len(batch.column("token_ids").values) + batch.num_rows * ROW_BYTES + FIXED_BYTES
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
    spans = batch.column("spans").flatten()
    lineages, versions = spans.field("lineage").to_numpy(), spans.field("version").to_numpy()
    return tuple(sorted({Weights(int(x), int(v)) for x, v in zip(lineages, versions, strict=True)}))


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
    tables = [pa.Table.from_batches([batch]) for batch in batches]
    table = pa.concat_tables(tables, promote_options="default").combine_chunks()
    columns = {name: table.column(name).chunk(0) for name in TOKEN_COLUMNS}
    offsets = columns["token_ids"].offsets.to_numpy()
    return Packed(
        **{name: column.flatten().to_numpy() for name, column in columns.items()},
        cu_seqlens=(offsets - offsets[0]).astype(np.int64),
        rewards=table.column("reward").chunk(0).to_numpy(),
        groups=np.repeat(np.arange(len(batches)), [batch.num_rows for batch in batches]),
        table=table,
    )


def validate(batch: pa.RecordBatch) -> None:
    """Refuse what a learner could not train honestly. Raises ValueError that names row and column.

    Arrow's own full validation (offsets, UTF-8, sizes of buffers); no nulls but in reward parts; per-token columns
    aligned; version -1 and logprob 0 where the mask is 0; prompts never trained; every sampled token in one span that
    says its version; one ticket, one attempt, one lineage (that of the newest span), no member twice.
    """
    check_schema(batch.schema, version=False)
    try:
        batch.validate(full=True)  # names the column
    except pa.ArrowInvalid as error:
        raise ValueError(f"not a valid record batch: {error}") from error
    for name in SCHEMA.names:
        column = batch.column(name)
        if column.null_count:
            raise ValueError(f"row {int(np.argmax(column.is_null()))}, column {name}: null")
        if pa.types.is_list(column.type) and _entries(column).null_count:
            raise ValueError(f"column {name}: a null inside a list")
    if not batch.num_rows:
        raise ValueError("no row: a group has one trajectory at least")
    _check_tokens(batch)
    _check_rows(batch)
    _check_spans(batch)


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
    first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
    return column.values.slice(first, last - first)


def _check_tokens(batch: pa.RecordBatch) -> None:
    offsets = batch.column("token_ids").offsets.to_numpy()
    for name in TOKEN_COLUMNS:
        other = batch.column(name).offsets.to_numpy()
        if (wrong := np.diff(other) != np.diff(offsets)).any():
            n = int(np.argmax(wrong))
            raise ValueError(
                f"row {n}, column {name}: {np.diff(other)[n]} entries, token_ids has {np.diff(offsets)[n]}"
            )
    starts, ends = (offsets - offsets[0])[:-1], (offsets - offsets[0])[1:]

    def refuse(wrong: NDArray[np.bool_], column: str, why: str) -> None:
        if wrong.any():
            at = int(np.argmax(wrong))
            n = int(np.searchsorted(ends, at, side="right"))
            value = _values(batch, column)[at]
            raise ValueError(f"row {n}, column {column}: {value} at position {at - starts[n]}; {why}")

    mask, versions = _values(batch, "loss_mask"), _values(batch, "versions")
    refuse(mask > 1, "loss_mask", "must be 0 or 1")
    sampled = mask == 1
    refuse(_values(batch, "token_ids") < 0, "token_ids", "must be >= 0")
    refuse(~sampled & (versions != -1), "versions", "must be -1 where the mask is 0")
    refuse(sampled & (versions < 0), "versions", "must be >= 0 where the mask is 1")
    refuse(~sampled & (_values(batch, "logprobs") != 0), "logprobs", "must be 0 where the mask is 0")
    prompts = batch.column("prompt_length").to_numpy()
    if (wrong := (prompts < 0) | (prompts > ends - starts) | (ends == starts)).any():
        n = int(np.argmax(wrong))
        raise ValueError(f"row {n}, column prompt_length: {prompts[n]} in a sequence of {(ends - starts)[n]} tokens")
    position = np.arange(len(mask)) - np.repeat(starts, ends - starts)
    refuse(sampled & (position < np.repeat(prompts, ends - starts)), "loss_mask", "must be 0 on the prompt")


def _check_rows(batch: pa.RecordBatch) -> None:
    lengths = np.diff(batch.column("token_ids").offsets.to_numpy())
    for name in ("ticket", "attempt", "lineage", "task", "row_id"):
        values = batch.column(name).to_pylist()
        for n, value in enumerate(values):
            if value != values[0]:
                raise ValueError(f"row {n}, column {name}: {value}, but row 0 has {values[0]}; a group is one ticket")
    seen: set[tuple[int, int]] = set()
    names = ("member", "segment", "finish_reason", "turn_offsets", "turn_rewards", "info")
    for n, (member, segment, finish, offsets, rewards, info) in enumerate(
        zip(*(batch.column(name).to_pylist() for name in names), strict=True)
    ):
        if (member, segment) in seen:
            raise ValueError(f"row {n}, column member: member {member} segment {segment} a second time")
        seen.add((member, segment))
        if finish not in FINISH_REASONS:
            raise ValueError(f"row {n}, column finish_reason: {finish!r}; must be one of {', '.join(FINISH_REASONS)}")
        if offsets != sorted(offsets) or any(not 0 <= at <= lengths[n] for at in offsets):
            raise ValueError(f"row {n}, column turn_offsets: {offsets}; must ascend within 0..{lengths[n]}")
        if rewards and len(rewards) != len(offsets):
            raise ValueError(f"row {n}, column turn_rewards: {len(rewards)} rewards for {len(offsets)} turns")
        if not info.startswith("{"):
            raise ValueError(f"row {n}, column info: {info[:40]!r}; must be a JSON object")


def _check_spans(batch: pa.RecordBatch) -> None:
    mask, versions = _values(batch, "loss_mask"), _values(batch, "versions")
    offsets = batch.column("loss_mask").offsets.to_numpy()
    offsets = (offsets - offsets[0]).tolist()
    lineage = batch.column("lineage")[0].as_py()
    for n, spans in enumerate(batch.column("spans").to_pylist()):
        row = slice(offsets[n], offsets[n + 1])
        row_mask, row_versions = mask[row], versions[row]
        end, covered = 0, 0
        for span in spans:
            if not end <= span["start"] < span["end"] <= len(row_mask):
                raise ValueError(
                    f"row {n}, column spans: [{span['start']}, {span['end']}) after {end} of {len(row_mask)}"
                )
            start, end = span["start"], span["end"]
            sampled = row_mask[start:end] == 1
            if (row_versions[start:end][sampled] != span["version"]).any():
                raise ValueError(
                    f"row {n}, column spans: [{start}, {end}) says version {span['version']}, versions differ"
                )
            covered += int(sampled.sum())
        if covered != int(row_mask.sum()):
            raise ValueError(f"row {n}, column spans: cover {covered} of {int(row_mask.sum())} sampled tokens")
    weights = span_weights(batch)
    if weights and weights[-1].lineage != lineage:
        raise ValueError(f"row 0, column lineage: {lineage}, but the newest span is of lineage {weights[-1].lineage}")
