"""The archive: whole parts while a run goes on, the surviving branch, and ages recomputed from the parts alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffers.archive import Archive, Stretch, surviving
from asyncrl.schema import SCHEMA, Group, Support, Trajectory, VersionSpan, pack, to_batch
from asyncrl.staleness import Weights


def batch(ticket: int, version: int, *, lineage: int = 1, sampled: int = 2, support: Support | None = None):
    mask = np.array([0] + [1] * sampled, np.uint8)
    rows = [
        Trajectory(
            token_ids=np.arange(1 + sampled, dtype=np.int32),
            loss_mask=mask,
            logprobs=np.where(mask == 1, np.float32(-1), np.float32(0)),
            versions=np.where(mask == 1, np.int32(version), np.int32(-1)),
            member=member,
            prompt_length=1,
            spans=(VersionSpan(Weights(lineage, version), 1, 1 + sampled, "ab"),),
            reward=float(member),
            reward_parts={"reward": None},
            finish_reason="stop",
            support=support if member else None,
        )
        for member in range(2)
    ]
    return to_batch(Group(ticket, 1, lineage, "reverse", f"row-{ticket}", "c", "c/0", {}, 1.0, 2.0, rows))


def test_a_part_is_plain_parquet_with_the_record_and_who_trained_it(tmp_path):
    path = Archive(tmp_path / "archive").write(2, 7, [batch(5, 7), batch(3, 6)])
    assert path.name == "step-0002-000007.parquet"
    table = pq.read_table(path)
    assert table.schema.names == [*SCHEMA.names, "trained_lineage", "trained_version"]
    assert table.schema.metadata[b"schema_version"] == b"1"
    assert table["ticket"].to_pylist() == [5, 5, 3, 3]
    assert set(table["trained_lineage"].to_pylist()) == {2}
    assert set(table["trained_version"].to_pylist()) == {7}
    assert table["reward_parts"].to_pylist()[0] == [("reward", None)]
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_sampling_masks_come_back_in_the_groups_that_had_them(tmp_path):
    """Bit for bit, so that a replay packs what the learner packed; the others are as if there were none."""
    archive = Archive(tmp_path)
    masked = batch(3, 6, support=Support.of([(), (1, 8), (~5, ~4)]))
    batches = [batch(5, 7), masked, batch(4, 7)]
    archive.write(2, 7, batches)
    found = archive.groups(Weights(2, 7))
    assert [group.schema for group in found] == [group.schema for group in batches]
    for one, other in ((pack(found), pack(batches)), (pack(found[1:2]), pack([masked]))):
        np.testing.assert_array_equal(one.support.counts, other.support.counts)
        np.testing.assert_array_equal(one.support.ids, other.support.ids)
    assert pack(found).support.ids.tolist() == [1, 8, ~5, ~4]
    assert pack(found[:1]).support is None
    assert archive.trained().tokens_by_age == {0: 8, 1: 4}


def test_doing_a_step_again_overwrites_its_part(tmp_path):
    archive = Archive(tmp_path)
    archive.write(1, 0, [batch(0, 0)])
    archive.write(1, 0, [batch(1, 0)])
    assert archive.table()["ticket"].to_pylist() == [1, 1]


def test_which_attempts_a_step_trained_is_read_from_its_part_alone(tmp_path):
    archive = Archive(tmp_path)
    archive.write(1, 0, [batch(5, 0), batch(3, 0)])
    assert archive.tickets(Weights(1, 0)) == [(5, 1), (3, 1)]
    with pytest.raises(FileNotFoundError, match="lineage 1 step 1"):
        archive.tickets(Weights(1, 1))


def test_ages_uses_and_order_come_from_the_parts_alone(tmp_path):
    archive = Archive(tmp_path)
    archive.write(1, 0, [batch(0, 0), batch(1, 0)])
    archive.write(1, 1, [batch(3, 1, sampled=5), batch(2, 0)])
    trained = archive.trained()
    assert trained.tokens_by_age == {0: 8 + 10, 1: 4}
    assert trained.max_age == 1
    assert trained.order == [(Weights(1, 0), (0, 1)), (Weights(1, 1), (3, 2))]
    assert trained.uses == {0: [(1, 0)], 1: [(1, 0)], 3: [(1, 1)], 2: [(1, 1)]}


def test_a_token_beyond_the_bound_and_a_second_use_are_seen(tmp_path):
    """Negative control: the recomputation must be able to fail a run."""
    archive = Archive(tmp_path)
    archive.write(1, 0, [batch(0, 0)])
    archive.write(1, 1, [batch(1, 1)])
    archive.write(1, 2, [batch(0, 0)])
    trained = archive.trained()
    assert trained.max_age == 2
    assert trained.uses[0] == [(1, 0), (1, 2)]


def test_masked_tokens_are_told_apart_from_trained_ones(tmp_path):
    archive = Archive(tmp_path)
    archive.write(1, 3, [batch(0, 2), batch(1, 3, sampled=5)])
    archive.write(1, 4, [batch(0, 2)])
    trained = archive.trained(masked_beyond=1)
    assert trained.tokens_by_age == {1: 4, 0: 10}
    assert (trained.masked, trained.max_age) == (4, 1)
    assert trained.all_masked == [(0, (1, 4))], "a group of which nothing is left has no business in a step"


def test_dead_branches_are_left_out_and_can_be_asked_for(tmp_path):
    archive = Archive(tmp_path)
    for lineage, step in [(1, 0), (1, 1), (1, 2), (2, 1)]:
        archive.write(lineage, step, [batch(10 * lineage + step, step, lineage=lineage)])
    assert archive.branch() == [Stretch(1, 0, 0), Stretch(2, 1, 1)]
    assert list(archive.parts()) == [(1, 0), (1, 1), (1, 2), (2, 1)]
    assert archive.table(columns=["ticket"])["ticket"].to_pylist() == [10, 10, 21, 21]
    assert set(archive.trained([(1, 0, 2)]).uses) == {10, 11, 12}
    with pytest.raises(FileNotFoundError, match="lineage 2 step 2"):
        archive.table([(2, 1, 2)])


def test_parts_the_ledger_has_not_committed_are_left_out(tmp_path):
    archive = Archive(tmp_path)
    for step in range(3):
        archive.write(1, step, [batch(step, step)])
    assert archive.branch(version=2) == [Stretch(1, 0, 1)]
    assert archive.branch(version=0) == []
    with pytest.raises(ValueError, match="nothing was trained"):
        archive.table([])


def test_the_groups_of_a_part_come_back_as_they_were_trained(tmp_path):
    archive, groups = Archive(tmp_path), [batch(5, 7), batch(3, 6, sampled=4)]
    archive.write(2, 7, groups)
    found = archive.groups(Weights(2, 7))
    assert [group.to_pydict() for group in found] == [group.to_pydict() for group in groups]
    before, after = pack(groups), pack(found)
    assert before.groups.tolist() == after.groups.tolist()
    for name in ("token_ids", "loss_mask", "logprobs", "versions", "cu_seqlens", "rewards"):
        assert getattr(before, name).tobytes() == getattr(after, name).tobytes()


def test_a_part_that_is_missing_damaged_or_of_another_schema_is_named(tmp_path):
    archive = Archive(tmp_path)
    with pytest.raises(FileNotFoundError, match="no part of lineage 1 step 0"):
        archive.groups(Weights(1, 0))
    path = archive.write(1, 0, [batch(0, 0)])
    whole = pq.read_table(path)
    pq.write_table(whole.replace_schema_metadata({**whole.schema.metadata, b"schema_version": b"2"}), path)
    with pytest.raises(ValueError, match=r"step-0001-000000.parquet: schema version 2, this program reads 1"):
        archive.groups(Weights(1, 0))
    pq.write_table(whole.drop_columns("logprobs"), path)
    with pytest.raises(ValueError, match=r"step-0001-000000.parquet: column logprobs: 0 of that name"):
        archive.groups(Weights(1, 0))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"step-0001-000000.parquet: "):
        archive.groups(Weights(1, 0))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), min_size=1, max_size=5))
def test_the_surviving_branch_is_one_part_for_every_step(starts):
    """Learners that resume from some version of the branch and train a few steps each."""
    parts, expected = [], {}
    for lineage, (fork, steps) in enumerate(starts, 1):
        fork = min(fork, len(expected))
        expected = {step: of for step, of in expected.items() if step < fork}
        for step in range(fork, fork + steps):
            parts.append(Weights(lineage, step))
            expected[step] = lineage
    branch = surviving(parts)
    found = {step: stretch.lineage for stretch in branch for step in range(stretch[1], stretch[2] + 1)}
    assert found == expected
    assert list(found) == sorted(found)


WRITER = """
import sys
from pathlib import Path
import pyarrow as pa
import pyarrow.parquet as pq
from asyncrl.buffers.archive import Archive
batch = pa.ipc.open_stream(sys.stdin.buffer).read_next_batch()
path = Archive(Path(sys.argv[1])).write(1, 0, [batch])
table = pq.read_table(path)
print("writing", flush=True)
while True:
    if sys.argv[2] == "in place":
        pq.write_table(table, path, compression="zstd")
    else:
        Archive(Path(sys.argv[1])).write(1, 0, [batch])
"""


@pytest.fixture
def start_writer(tmp_path):
    """Starts a process that writes the part of step 0 over and over; all are killed at the end."""
    sink = pa.BufferOutputStream()
    rows = batch(0, 0, sampled=20_000)
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    started = []

    def start(how: str):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        process.stdin.write(sink.getvalue().to_pybytes())
        process.stdin.close()
        assert process.stdout.readline() == b"writing\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(timeout=10)
        process.stdout.close()


@pytest.mark.faults
def test_a_reader_sees_whole_parts_while_a_writer_is_killed(tmp_path, start_writer):
    for _ in range(3):
        process = start_writer("aside")
        for _ in range(10):
            assert Archive(tmp_path).trained().tokens_by_age == {0: 40_000}
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
        assert Archive(tmp_path).trained().tokens_by_age == {0: 40_000}


@pytest.mark.faults
def test_a_part_written_in_place_would_be_read_half_written(tmp_path, start_writer):
    """Negative control of the test above: without the rename a reader meets a file without its footer."""
    start_writer("in place")

    def read_until(limit: float) -> None:
        while time.monotonic() < limit:
            Archive(tmp_path).trained()

    with pytest.raises((pa.ArrowInvalid, OSError)):
        read_until(time.monotonic() + 60)
