"""What is not a whole honest group is refused, by name."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.schema import (
    Support,
    decode,
    decode_all,
    digest,
    encode,
    to_batch,
    validate,
)
from tests.record.drawn_groups import stream


def test_another_schema_version_is_refused_with_both_named(make_group):
    batch = to_batch(make_group()).replace_schema_metadata({"schema_version": "9"})
    with pytest.raises(ValueError, match="schema version 9, this program reads 1"):
        decode(stream(batch, batch.schema))
    batch = batch.replace_schema_metadata(None)
    with pytest.raises(ValueError, match="schema version none"):
        decode(stream(batch, batch.schema))


def test_every_truncation_is_refused(make_group):
    payload = encode(make_group())
    for size in range(len(payload)):
        with pytest.raises(ValueError):
            decode(payload[:size])


def test_bytes_after_the_end_and_a_second_batch_are_refused(make_group):
    payload = encode(make_group())
    for extra in (b"x", payload[-8:], payload):
        with pytest.raises(ValueError, match="bytes after the end"):
            decode(payload + extra)
    batch = to_batch(make_group())
    for count in (0, 2):
        with pytest.raises(ValueError, match=f"{count} record batches"):
            decode(stream(batch, batch.schema, count))


def test_a_missing_or_mistyped_column_is_refused_by_name(make_group):
    batch = to_batch(make_group())
    for bad in (batch.drop_columns(["reward"]), batch.append_column("reward", batch.column("reward"))):
        with pytest.raises(ValueError, match="column reward"):
            decode(stream(bad, bad.schema))
    at = batch.schema.get_field_index("reward")
    bad = batch.set_column(at, "reward", batch.column("reward").cast(pa.float32()))
    with pytest.raises(ValueError, match="column reward: float, must be double"):
        decode(stream(bad, bad.schema))


def test_a_flipped_byte_is_caught_by_the_digest_and_not_by_decoding(make_group):
    """The second half is the negative control: a changed token id is a legal token id, only the digest can tell."""
    payload = bytearray(encode(make_group()))
    at = payload.index(np.arange(7, dtype=np.int32).tobytes())
    before = digest(bytes(payload))
    payload[at] ^= 8
    assert digest(bytes(payload)) != before
    assert decode(bytes(payload)).column("token_ids")[0].as_py()[0] == 8


def edit(row, column, at, value):
    values = getattr(row, column).copy()
    values[at] = value
    return dataclasses.replace(row, **{column: values})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: edit(row, "versions", 0, 2), "row 1, column versions: 2 at position 0"),
        (lambda row: edit(row, "versions", 4, -1), "row 1, column versions: -1 at position 4"),
        (lambda row: edit(row, "versions", 4, 3), "row 1, column spans: .* says version 2"),
        (lambda row: edit(row, "logprobs", 1, -0.5), "row 1, column logprobs"),
        (lambda row: edit(row, "logprobs", 1, math.nan), "row 1, column logprobs"),
        (lambda row: edit(row, "token_ids", 2, -5), "row 1, column token_ids: -5 at position 2"),
        (lambda row: edit(row, "loss_mask", 5, 2), "row 1, column loss_mask: 2 at position 5"),
        (lambda row: dataclasses.replace(row, prompt_length=4), "row 1, column loss_mask: 1 at position 3"),
        (lambda row: dataclasses.replace(row, prompt_length=8), "row 1, column prompt_length: 8 in a sequence of 7"),
        (lambda row: dataclasses.replace(row, spans=()), "row 1, column spans: cover 0 of 4"),
        (lambda row: dataclasses.replace(row, spans=row.spans * 2), "row 1, column spans"),
        (lambda row: dataclasses.replace(row, member=0), "row 1, column member: member 0 segment 0 a second time"),
        (lambda row: dataclasses.replace(row, reward=math.inf), "row 1, column reward: inf; must be a number"),
        (lambda row: dataclasses.replace(row, reward=-math.inf), "row 1, column reward: -inf"),
        (
            lambda row: dataclasses.replace(row, reward=1e39),
            "row 1, column reward: 1e[+]39; must be a number of float32",
        ),
        (lambda row: dataclasses.replace(row, finish_reason="done"), "row 1, column finish_reason: 'done'"),
        (lambda row: dataclasses.replace(row, turn_offsets=(5, 3)), "row 1, column turn_offsets"),
        (lambda row: dataclasses.replace(row, turn_rewards=(1.0, 2.0)), "row 1, column turn_rewards"),
    ],
)
def test_a_dishonest_row_is_refused_by_row_and_column(make_group, make_trajectory, change, message):
    group = make_group(make_trajectory(0), change(make_trajectory(1)))
    with pytest.raises(ValueError, match=message):
        encode(group)
    batch = to_batch(group)
    with pytest.raises(ValueError, match=message):
        decode(stream(batch, batch.schema))
    assert decode(stream(batch, batch.schema), check=False).num_rows == 2  # control: only the validation refuses it
    good = encode(make_group(ticket=3))
    with pytest.raises(ValueError, match=f"payload 1: {message}"):
        decode_all([good, stream(batch, batch.schema), good])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segment": 2}, "row 2, column segment: 2 of member 1; the segments of a member follow each other, from 0"),
        ({"segment": -1}, "row 2, column segment: -1 of member 1"),
        ({"member": 0}, "row 2, column segment: 1 of member 0"),
        ({"segment": 0}, "row 2, column member: member 1 segment 0 a second time"),
        ({"reward": 0.5}, "row 2, column reward: 0.5, but segment 0 has nan"),
        ({"reward_parts": {"reward": 0.5}}, "row 2, column reward_parts: .*0.5.*, but segment 0 has"),
        ({"failure": "verifier_timeout"}, "row 2, column failure: verifier_timeout, but segment 0 has"),
    ],
)
def test_segments_follow_each_other_and_say_the_same_of_their_member(make_group, make_trajectory, change, message):
    rows = [make_trajectory(0), *(make_trajectory(1, reward=math.nan) for _ in range(2))]
    rows[2] = dataclasses.replace(rows[2], segment=1)
    assert decode(encode(make_group(*rows))).column("segment").to_pylist() == [0, 0, 1]
    bad = make_group(*rows[:2], dataclasses.replace(rows[2], **change))
    with pytest.raises(ValueError, match=message):
        encode(bad)
    batch = to_batch(bad)
    with pytest.raises(ValueError, match=message):
        decode(stream(batch, batch.schema))


@pytest.mark.parametrize(
    ("draws", "message"),
    [
        ([(~3,)], "row 1, column support_ids: at position 3 the sampled token is among those that could not"),
        ([(4, 9), (), ()], "position 3 the sampled token is not among those it was drawn between"),
        ([(), (4, 4)], "position 4 ids that do not ascend"),
        ([(), (9, 4)], "position 4 ids that do not ascend"),
        ([(), (), (-9, 5)], "position 5 tokens that could be drawn beside ones that could not"),
        ([(), (), (), (0, 2)], "position 6 the sampled token is not"),
    ],
)
def test_a_support_that_is_none_is_refused_by_row_and_position(make_group, make_trajectory, draws, message):
    row = make_trajectory(1)  # tokens 3, 4, 5 and 6 are sampled
    support = Support.of([(), (), (), *draws, *[()] * (4 - len(draws))])
    group = make_group(make_trajectory(0), dataclasses.replace(row, support=support))
    with pytest.raises(ValueError, match=message):
        encode(group)
    batch = to_batch(group)
    with pytest.raises(ValueError, match=message):
        decode(stream(batch, batch.schema))
    with pytest.raises(ValueError, match=f"payload 1: .*{message}"):
        decode_all([encode(make_group(ticket=3)), stream(batch, batch.schema)])


def test_a_support_of_another_size_or_where_nothing_was_sampled_is_refused(make_group, make_trajectory):
    row = make_trajectory(0)

    def with_support(counts, ids):
        support = Support(np.array(counts, np.int32), np.array(ids, np.int32))
        return make_group(dataclasses.replace(row, support=support))

    assert decode(encode(with_support([0, 0, 0, 2, 0, 0, 1], [3, 8, -4]))).num_rows == 1
    with pytest.raises(ValueError, match=r"row 0, column support_counts: .*must be one count per token"):
        encode(with_support([0, 0, 1], [3]))
    with pytest.raises(ValueError, match=r"row 0, column support_counts: .*as many ids as they add up to"):
        encode(with_support([0, 0, 0, 2, 0, 0, 0], [3]))
    with pytest.raises(ValueError, match="row 0, column support_counts: at position 1 a token that was not sampled"):
        encode(with_support([0, 1, 0, 0, 0, 0, 0], [1]))
    with pytest.raises(ValueError, match="row 0, column support_counts: at position 3 a negative number"):
        encode(with_support([0, 0, 0, -1, 2, 0, 0], [4]))


def test_a_damaged_support_in_arrow_is_refused(make_group, make_trajectory):
    support = Support.of([(), (), (), (3, 8), (), (), (~3,)])
    batch = to_batch(make_group(dataclasses.replace(make_trajectory(0), support=support), make_trajectory(1)))
    lists = pa.list_(pa.int32())

    def changed(name, value):
        return batch.set_column(batch.schema.get_field_index(name), name, value)

    with pytest.raises(ValueError, match="row 1, column support_ids: 1 ids, the counts say otherwise"):
        validate(changed("support_ids", pa.array([[3, 8, ~3], [5]], lists)))
    with pytest.raises(ValueError, match="row 1, column support_counts: null"):
        validate(changed("support_counts", pa.array([[0, 0, 0, 2, 0, 0, 1], None], lists)))
    with pytest.raises(ValueError, match="row 0, column support_counts: must be one entry per token"):
        validate(changed("support_counts", pa.array([[2, 1], [0] * 11], lists)))
    with pytest.raises(ValueError, match="column support_ids: 0 of that name, must be one"):
        validate(batch.drop_columns(["support_ids"]))
    with pytest.raises(ValueError, match="column support_ids: list<item: int64>, must be"):
        validate(changed("support_ids", pa.array([[3, 8, ~3], []], pa.list_(pa.int64()))))


def test_token_columns_with_other_offsets_are_refused(make_group):
    batch = to_batch(make_group())  # rows of 7 and 5 tokens
    kind = pa.list_(pa.int32())
    moved = pa.py_buffer(np.array([0, 6, 12], np.int32))
    column = pa.ListArray.from_buffers(kind, 2, [None, moved], children=[batch.column("versions").values])
    bad = batch.set_column(batch.schema.get_field_index("versions"), "versions", column)
    with pytest.raises(ValueError, match="row 0, column versions: 6 entries, token_ids has 7"):
        validate(bad)


def test_two_tickets_in_one_group_and_nulls_are_refused(make_group):
    batch = to_batch(make_group())
    at = batch.schema.get_field_index("ticket")
    with pytest.raises(ValueError, match="row 1, column ticket: 8, but row 0 has 7"):
        validate(batch.set_column(at, "ticket", pa.array([7, 8])))
    with pytest.raises(ValueError, match="row 1, column ticket: null"):
        validate(batch.set_column(at, "ticket", pa.array([7, None], pa.int64())))


@pytest.mark.parametrize("column", ["turn_rewards", "spans", "sampling"])
def test_a_null_inside_a_list_or_a_struct_is_refused(make_group, column):
    batch = to_batch(make_group())
    kind = batch.column(column).type
    inner = [None]
    if column == "spans":
        inner = [{"lineage": 1, "version": None, "start": 3, "end": 7, "checksum": "00ff"}]
    value = {"temperature": None, "top_p": 1.0, "top_k": 1, "min_p": 0.0, "seed": 0} if column == "sampling" else inner
    changed = batch.set_column(batch.schema.get_field_index(column), column, pa.array([value, value], kind))
    with pytest.raises(ValueError, match=f"column {column}: a null inside"):
        decode(stream(changed, changed.schema))


def test_arrays_of_another_dtype_or_length_are_refused_before_encoding(make_group, make_trajectory):
    row = make_trajectory()
    with pytest.raises(ValueError, match="row 0, column versions: int64"):
        to_batch(make_group(dataclasses.replace(row, versions=row.versions.astype(np.int64))))
    with pytest.raises(ValueError, match="row 0, column logprobs: float32\\[6\\]"):
        to_batch(make_group(dataclasses.replace(row, logprobs=row.logprobs[1:])))
    with pytest.raises(ValueError, match="sampling has \\['temp'\\]"):
        to_batch(dataclasses.replace(make_group(), sampling={"temp": 1.0}))


def test_a_group_above_the_bound_is_refused(make_group, make_trajectory):
    with pytest.raises(ValueError, match="put less into info"):
        encode(make_group(dataclasses.replace(make_trajectory(), info={"log": "x" * 20_000})))


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused_with_a_value_error(payload):
    with pytest.raises(ValueError):
        decode(payload)


def test_no_group_is_taken_for_a_part_of_another(make_group, make_trajectory):
    """The same members, other tickets, other lineages, other columns: allowed between groups, refused within one."""
    several = [make_group(ticket=7), make_group(make_trajectory(0, lineage=2), ticket=8, lineage=2)]
    extra = to_batch(make_group(ticket=9))
    extra = extra.append_column("routing", pa.array([1, 2]))
    payloads = [*(encode(group) for group in several), stream(extra, extra.schema)]
    assert [batch.column("ticket")[0].as_py() for batch in decode_all(payloads)] == [7, 8, 9]
    wrong = to_batch(make_group(make_trajectory(0, lineage=2), ticket=8, lineage=1))
    with pytest.raises(ValueError, match="payload 3: row 0, column lineage: 1, but the newest span is of lineage 2"):
        decode_all([*payloads, stream(wrong, wrong.schema)])
    assert decode_all([]) == []


def test_a_damaged_payload_is_named_by_its_place(make_group):
    good = encode(make_group())
    with pytest.raises(ValueError, match="payload 2: truncated"):
        decode_all([good, good, good[:-8]])
