"""Shared memory in one process: round trips, which segment is overwritten, and what a damaged one leads to."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.config.recipe import WeightsConfig
from asyncrl.staleness import Weights
from asyncrl.weights import build, segments, shm
from asyncrl.weights.base import WeightsError, WeightsGone
from asyncrl.weights.manifest import DTYPES, combined_checksum, tensor_bytes
from asyncrl.weights.shm import ShmPublisher, ShmReceiver

Tensors = list[tuple[str, torch.Tensor]]


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[ShmPublisher]:
    publisher = ShmPublisher("test", folder=tmp_path)
    yield publisher
    publisher.close()


def stage(document: dict[str, Any]) -> dict[str, torch.Tensor]:
    return dict(ShmReceiver().stage(document, deadline_s=10).tensors)


def constant(value: float, tensors: int = 3) -> Tensors:
    return [(f"t{i}", torch.full((4,), float(value))) for i in range(tensors)]


@st.composite
def state_dicts(draw: st.DrawFn) -> Tensors:
    """Ordered tensors of any type and shape, with any bits: scalars, empty ones, transposed views, NaN payloads."""
    tensors: Tensors = []
    for name in draw(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=6)):
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        count = torch.Size(shape).numel()
        raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
        if dtype == torch.bool:
            raw = bytes(byte & 1 for byte in raw)
        flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        tensor = flat.reshape(shape)
        tensors.append((name, tensor.transpose(0, -1) if draw(st.booleans()) and tensor.dim() else tensor))
    return tensors


@given(state_dicts())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_state_dict_arrives_bit_for_bit(publisher: ShmPublisher, tensors: Tensors) -> None:
    document = publisher.publish(Weights(2, 9), tensors, tied={"alias": "source"}, in_use=set())
    staged = ShmReceiver().stage(json.loads(json.dumps(document)), deadline_s=10)
    assert staged.weights == Weights(2, 9)
    assert list(staged.tensors) == [name for name, _ in tensors]
    for name, tensor in tensors:
        copy = staged.tensors[name]
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert tensor_bytes(name, copy) == tensor_bytes(name, tensor)
    assert staged.tied == {"alias": "source"}
    assert staged.checksum == combined_checksum(tensors) == combined_checksum(staged.tensors.items())


def test_the_staged_copy_is_private(publisher: ShmPublisher) -> None:
    staged = stage(publisher.publish(Weights(1, 0), constant(0), tied={}, in_use=set()))
    for version in (1, 2, 3):
        publisher.publish(Weights(1, version), constant(version), tied={}, in_use=set())
    assert staged["t0"].tolist() == [0, 0, 0, 0]


def test_two_segments_take_turns_while_no_reader_is_late(publisher: ShmPublisher) -> None:
    paths = [publisher.publish(Weights(1, v), constant(v), tied={}, in_use=set())["path"] for v in range(5)]
    assert len(publisher.segments) == 2
    assert paths[0] == paths[2] == paths[4] != paths[1] == paths[3]


def test_what_a_collector_serves_is_not_overwritten_and_costs_a_third_segment(publisher: ShmPublisher) -> None:
    late = Weights(1, 0)
    document = publisher.publish(late, constant(0), tied={}, in_use=set())
    for version in range(1, 6):
        publisher.publish(Weights(1, version), constant(version), tied={}, in_use={late})
    assert stage(document)["t2"].tolist() == [0, 0, 0, 0]
    assert len(publisher.segments) == 3


def test_extra_segments_go_when_the_late_readers_have_gone_on(publisher: ShmPublisher) -> None:
    versions = [Weights(1, version) for version in range(5)]
    for weights in versions:
        publisher.publish(weights, constant(weights.version), tied={}, in_use=set(versions))
    assert len(publisher.segments) == 5
    publisher.publish(Weights(1, 5), constant(5), tied={}, in_use=set())
    assert len(publisher.segments) == 2
    assert all(path.exists() for path in publisher.segments)


def test_overwritten_weights_are_gone_and_the_newest_is_still_there(publisher: ShmPublisher) -> None:
    documents = [publisher.publish(Weights(1, v), constant(v), tied={}, in_use=set()) for v in range(3)]
    with pytest.raises(WeightsGone, match=r"weights \(1, 0\)"):
        stage(documents[0])
    assert stage(documents[2])["t0"].tolist() == [2, 2, 2, 2]


def test_weights_that_are_being_written_are_gone(publisher: ShmPublisher) -> None:
    documents = [publisher.publish(Weights(1, v), constant(v), tied={}, in_use=set()) for v in range(2)]
    seen: list[type[WeightsError]] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield "t0", torch.zeros(4)
        for document in documents:
            try:
                stage(document)
            except WeightsError as error:
                seen.append(type(error))
        yield "t1", torch.zeros(4)

    publisher.publish(Weights(1, 2), source(), tied={}, in_use=set())
    assert seen == [WeightsGone]  # the other document's segment is the newest and untouched


def test_a_write_that_failed_leaves_no_version_behind(publisher: ShmPublisher) -> None:
    kept = publisher.publish(Weights(1, 0), constant(0), tied={}, in_use=set())
    with pytest.raises(WeightsError, match="t0 comes twice"):
        publisher.publish(Weights(1, 1), [*constant(1), *constant(1)], tied={}, in_use=set())
    assert stage(kept)["t0"].tolist() == [0, 0, 0, 0]
    after = publisher.publish(Weights(1, 1), constant(1), tied={}, in_use=set())
    assert stage(after)["t0"].tolist() == [1, 1, 1, 1]
    assert len(publisher.segments) == 2


def corrupt_second_tensor(document: dict[str, Any]) -> None:
    with open(document["path"], "r+b") as file:
        file.seek(document["manifest"]["tensors"][1]["offset"])
        file.write(b"\x01")


def test_a_corrupt_byte_is_an_error_that_names_the_tensor(publisher: ShmPublisher) -> None:
    document = publisher.publish(Weights(1, 0), constant(0), tied={}, in_use=set())
    corrupt_second_tensor(document)
    with pytest.raises(WeightsError, match=r"1 of 3 tensors differ: t1 \(expected xxh3 \w+, found \w+\)") as caught:
        stage(document)
    assert not isinstance(caught.value, WeightsGone)


def test_without_the_checksums_a_corrupt_tensor_would_be_served(
    publisher: ShmPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "compare", lambda *_, **__: None)
    document = publisher.publish(Weights(1, 0), constant(0), tied={}, in_use=set())
    corrupt_second_tensor(document)
    assert stage(document)["t1"].tolist() != [0, 0, 0, 0]


def test_a_truncated_segment_is_an_error_that_names_the_tensor(publisher: ShmPublisher) -> None:
    document = publisher.publish(Weights(1, 0), constant(0), tied={}, in_use=set())
    os.truncate(document["path"], document["manifest"]["tensors"][2]["offset"] + 4)
    with pytest.raises(WeightsError, match="12 bytes before the end of t2"):
        stage(document)


def overwrite_while_reading(publisher: ShmPublisher, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A document whose segment is overwritten between the copy of its first tensor and that of its second."""
    document = publisher.publish(Weights(1, 0), constant(0), tied={}, in_use=set())
    read, reads = shm._read, iter(range(3))

    def overwritten(*arguments: Any) -> None:
        if next(reads) == 1:
            publisher.publish(Weights(1, 1), constant(1), tied={}, in_use=set())
            publisher.publish(Weights(1, 2), constant(2), tied={}, in_use=set())
        read(*arguments)

    monkeypatch.setattr(shm, "_read", overwritten)
    return document


