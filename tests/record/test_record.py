"""The record: what goes in comes out, without copies, by itself or with other groups."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl import schema
from asyncrl.schema import (
    Support,
    VersionSpan,
    apart,
    decode,
    decode_all,
    encode,
    pack,
    to_batch,
    together,
    validate,
)
from asyncrl.staleness import Weights
from tests.record.drawn_groups import groups, stream

TOKEN_COLUMNS = tuple(schema.TOKEN_COLUMNS)


def same(left, right):
    return left == right or (isinstance(left, float) and isinstance(right, float) and math.isnan(left + right))


@given(groups())
def test_a_group_comes_back_as_it_was_put_in(group):
    batch = decode(encode(group))
    for n, row in enumerate(group.trajectories):
        for name in TOKEN_COLUMNS:
            np.testing.assert_array_equal(batch.column(name)[n].values.to_numpy(), getattr(row, name))
        out = {name: batch.column(name)[n].as_py() for name in batch.schema.names if name not in TOKEN_COLUMNS}
        for name in ("ticket", "attempt", "lineage", "task", "row_id", "collector", "engine", "issued", "put"):
            assert out[name] == getattr(group, name)
        for name in ("member", "segment", "prompt_length", "finish_reason", "failure", "first_token", "done", "scored"):
            assert out[name] == getattr(row, name)
        assert same(out["reward"], row.reward)
        assert dict(out["reward_parts"]).keys() == row.reward_parts.keys()
        assert all(same(value, row.reward_parts[name]) for name, value in out["reward_parts"])
        assert all(map(same, out["turn_rewards"], row.turn_rewards))
        assert tuple(out["turn_offsets"]) == row.turn_offsets
        assert json.loads(out["info"]) == row.info
        assert out["sampling"]["seed"] == row.seed
        assert out["sampling"]["temperature"] == group.sampling["temperature"]
        assert out["sampling"]["top_k"] == group.sampling.get("top_k", -1)
        assert [VersionSpan(Weights(s["lineage"], s["version"]), s["start"], s["end"], s["checksum"])
                for s in out["spans"]] == list(row.spans)  # fmt: skip


@given(st.lists(groups(), min_size=1, max_size=3))
@settings(max_examples=25)  # a list of groups takes long to draw
def test_packing_puts_rows_back_to_back(batch_of_groups):
    packed = pack([decode(encode(group)) for group in batch_of_groups])
    rows = [(n, row) for n, group in enumerate(batch_of_groups) for row in group.trajectories]
    assert packed.cu_seqlens.tolist() == [0, *np.cumsum([len(row.token_ids) for _, row in rows])]
    assert packed.groups.tolist() == [n for n, _ in rows]
    for name in TOKEN_COLUMNS:
        np.testing.assert_array_equal(getattr(packed, name), np.concatenate([getattr(row, name) for _, row in rows]))
    np.testing.assert_array_equal(packed.rewards, [row.reward for _, row in rows])
    support = Support.joined([(row.support, len(row.token_ids)) for _, row in rows])
    assert (packed.support is None) == (support is None)
    if support is not None:
        np.testing.assert_array_equal(packed.support.counts, support.counts)
        np.testing.assert_array_equal(packed.support.ids, support.ids)
    members = list(dict.fromkeys((n, row.member) for n, row in rows))
    assert packed.answers.tolist() == [members.index((n, row.member)) for n, row in rows]


def test_an_unscored_part_is_null_and_a_nan_stays_nan(make_group, make_trajectory):
    row = dataclasses.replace(make_trajectory(), reward=math.nan, reward_parts={"none": None, "nan": math.nan})
    batch = decode(encode(make_group(row)))
    assert batch.column("reward").null_count == 0
    assert math.isnan(batch.column("reward")[0].as_py())
    parts = dict(batch.column("reward_parts")[0].as_py())
    assert parts["none"] is None
    assert math.isnan(parts["nan"])


def test_token_columns_share_one_offsets_buffer(make_group):
    batch = to_batch(make_group())
    assert len({batch.column(name).buffers()[1].address for name in TOKEN_COLUMNS}) == 1


def test_decoding_and_packing_one_group_copy_no_token(make_group):
    payload = encode(make_group())
    whole = pa.py_buffer(payload)
    batch = decode(payload)
    packed = pack([batch])
    for name in TOKEN_COLUMNS:
        for address in (batch.column(name).buffers()[3].address, getattr(packed, name).ctypes.data):
            assert whole.address <= address < whole.address + whole.size
        assert not getattr(packed, name).flags.writeable


def test_a_column_only_some_groups_have_does_not_hinder_packing(make_group):
    batch = to_batch(make_group())
    other = to_batch(make_group(ticket=8)).append_column("routing", pa.array([1, 2]))
    packed = pack([batch, other])
    assert packed.table.column("routing").to_pylist() == [None, None, 1, 2]


def test_optional_columns_do_not_change_the_schema_version(make_group):
    batch = to_batch(make_group()).append_column("routing", pa.array([1, 2]))
    assert decode(stream(batch, batch.schema)).column("routing").to_pylist() == [1, 2]


@given(st.lists(groups(), min_size=1, max_size=3))
@settings(max_examples=25)  # a list of groups takes long to draw
def test_groups_put_together_come_apart_with_the_columns_that_they_had(several):
    """Some of which have a support, and some not."""
    batches = [decode(encode(dataclasses.replace(group, ticket=n))) for n, group in enumerate(several)]
    (rows,) = together(batches).combine_chunks().to_batches()
    for found, batch in zip(apart(rows), batches, strict=True):
        assert found.schema == batch.schema
        assert found.to_pydict().keys() == batch.to_pydict().keys()
        validate(found)


def test_the_lineage_is_that_of_the_newest_span(make_group, make_trajectory):
    with pytest.raises(ValueError, match="column lineage: 2, but the newest span is of lineage 1"):
        encode(make_group(lineage=2))
    encode(make_group(make_trajectory(0), make_trajectory(1, lineage=2), lineage=2))


@given(groups())
def test_no_group_is_larger_than_what_is_reserved_for_it(group):
    """Rows of 1 to 17 tokens, each of which was drawn between all, or between up to four."""
    longest = max(len(row.token_ids) for row in group.trajectories)
    most = 4 if any(row.support for row in group.trajectories) else 0
    rows = [row.segment for row in group.trajectories]
    bound = schema.max_group_bytes(rows.count(0), longest, segments=1 + max(rows), support=most)
    assert len(encode(group)) <= bound


def test_what_the_store_must_know_is_read_off_the_batch(make_group, make_trajectory):
    rows = (make_trajectory(0, version=4, sampled=2), make_trajectory(1, version=2), make_trajectory(2, sampled=0))
    batch = to_batch(make_group(*rows))
    assert schema.version_range(batch) == (2, 4)
    assert schema.span_weights(batch) == (Weights(1, 2), Weights(1, 4))
    assert schema.sampled_tokens(batch) == 6
    with pytest.raises(ValueError, match="no trainable token"):
        schema.version_range(to_batch(make_group(make_trajectory(sampled=0))))


@given(st.lists(groups(), min_size=1, max_size=4))
@settings(max_examples=25)  # a list of groups takes long to draw
def test_groups_decoded_together_are_those_decoded_one_by_one(several):
    payloads = [encode(group) for group in several]
    for one, other in zip(decode_all(payloads), map(decode, payloads), strict=True):
        assert one.serialize() == other.serialize()  # not `equals`: NaN is there
