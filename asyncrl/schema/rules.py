"""What a record may say. The same rules for what this process is about to hand over and for what arrives in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from asyncrl.schema.columns import (
    CHECKED,
    FINISH_REASONS,
    OF_MEMBER,
    SCHEMA,
    SUPPORT_COLUMNS,
    TOKEN_COLUMNS,
    check_schema,
    entries,
    starts_of,
)
from asyncrl.schema.support import Support

LARGEST_REWARD = float(np.finfo(np.float32).max)
"""The learner computes in float32; and the square of what is beyond overflows float64, which would make every advantage
of a group 0 without a word."""


def validate(batch: pa.RecordBatch) -> None:
    """Refuse what a learner could not train honestly. Raises ValueError that names row and column.

    Arrow's own full validation (offsets, UTF-8, sizes of buffers); no nulls but in reward parts; per-token columns
    aligned; version -1 and logprob 0 where the mask is 0; prompts never trained; every sampled token in one span that
    says its version; one ticket, one attempt, one lineage (that of the newest span), no member twice, and the segments
    of a member one after the other; every sampled token one of those it was drawn between.
    """
    check_memory(batch)
    check_columns({name: batch.column(name) for name in SCHEMA.names}, np.zeros(1, np.int64))
    check_supports(batch)


def check_memory(batch: pa.RecordBatch) -> None:
    """That its columns are those of the record, sound by Arrow's rules, and that there is a row."""
    check_schema(batch.schema, version=False)
    try:
        batch.validate(full=True)  # names the column
    except pa.ArrowInvalid as error:
        raise ValueError(f"not a valid record batch: {error}") from error
    if not batch.num_rows:
        raise ValueError("no row: a group has one trajectory at least")


def check_columns(columns: Mapping[str, pa.Array], firsts: NDArray[np.int64]) -> None:
    """What `validate` refuses beyond Arrow's own rules. firsts [groups]: where each group's first row is."""
    check_nulls(columns)
    starts = starts_of(columns["token_ids"])
    for name in TOKEN_COLUMNS:
        if np.count_nonzero(starts_of(columns[name]) != starts):
            found, wanted = np.diff(starts_of(columns[name])), np.diff(starts)
            n = int(np.argmax(found != wanted))
            raise ValueError(f"row {n}, column {name}: {found[n]} entries, token_ids has {wanted[n]}")
    tokens = {name: entries(columns[name]).to_numpy() for name in TOKEN_COLUMNS}
    segmented = np.count_nonzero(columns["segment"].to_numpy())
    values = {name: columns[name].to_pylist() for name in {*CHECKED, *(OF_MEMBER if segmented else ())}}
    spans = entries(columns["spans"])
    numbers = (spans.field(name).to_numpy().tolist() for name in ("lineage", "version", "start", "end"))
    flat = list(zip(*numbers, spans.field("checksum").to_pylist(), strict=True))
    values["spans"] = [flat[start:end] for start, end in pairwise(starts_of(columns["spans"]).tolist())]
    check_rules(tokens, starts, values, np.repeat(firsts, np.diff(firsts, append=len(starts) - 1)).tolist())


def check_supports(batch: pa.RecordBatch) -> None:
    """What `validate` refuses of the columns of a support, which not every group has."""
    if SUPPORT_COLUMNS[0] not in batch.schema.names:
        return
    counts, ids = (batch.column(name) for name in SUPPORT_COLUMNS)
    check_nulls({"support_counts": counts, "support_ids": ids})
    starts = starts_of(batch.column("token_ids"))
    if np.count_nonzero(wrong := starts_of(counts) != starts):
        raise ValueError(f"row {int(np.argmax(wrong)) - 1}, column support_counts: must be one entry per token")
    support = Support(entries(counts).to_numpy(), entries(ids).to_numpy())
    tokens = {name: entries(batch.column(name)).to_numpy() for name in ("token_ids", "loss_mask")}
    check_support(support, starts, starts_of(ids), tokens)