def test_weights_overwritten_during_the_copy_are_gone(publisher: ShmPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    document = overwrite_while_reading(publisher, monkeypatch)
    with pytest.raises(WeightsGone):
        stage(document)


def test_without_the_sequence_number_the_checksums_still_refuse_a_mixture(
    publisher: ShmPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "check_header", lambda *_: None)
    document = overwrite_while_reading(publisher, monkeypatch)
    with pytest.raises(WeightsError, match="2 of 3 tensors differ: t1"):
        stage(document)


def test_without_sequence_number_and_checksums_a_mixture_would_be_served(
    publisher: ShmPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "check_header", lambda *_: None)
    monkeypatch.setattr(shm, "compare", lambda *_, **__: None)
    document = overwrite_while_reading(publisher, monkeypatch)
    assert {float(tensor[0]) for tensor in stage(document).values()} == {0.0, 2.0}


def test_removed_weights_are_gone(publisher: ShmPublisher) -> None:
    document = publisher.publish(Weights(1, 0), constant(0), tied={}, in_use=set())
    publisher.close()
    with pytest.raises(WeightsGone, match="removed"):
        stage(document)
    with pytest.raises(WeightsError, match=r"weights \(1, 1\) published after close"):
        publisher.publish(Weights(1, 1), constant(1), tied={}, in_use=set())


def test_weights_on_another_host_are_an_error_that_says_so(publisher: ShmPublisher) -> None:
    document = publisher.publish(Weights(1, 0), constant(0), tied={}, in_use=set())
    publisher.close()
    with pytest.raises(WeightsError, match="on host elsewhere") as caught:
        stage({**document, "host": "elsewhere"})
    assert not isinstance(caught.value, WeightsGone)


def test_a_deadline_names_how_far_the_copy_came(publisher: ShmPublisher) -> None:
    document = publisher.publish(Weights(1, 0), constant(0), tied={}, in_use=set())
    with pytest.raises(WeightsError, match=r"0 of 3 tensors copied within 0 s, t0 is next"):
        ShmReceiver().stage(document, deadline_s=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [5]}, r"t0 is float32\[5\] and cannot have 16 bytes"),
        ({"shape": [-2, -2]}, "cannot have 16 bytes"),
        ({"dtype": "float64"}, "cannot have 16 bytes"),
        ({"dtype": "float3"}, "t0 has type 'float3'"),
        ({"name": "t1"}, "names a tensor twice"),
        ({"checksum": "0" * 16}, "combined checksum"),
        ({"offset": "4096"}, "no document of transport shm"),
    ],
)
def test_a_document_that_contradicts_itself_is_refused(
    publisher: ShmPublisher, change: dict[str, Any], message: str
) -> None:
    document = publisher.publish(Weights(1, 0), constant(0), tied={}, in_use=set())
    document = json.loads(json.dumps(document))
    document["manifest"]["tensors"][0].update(change)
    with pytest.raises(WeightsError, match=message):
        stage(document)


