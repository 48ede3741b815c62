"""Who may overwrite what: images that senders read, segments that readers hold, in any order and from any thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights, WeightsError, WeightsGone
from asyncrl.weights.copying import CHUNK, Copier, copy
from asyncrl.weights.image import DATA_START, Image, Images
from asyncrl.weights.manifest import combined_checksum
from asyncrl.weights.shm import ShmReceiver, shm_offer


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Images]:
    images = Images("test", folder=tmp_path)
    yield images
    images.close()


def write(images: Images, version: int, size: int = 1000, **options: Any) -> Image:
    source = [("a", torch.full((size,), float(version))), ("b", torch.tensor(version))]
    return images.write(Weights(1, version), source, tied={}, **options)


def intact(image: Image) -> bool:
    data = image.data()
    return all(
        xxhash.xxh3_64_hexdigest(data[spec.offset : spec.offset + spec.nbytes].data) == spec.checksum
        for spec in image.manifest.tensors
    )


def test_what_a_sender_retains_is_not_overwritten(images: Images) -> None:
    image = write(images, 0)
    image.retain()
    for version in range(1, 5):
        write(images, version)
    assert intact(image)
    assert len(images.segments) == 3
    image.release()
    write(images, 5)
    assert len(images.segments) == 2


class Slow(Copier):
    """Its first large tensor is copied once `after` others have begun."""

    def __init__(self, after: int) -> None:
        super().__init__(2)
        self.begun, self.after, self.enough = 0, after, threading.Event()

    def begin(self, into: Any, source: Any, *, hashed: bool) -> Future[str]:
        self.begun += 1
        if self.begun == 1:
            return self._pool.submit(self._late, into, source, hashed=hashed)
        if self.begun > self.after:
            self.enough.set()
        return super().begin(into, source, hashed=hashed)

    def _late(self, into: Any, source: Any, *, hashed: bool) -> str:
        assert self.enough.wait(20), "nothing was begun beside it"
        return copy(into, source, hashed=hashed)


def test_a_large_tensor_does_not_keep_the_other_threads_waiting(images: Images) -> None:
    source = [(f"t{at}", torch.full((CHUNK,), float(at))) for at in range(20)]
    for version in range(3):
        if version == 2:  # segments that have grown are written by threads
            images._copier = Slow(after=12)
        image = images.write(Weights(1, version), source, tied={})
    assert intact(image)
    assert [spec.name for spec in image.manifest.tensors] == [name for name, _ in source]
    assert image.manifest.checksum == combined_checksum(source)


def test_it_stays_until_the_last_of_several_has_released_it(images: Images) -> None:
    image = write(images, 0)
    for _ in range(3):
        image.retain()
    for version in range(1, 4):
        image.release()
        write(images, version)
        assert len(images.segments) == (3 if version < 3 and version > 1 else 2)


def test_an_overwritten_image_cannot_be_retained(images: Images) -> None:
    first, second = write(images, 0), write(images, 1)
    write(images, 2)
    with pytest.raises(WeightsGone):
        first.retain()
    second.retain()
    assert intact(second)


def test_an_image_cannot_be_retained_while_its_segment_is_written(images: Images) -> None:
    first = write(images, 0)
    write(images, 1)
    seen: list[type[BaseException]] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        try:
            first.retain()
        except WeightsGone as error:
            seen.append(type(error))
        yield "a", torch.zeros(3)

    images.write(Weights(1, 2), source(), tied={})
    assert seen == [WeightsGone]


def test_after_close_what_was_mapped_stays_and_nothing_else_can_be_had(images: Images) -> None:
    image = write(images, 7)
    image.retain()
    data = image.data()
    images.close()
    assert data[:4000].view("float32").tolist() == [7.0] * 1000
    with pytest.raises(WeightsGone, match="removed"):
        image.data()
    with pytest.raises(WeightsGone, match="removed"):
        image.retain()
    image.release()


def test_what_a_sender_reads_cannot_be_written_to(images: Images) -> None:
    image = write(images, 0)
    image.retain()
    with pytest.raises(ValueError, match="read-only"):
        image.data()[0] = 1


def test_senders_in_many_threads_lose_no_count(images: Images) -> None:
    image = write(images, 0)

    def retain_and_release() -> None:
        for _ in range(5_000):
            image.retain()
            image.release()

    threads = [threading.Thread(target=retain_and_release) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for version in range(1, 4):
        write(images, version)
    assert len(images.segments) == 2


def test_a_segment_that_has_grown_is_read_whole(images: Images) -> None:
    for version, size in enumerate((10, 20, 5_000, 30, 100_000, 7)):
        image = write(images, version, size)
        image.retain()
        assert intact(image)
        image.release()
        assert ShmReceiver().stage(shm_offer(image), deadline_s=10).tensors["a"].tolist() == [version] * size


@pytest.mark.parametrize("mapped", [True, False])
def test_receivers_follow_segments_that_grow(images: Images, mapped: bool) -> None:
    receiver = ShmReceiver(mapped=mapped)
    for version, size in enumerate((10, 20, 5_000, 30, 100_000, 7)):
        staged = receiver.stage(shm_offer(write(images, version, size)), deadline_s=10)
        assert staged.tensors["a"].tolist() == [version] * size


def test_tensors_that_are_not_laid_out_in_rows_arrive_also_where_they_overwrite(images: Images) -> None:
    turned = torch.arange(12.0).reshape(3, 4).T
    for version in range(4):
        image = images.write(Weights(1, version), [("a", turned + version)], tied={})
        assert ShmReceiver().stage(shm_offer(image), deadline_s=10).tensors["a"].equal(turned + version)
        image = images.write(Weights(1, version), [("a", turned[::2] + version)], tied={}, hashed=False)
        assert ShmReceiver().stage(shm_offer(image), deadline_s=10).tensors["a"].equal(turned[::2] + version)


def test_a_model_in_training_can_be_published_as_it_is(images: Images) -> None:
    linear = torch.nn.Linear(4, 3)
    for version in range(4):
        image = images.write(Weights(1, version), [("w", linear.weight), ("wT", linear.weight.T)], tied={})
        staged = ShmReceiver().stage(shm_offer(image), deadline_s=10)
        assert not staged.tensors["wT"].requires_grad
        assert torch.equal(staged.tensors["wT"], linear.weight.T)


@pytest.mark.parametrize("mapped", [True, False])
def test_without_checksums_structure_and_version_are_still_checked(images: Images, mapped: bool) -> None:
    image = write(images, 3, hashed=False)
    assert image.manifest.checksum == "" == image.manifest.tensors[0].checksum
    receiver = ShmReceiver(mapped=mapped)
    staged = receiver.stage(shm_offer(image), deadline_s=10)
    assert staged.checksum == ""
    assert staged.tensors["a"].tolist() == [3.0] * 1000
    offer = shm_offer(image)
    write(images, 4)
    del staged
    write(images, 5)
    with pytest.raises(WeightsGone):
        receiver.stage(offer, deadline_s=10)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(("hashed", "verify"), [(True, True), (True, False), (False, True)])
def test_a_flipped_byte_is_refused_exactly_if_there_are_checksums_and_they_are_compared(
    images: Images, mapped: bool, hashed: bool, verify: bool
) -> None:
    image = write(images, 1, hashed=hashed)
    with open(image.path, "r+b") as file:
        file.seek(DATA_START + 17)
        file.write(b"\x55")
    receiver = ShmReceiver(mapped=mapped)
    if hashed and verify:
        with pytest.raises(WeightsError, match=r"1 of 2 tensors differ: a"):
            receiver.stage(shm_offer(image), deadline_s=10, verify=verify)
    else:
        staged = receiver.stage(shm_offer(image), deadline_s=10, verify=verify)
        assert staged.tensors["a"].tolist() != [1.0] * 1000


def test_a_refused_version_is_not_held(images: Images) -> None:
    image = write(images, 1)
    with open(image.path, "r+b") as file:
        file.seek(DATA_START + 17)
        file.write(b"\x55")
    with pytest.raises(WeightsError):
        ShmReceiver(mapped=True).stage(shm_offer(image), deadline_s=10)
    for version in range(2, 5):
        write(images, version)
    assert len(images.segments) == 2


def test_one_tensor_that_is_still_used_holds_its_whole_version(images: Images) -> None:
    staged = ShmReceiver(mapped=True).stage(shm_offer(write(images, 6)), deadline_s=10)
    row = staged.tensors["a"][10:20].view(2, 5)[0]
    del staged
    for version in range(7, 12):
        write(images, version)
    assert row.tolist() == [6.0] * 5
    assert len(images.segments) == 3
    del row
    write(images, 12)
    assert len(images.segments) == 2


def test_nothing_is_left_open(images: Images) -> None:
    receivers = [ShmReceiver(mapped=True), ShmReceiver()]
    for version in range(3):
        offer = shm_offer(write(images, version))
        for receiver in receivers:
            receiver.stage(offer, deadline_s=10)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for version in range(3, 30):
        offer = shm_offer(write(images, version))
        for receiver in receivers:
            receiver.stage(offer, deadline_s=10)
            with pytest.raises(WeightsGone):
                receiver.stage({**offer, "sequence": offer["sequence"] + 2}, deadline_s=10)
            with pytest.raises(WeightsGone):
                receiver.stage({**offer, "path": offer["path"] + "0"}, deadline_s=10)
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after == before


OPERATIONS = ("write", "retain", "release", "map", "unmap")


@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 3)), max_size=40))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_happens_in_whatever_order_what_is_held_stays_as_it_was(
    tmp_path: Path, operations: list[tuple[str, int]]
) -> None:
    images, receiver = Images("any order", folder=tmp_path), ShmReceiver(mapped=True)
    written = [write(images, 0, 50)]
    retained: list[Image] = []
    mapped: list[StagedWeights] = []
    for operation, which in operations:
        if operation == "write":
            written.append(write(images, len(written), 50 + 10 * which, hashed=which != 3))
        elif operation == "retain":
            if take(written[-1 - which % len(written)].retain):
                retained.append(written[-1 - which % len(written)])
        elif operation == "release" and retained:
            retained.pop(which % len(retained)).release()
        elif operation == "map":
            offer = shm_offer(written[-1 - which % len(written)])
            take(lambda offer=offer: mapped.append(receiver.stage(offer, deadline_s=10)))
        elif operation == "unmap" and mapped:
            mapped.pop(which % len(mapped))
        check(retained, mapped)
        assert take(written[-1].retain), "the newest can always be had"
        written[-1].release()
        held = {image.weights for image in retained} | {staged.weights for staged in mapped}
        if operation == "write":
            assert len(images.segments) <= 2 + len(held - {written[-1].weights})
    images.close()


def check(retained: list[Image], mapped: list[StagedWeights]) -> None:
    """In a function of its own: a loop variable would hold the last one mapped."""
    for image in retained:
        assert image.data()[:4].view("float32")[0] == image.weights.version
    for staged in mapped:
        assert set(staged.tensors["a"].tolist()) == {float(staged.weights.version)}
        assert staged.checksum in ("", combined_checksum(staged.tensors.items()))


def take(attempt: Any) -> bool:
    try:
        attempt()
    except WeightsGone:
        return False
    return True
