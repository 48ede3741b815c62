"""Shared memory in one process: round trips, which segment is overwritten, and what a damaged one leads to."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.staleness import Weights
from asyncrl.weights import build, segments, shm
from asyncrl.weights.base import WeightsError, WeightsGone
from asyncrl.weights.image import DATA_START, Images
from asyncrl.weights.manifest import DTYPES, combined_checksum, tensor_bytes
from asyncrl.weights.segments import read_lock
from asyncrl.weights.shm import ShmReceiver, shm_offer

Tensors = list[tuple[str, torch.Tensor]]


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Images]:
    images = Images("test", folder=tmp_path)
    yield images
    images.close()


def publish(images: Images, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """The offer of a new version."""
    return shm_offer(images.write(Weights(1, version), tensors, tied={}))


def stage(offer: dict[str, Any]) -> dict[str, torch.Tensor]:
    return dict(ShmReceiver().stage(offer, deadline_s=10).tensors)


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


@given(state_dicts(), st.booleans(), st.booleans())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_state_dict_arrives_bit_for_bit(images: Images, tensors: Tensors, hashed: bool, mapped: bool) -> None:
    offer = shm_offer(images.write(Weights(2, 9), tensors, tied={"alias": "source"}, hashed=hashed))
    staged = ShmReceiver(mapped=mapped).stage(json.loads(json.dumps(offer)), deadline_s=10)
    assert staged.weights == Weights(2, 9)
    assert list(staged.tensors) == [name for name, _ in tensors]
    for name, tensor in tensors:
        copy = staged.tensors[name]
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert tensor_bytes(name, copy) == tensor_bytes(name, tensor)
    assert staged.tied == {"alias": "source"}
    assert staged.mapped == mapped
    assert combined_checksum(tensors) == combined_checksum(staged.tensors.items())
    assert staged.checksum == (combined_checksum(tensors) if hashed else "")


def test_the_staged_copy_is_private(images: Images) -> None:
    staged = stage(publish(images, 0, constant(0)))
    for version in (1, 2, 3):
        publish(images, version, constant(version))
    assert staged["t0"].tolist() == [0, 0, 0, 0]


def test_two_segments_take_turns_while_no_reader_is_late(images: Images) -> None:
    paths = [publish(images, v, constant(v))["path"] for v in range(5)]
    assert len(images.segments) == 2
    assert paths[0] == paths[2] == paths[4] != paths[1] == paths[3]


def locked(offer: dict[str, Any]) -> int:
    """A reader's lock on what is offered."""
    lock = read_lock(Path(offer["path"]))
    assert lock is not None
    return lock


def test_what_a_reader_has_locked_is_not_overwritten_and_costs_a_third_segment(images: Images) -> None:
    offer = publish(images, 0, constant(0))
    late = locked(offer)
    for version in range(1, 6):
        publish(images, version, constant(version))
    assert stage(offer)["t2"].tolist() == [0, 0, 0, 0]
    assert len(images.segments) == 3
    os.close(late)


def test_extra_segments_go_when_the_late_readers_have_gone_on(images: Images) -> None:
    late = [locked(publish(images, version, constant(version))) for version in range(5)]
    assert len(images.segments) == 5
    for lock in late:
        os.close(lock)
    publish(images, 5, constant(5))
    assert len(images.segments) == 2
    assert all(path.exists() and Path(f"{path}.readers").exists() for path in images.segments)


def test_overwritten_weights_are_gone_and_the_newest_is_still_there(images: Images) -> None:
    offers = [publish(images, v, constant(v)) for v in range(3)]
    with pytest.raises(WeightsGone, match=r"weights \(1, 0\)"):
        stage(offers[0])
    assert stage(offers[2])["t0"].tolist() == [2, 2, 2, 2]


def test_weights_that_are_being_written_are_gone(images: Images) -> None:
    offers = [publish(images, v, constant(v)) for v in range(2)]
    seen: list[type[WeightsError]] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield "t0", torch.zeros(4)
        for offer in offers:
            try:
                stage(offer)
            except WeightsError as error:
                seen.append(type(error))
        yield "t1", torch.zeros(4)

    publish(images, 2, source())
    assert seen == [WeightsGone]  # the other offer's segment is the newest and untouched