def test_keys_that_others_add_to_the_document_are_ignored(publisher: ShmPublisher) -> None:
    document = publisher.publish(Weights(1, 0), constant(1), tied={}, in_use=set())
    assert stage({**document, "fork": {"parent": 0, "version": 0}})["t0"].tolist() == [1, 1, 1, 1]


def test_another_format_is_refused(publisher: ShmPublisher) -> None:
    document = publisher.publish(Weights(1, 0), constant(0), tied={}, in_use=set())
    document["manifest"]["format"] = 2
    with pytest.raises(WeightsError, match="must run the same version of asyncrl"):
        stage(document)


def test_a_file_that_is_no_segment_is_refused(publisher: ShmPublisher, tmp_path: Path) -> None:
    document = publisher.publish(Weights(1, 0), constant(0), tied={}, in_use=set())
    other = tmp_path / "other"
    other.write_bytes(b"something else entirely" * 1000)
    with pytest.raises(WeightsError, match="no segment of format 1"):
        stage({**document, "path": str(other)})


def test_only_the_user_may_read_a_segment(publisher: ShmPublisher) -> None:
    document = publisher.publish(Weights(1, 0), constant(0), tied={}, in_use=set())
    assert stat.S_IMODE(os.stat(document["path"]).st_mode) == 0o600


def test_a_sweep_leaves_living_publishers_and_all_other_files_alone(publisher: ShmPublisher, tmp_path: Path) -> None:
    publisher.publish(Weights(1, 0), constant(0), tied={}, in_use=set())
    notes = tmp_path / "asyncrl-notes"
    lookalike = tmp_path / "asyncrl-00000000-1-00000000"
    notes.write_text("mine")
    lookalike.write_text("mine too, whatever its name")
    assert segments.sweep(tmp_path) == []
    assert notes.exists()
    assert lookalike.exists()


def test_the_transport_is_built_from_recipe_and_document() -> None:
    publisher = build.publisher(WeightsConfig(), "test")
    try:
        document = publisher.publish(Weights(1, 0), constant(3), tied={}, in_use=set())
        assert Path(document["path"]).parent == segments.segment_folder()
        staged = build.receiver(document).stage(document, deadline_s=10)
        assert staged.tensors["t0"].tolist() == [3, 3, 3, 3]
    finally:
        publisher.close()
    assert not Path(document["path"]).exists()
    with pytest.raises(WeightsError, match="published over 'none'"):
        build.receiver({"transport": "none"})
