"""The record: what goes in comes out, without copies, and what is not a whole honest group is refused by name."""

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
    Group,
    Support,
    Trajectory,
    VersionSpan,
    apart,
    decode,
    decode_all,
    digest,
    encode,
    pack,
    to_batch,
    together,
    validate,
)
from asyncrl.staleness import Weights

TOKEN_COLUMNS = tuple(schema.TOKEN_COLUMNS)
text = st.text(max_size=12)
rewards = st.floats(allow_nan=True, allow_infinity=True)


@st.composite
def trajectories(draw, member):
    prompt = draw(st.integers(1, 5))
    stretches = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=3))
    length = prompt + sum(n for n, _ in stretches)
    mask, versions = np.zeros(length, np.uint8), np.full(length, -1, np.int32)
    spans, at = [], prompt
    for n, version in stretches:
        mask[at : at + n] = 1
        versions[at : at + n] = version
        spans.append(VersionSpan(Weights(3, version), at, at + n, draw(text)))
        at += n
    logprobs = np.where(mask == 1, draw(st.floats(-50, 0, width=32)), 0).astype(np.float32)
    token_ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length))
    return Trajectory(
        token_ids=np.array(token_ids, np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        versions=versions,
        member=member,
        prompt_length=prompt,
        spans=tuple(spans),
        reward=draw(st.just(math.nan) | st.floats(-3e38, 3e38)),
        reward_parts=draw(st.dictionaries(text, st.none() | rewards, max_size=3)),
        finish_reason=draw(st.sampled_from(schema.FINISH_REASONS)),
        failure=draw(text),
        turn_offsets=(prompt,),
        turn_rewards=(draw(rewards),),
        done=draw(st.floats(0, 2e9)),
        seed=draw(st.integers(0, 2**63 - 1)),
        info=draw(st.dictionaries(text, st.integers() | text, max_size=2)),
        support=draw(st.none() | supports(token_ids, mask.tolist())),
    )


@st.composite
def supports(draw, token_ids, mask):
    """Of each sampled token nothing, some tokens and itself, or some other tokens that it could not have been."""
    others = st.sets(st.integers(0, 2**31 - 1), max_size=3)
    draws = []
    for token, sampled in zip(token_ids, mask, strict=True):
        ids = draw(others) if sampled else set()
        kept = draw(st.booleans())
        draws.append(sorted(ids | {token}) if ids and kept else sorted(~id for id in ids - {token}))
    return Support.of(draws)


@st.composite
def groups(draw):
    rows = []
    for member in range(draw(st.integers(1, 3))):
        first = draw(trajectories(member))
        told = {name: getattr(first, name) for name in ("reward", "reward_parts", "failure")}
        more = range(1, 1 + draw(st.integers(0, 1)))
        rows += [first, *(dataclasses.replace(draw(trajectories(member)), segment=n, **told) for n in more)]
    sampling = draw(st.fixed_dictionaries({"temperature": st.floats(0.1, 2)}, optional={"top_k": st.integers(-1, 9)}))
    return Group(draw(st.integers(0, 2**40)), 2, 3, "reverse", draw(text), "c", "c/0", sampling, 1.5, 2.5, tuple(rows))


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


def stream(batch, schema_, count=1):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema_) as writer:
        for _ in range(count):
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def test_optional_columns_do_not_change_the_schema_version(make_group):
    batch = to_batch(make_group()).append_column("routing", pa.array([1, 2]))
    assert decode(stream(batch, batch.schema)).column("routing").to_pylist() == [1, 2]


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


def test_the_lineage_is_that_of_the_newest_span(make_group, make_trajectory):
    with pytest.raises(ValueError, match="column lineage: 2, but the newest span is of lineage 1"):
        encode(make_group(lineage=2))
    encode(make_group(make_trajectory(0), make_trajectory(1, lineage=2), lineage=2))


def test_arrays_of_another_dtype_or_length_are_refused_before_encoding(make_group, make_trajectory):
    row = make_trajectory()
    with pytest.raises(ValueError, match="row 0, column versions: int64"):
        to_batch(make_group(dataclasses.replace(row, versions=row.versions.astype(np.int64))))
    with pytest.raises(ValueError, match="row 0, column logprobs: float32\\[6\\]"):
        to_batch(make_group(dataclasses.replace(row, logprobs=row.logprobs[1:])))
    with pytest.raises(ValueError, match="sampling has \\['temp'\\]"):
        to_batch(dataclasses.replace(make_group(), sampling={"temp": 1.0}))


@given(groups())
def test_no_group_is_larger_than_what_is_reserved_for_it(group):
    """Rows of 1 to 17 tokens, each of which was drawn between all, or between up to four."""
    longest = max(len(row.token_ids) for row in group.trajectories)
    most = 4 if any(row.support for row in group.trajectories) else 0
    rows = [row.segment for row in group.trajectories]
    bound = schema.max_group_bytes(rows.count(0), longest, segments=1 + max(rows), support=most)
    assert len(encode(group)) <= bound


def test_a_group_above_the_bound_is_refused(make_group, make_trajectory):
    with pytest.raises(ValueError, match="put less into info"):
        encode(make_group(dataclasses.replace(make_trajectory(), info={"log": "x" * 20_000})))


def test_what_the_store_must_know_is_read_off_the_batch(make_group, make_trajectory):
    rows = (make_trajectory(0, version=4, sampled=2), make_trajectory(1, version=2), make_trajectory(2, sampled=0))
    batch = to_batch(make_group(*rows))
    assert schema.version_range(batch) == (2, 4)
    assert schema.span_weights(batch) == (Weights(1, 2), Weights(1, 4))
    assert schema.sampled_tokens(batch) == 6
    with pytest.raises(ValueError, match="no trainable token"):
        schema.version_range(to_batch(make_group(make_trajectory(sampled=0))))


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused_with_a_value_error(payload):
    with pytest.raises(ValueError):
        decode(payload)


@given(st.lists(groups(), min_size=1, max_size=4))
@settings(max_examples=25)  # a list of groups takes long to draw
def test_groups_decoded_together_are_those_decoded_one_by_one(several):
    payloads = [encode(group) for group in several]
    for one, other in zip(decode_all(payloads), map(decode, payloads), strict=True):
        assert one.serialize() == other.serialize()  # not `equals`: NaN is there


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