def test_a_write_that_failed_leaves_no_version_behind(images: Images) -> None:
    kept = publish(images, 0, constant(0))
    with pytest.raises(WeightsError, match="t0 comes twice"):
        publish(images, 1, [*constant(1), *constant(1)])
    assert stage(kept)["t0"].tolist() == [0, 0, 0, 0]
    after = publish(images, 1, constant(1))
    assert stage(after)["t0"].tolist() == [1, 1, 1, 1]
    assert len(images.segments) == 2


def corrupt_second_tensor(offer: dict[str, Any]) -> None:
    with open(offer["path"], "r+b") as file:
        file.seek(DATA_START + offer["manifest"]["tensors"][1]["offset"])
        file.write(b"\x01")


def test_a_corrupt_byte_is_an_error_that_names_the_tensor(images: Images) -> None:
    offer = publish(images, 0, constant(0))
    corrupt_second_tensor(offer)
    with pytest.raises(WeightsError, match=r"1 of 3 tensors differ: t1 \(expected xxh3 \w+, found \w+\)") as caught:
        stage(offer)
    assert not isinstance(caught.value, WeightsGone)


def test_without_the_checksums_a_corrupt_tensor_would_be_served(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "compare", lambda *_, **__: None)
    offer = publish(images, 0, constant(0))
    corrupt_second_tensor(offer)
    assert stage(offer)["t1"].tolist() != [0, 0, 0, 0]


def test_a_truncated_segment_is_an_error_that_names_the_tensor(images: Images) -> None:
    offer = publish(images, 0, constant(0))
    os.truncate(offer["path"], DATA_START + offer["manifest"]["tensors"][2]["offset"] + 4)
    with pytest.raises(WeightsError, match="12 bytes before the end of t2"):
        stage(offer)


def overwrite_while_reading(images: Images, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An offer whose segment's turn comes between the copy of its first tensor and that of its second."""
    offer = publish(images, 0, constant(0))
    take, takes = shm._take, iter(range(3))

    def overwritten(*arguments: Any) -> str:
        if next(takes) == 1:
            publish(images, 1, constant(1))
            publish(images, 2, constant(2))
        return take(*arguments)

    monkeypatch.setattr(shm, "_take", overwritten)
    return offer


@pytest.fixture
def no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "read_lock", lambda _: os.open("/dev/null", os.O_RDONLY))


def test_a_reader_is_not_overwritten(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = overwrite_while_reading(images, monkeypatch)
    assert {float(tensor[0]) for tensor in stage(offer).values()} == {0.0}
    assert len(images.segments) == 3


def test_without_the_lock_weights_overwritten_during_the_copy_are_gone(
    images: Images, monkeypatch: pytest.MonkeyPatch, no_lock: None
) -> None:
    offer = overwrite_while_reading(images, monkeypatch)
    with pytest.raises(WeightsGone):
        stage(offer)


def test_without_lock_and_sequence_number_the_checksums_still_refuse_a_mixture(
    images: Images, monkeypatch: pytest.MonkeyPatch, no_lock: None
) -> None:
    monkeypatch.setattr(shm, "check_header", lambda *_: None)
    offer = overwrite_while_reading(images, monkeypatch)
    with pytest.raises(WeightsError, match="2 of 3 tensors differ: t1"):
        stage(offer)


def test_without_all_three_a_mixture_would_be_served(
    images: Images, monkeypatch: pytest.MonkeyPatch, no_lock: None
) -> None:
    monkeypatch.setattr(shm, "check_header", lambda *_: None)
    monkeypatch.setattr(shm, "compare", lambda *_, **__: None)
    offer = overwrite_while_reading(images, monkeypatch)
    assert {float(tensor[0]) for tensor in stage(offer).values()} == {0.0, 2.0}


def test_removed_weights_are_gone(images: Images) -> None:
    offer = publish(images, 0, constant(0))
    images.close()
    with pytest.raises(WeightsGone, match="removed"):
        stage(offer)
    with pytest.raises(WeightsError, match=r"weights \(1, 1\) published after close"):
        publish(images, 1, constant(1))


def test_weights_on_another_host_are_an_error_that_says_so(images: Images) -> None:
    offer = publish(images, 0, constant(0))
    images.close()
    with pytest.raises(WeightsError, match="on host elsewhere") as caught:
        stage({**offer, "host": "elsewhere"})
    assert not isinstance(caught.value, WeightsGone)


def test_a_deadline_names_how_far_the_copy_came(images: Images) -> None:
    offer = publish(images, 0, constant(0))
    with pytest.raises(WeightsError, match=r"0 of 3 tensors read within 0 s, t0 is next"):
        ShmReceiver().stage(offer, deadline_s=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [5]}, r"t0 is float32\[5\] and cannot have 16 bytes"),
        ({"shape": [-2, -2]}, "cannot have 16 bytes"),
        ({"dtype": "float64"}, "cannot have 16 bytes"),
        ({"dtype": "float3"}, "t0 has type 'float3'"),
        ({"name": "t1"}, "names a tensor twice"),
        ({"checksum": "0" * 16}, "combined checksum"),
        ({"offset": "4096"}, "no offer of transport shm"),
    ],
)
def test_a_offer_that_contradicts_itself_is_refused(images: Images, change: dict[str, Any], message: str) -> None:
    offer = publish(images, 0, constant(0))
    offer = json.loads(json.dumps(offer))
    offer["manifest"]["tensors"][0].update(change)
    with pytest.raises(WeightsError, match=message):
        stage(offer)