def check_support(
    support: Support, starts: NDArray[np.int32], of_ids: NDArray[np.int32], tokens: Mapping[str, NDArray[Any]]
) -> None:
    """That the support of each token is one. starts, of_ids: where each row begins in the tokens and in the ids."""
    counts, ids = support.counts, support.ids
    ends = np.concatenate([[0], np.cumsum(counts)])

    def refuse(wrong: NDArray[np.bool_], column: str, why: str) -> None:
        """wrong [N]: of tokens."""
        if np.count_nonzero(wrong):
            at = int(np.argmax(wrong))
            n = int(np.searchsorted(starts, at, side="right")) - 1
            raise ValueError(f"row {n}, column {column}: at position {at - starts[n]} {why}")

    refuse(counts < 0, "support_counts", "a negative number of ids")
    refuse((counts > 0) & (tokens["loss_mask"] == 0), "support_counts", "a token that was not sampled")
    if np.count_nonzero(wrong := ends[starts] != of_ids):
        n = int(np.argmax(wrong)) - 1
        raise ValueError(f"row {n}, column support_ids: {of_ids[n + 1] - of_ids[n]} ids, the counts say otherwise")
    draw = np.repeat(np.arange(len(counts)), counts)

    def some(of_ids: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """[N]: tokens for one of whose ids it is true."""
        return np.bincount(draw[of_ids], minlength=len(counts)) > 0

    falling = np.zeros(len(ids), np.bool_)
    falling[1:] = (ids[1:] <= ids[:-1]) & (draw[1:] == draw[:-1])
    kept, sampled = ids >= 0, tokens["token_ids"][draw]
    refuse(some(falling), "support_ids", "ids that do not ascend")
    refuse(some(kept) & some(~kept), "support_ids", "tokens that could be drawn beside ones that could not")
    refuse(
        some(kept) & ~some(ids == sampled), "support_ids", "the sampled token is not among those it was drawn between"
    )
    refuse(some(ids == ~sampled), "support_ids", "the sampled token is among those that could not be drawn")


def check_nulls(columns: Mapping[str, pa.Array]) -> None:
    for name, column in columns.items():
        if column.null_count:
            raise ValueError(f"row {int(np.argmax(column.is_null()))}, column {name}: null")
        if _has_inner_null(column):
            raise ValueError(f"column {name}: a null inside")


def _has_inner_null(column: pa.Array) -> bool:
    """Whether a list or struct holds a null. A map may: an unscored reward part is one."""
    if pa.types.is_list(column.type):
        # All that its buffers hold comes first: mostly there is no null, and what the rows hold is a part of it.
        return _has_null(column.values) and _has_null(entries(column))
    if pa.types.is_struct(column.type):
        return any(column.field(at).null_count for at in range(column.type.num_fields))
    return False


def _has_null(array: pa.Array) -> bool:
    return bool(array.null_count) or _has_inner_null(array)


def check_rules(
    tokens: Mapping[str, NDArray[Any]],
    starts: NDArray[np.int32],
    values: Mapping[str, Sequence[Any]],
    first_of: Sequence[int],
) -> None:
    """The record's rules. tokens, starts: as `plain` returns them; values: by column, those of `CHECKED` and the
    spans, and where a member has several segments those of `OF_MEMBER`; first_of [rows]: the first row of each row's
    group."""
    _check_tokens(tokens, starts, np.array(values["prompt_length"]))
    _check_rows(values, (starts[1:] - starts[:-1]).tolist(), first_of)
    _check_members(values, first_of)
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
    names = ("reward", "finish_reason", "turn_offsets", "turn_rewards", "info")
    for n, (reward, finish, offsets, rewards, info) in enumerate(zip(*(values[name] for name in names), strict=True)):
        if abs(reward) > LARGEST_REWARD:
            raise ValueError(
                f"row {n}, column reward: {reward}; must be a number of float32, or NaN for an unscored row"
            )
        if finish not in FINISH_REASONS:
            raise ValueError(f"row {n}, column finish_reason: {finish!r}; must be one of {', '.join(FINISH_REASONS)}")
        if offsets and (list(offsets) != sorted(offsets) or offsets[0] < 0 or offsets[-1] > lengths[n]):
            raise ValueError(f"row {n}, column turn_offsets: {offsets}; must ascend within 0..{lengths[n]}")
        if rewards and len(rewards) != len(offsets):
            raise ValueError(f"row {n}, column turn_rewards: {len(rewards)} rewards for {len(offsets)} turns")
        if not info.startswith("{"):
            raise ValueError(f"row {n}, column info: {info[:40]!r}; must be a JSON object")


def _check_members(values: Mapping[str, Sequence[Any]], first_of: Sequence[int]) -> None:
    """That the rows of a member follow each other as its segments 0, 1, ..., which say the same of it."""
    seen: set[tuple[int, int]] = set()
    before = (-1, -1, -1)
    for n, (first, member, segment) in enumerate(zip(first_of, values["member"], values["segment"], strict=True)):
        if segment:
            if before != (first, member, segment - 1):
                wanted = "the segments of a member follow each other, from 0"
                raise ValueError(f"row {n}, column segment: {segment} of member {member}; {wanted}")
            for name in OF_MEMBER:
                found, wanted = values[name][n], values[name][n - 1]
                if repr(found) != repr(wanted):  # what is NaN is the same as NaN
                    raise ValueError(f"row {n}, column {name}: {found}, but segment {segment - 1} has {wanted}")
        elif (first, member) in seen:
            raise ValueError(f"row {n}, column member: member {member} segment 0 a second time")
        seen.add((first, member))
        before = (first, member, segment)


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