def test_keys_that_others_add_to_the_offer_are_ignored(images: Images) -> None:
    offer = publish(images, 0, constant(1))
    assert stage({**offer, "fork": {"parent": 0, "version": 0}})["t0"].tolist() == [1, 1, 1, 1]


def test_another_format_is_refused(images: Images) -> None:
    offer = publish(images, 0, constant(0))
    offer["manifest"]["format"] += 1
    with pytest.raises(WeightsError, match="must run the same version of asyncrl"):
        stage(offer)


def test_a_file_that_is_no_segment_is_refused(images: Images, tmp_path: Path) -> None:
    offer = publish(images, 0, constant(0))
    other = tmp_path / "other"
    other.write_bytes(b"something else entirely" * 1000)
    Path(f"{other}.readers").touch()
    with pytest.raises(WeightsError, match="no segment of format 2"):
        stage({**offer, "path": str(other)})


def test_only_the_user_may_read_a_segment(images: Images) -> None:
    offer = publish(images, 0, constant(0))
    assert stat.S_IMODE(os.stat(offer["path"]).st_mode) == 0o600


def test_a_sweep_leaves_living_owners_and_all_other_files_alone(images: Images, tmp_path: Path) -> None:
    publish(images, 0, constant(0))
    notes = tmp_path / "asyncrl-notes"
    lookalike = tmp_path / "asyncrl-00000000-1-00000000"
    notes.write_text("mine")
    lookalike.write_text("mine too, whatever its name")
    assert segments.sweep(tmp_path) == []
    assert notes.exists()
    assert lookalike.exists()


@pytest.mark.parametrize("left", ["", ".readers"])
def test_half_of_a_dead_owners_segment_is_swept_as_well(images: Images, tmp_path: Path, left: str) -> None:
    living = publish(images, 0, constant(4))
    half = tmp_path / f"asyncrl-00000000-1-00000000{left}"
    half.touch()
    segments.sweep(tmp_path)
    assert not half.exists()
    assert stage(living)["t0"].tolist() == [4, 4, 4, 4]


def test_the_receiver_is_chosen_by_the_offer() -> None:
    images = Images("test")
    try:
        offer = publish(images, 0, constant(3))
        assert Path(offer["path"]).parent == segments.segment_folder()
        staged = build.receiver(offer).stage(offer, deadline_s=10)
        assert staged.tensors["t0"].tolist() == [3, 3, 3, 3]
    finally:
        images.close()
    assert not Path(offer["path"]).exists()
    with pytest.raises(WeightsError, match="published over 'none'"):
        build.receiver({"transport": "none"})
