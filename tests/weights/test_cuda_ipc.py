"""Transport cuda-ipc, as far as it goes without a GPU: offers, refusals, which buffer is written, tensors anywhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from asyncrl.config.weights import WeightsConfig
from asyncrl.staleness import Weights
from asyncrl.weights import cuda_ipc
from asyncrl.weights.base import Recipient, WeightsError, WeightsGone
from asyncrl.weights.build import receiver, sender
from asyncrl.weights.cuda_ipc import (
    BUFFERS,
    CudaIpcOffer,
    CudaIpcReceiver,
    CudaIpcSender,
    Handle,
    check_header,
    decoded,
    encoded,
    parse,
)
from asyncrl.weights.image import Image, Images
from asyncrl.weights.manifest import tensor_bytes, tensors_in
from asyncrl.weights.reach import Place, choose

GPU = "5f3c9c9e-1111-2222-3333-444455556666"
HANDLE = Handle(b"\x00memory\xff", 4096, 512, b"/torch_1_2", 3, b"event", True)


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Images]:
    images = Images("test", folder=tmp_path)
    yield images
    images.close()


def image_of(images: Images, version: int) -> Image:
    tensors = [("a", torch.arange(1000.0) + version), ("none", torch.empty(0)), ("b", torch.ones(3).bfloat16())]
    return images.write(Weights(1, version), tensors, tied={})


def offer_of(image: Image, **changed: Any) -> dict[str, Any]:
    offer = CudaIpcOffer(
        lineage=1,
        version=image.weights.version,
        device=GPU,
        sequence=2,
        handle=encoded(HANDLE),
        manifest=image.manifest,
    )
    return {**msgspec.to_builtins(offer), **changed}


def test_an_offer_comes_through_a_document_with_its_handle(images: Images) -> None:
    sent = offer_of(image_of(images, 3))
    found = parse(msgspec.json.decode(msgspec.json.encode(sent)))
    assert decoded(found) == HANDLE
    assert found.weights == Weights(1, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transport": "shm"}, "no offer of transport cuda-ipc, but of 'shm'"),
        ({"sequence": "soon"}, "no offer of transport cuda-ipc: Expected `int`"),
        ({"manifest": {"tensors": [], "tied": {}, "checksum": "00"}}, "combined checksum 00 announced"),
    ],
)
def test_an_offer_that_contradicts_itself_is_refused(images: Images, change: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        parse(offer_of(image_of(images, 0), **change))


@pytest.mark.parametrize("handle", ["", "%%%", "YQ=="])
def test_a_damaged_handle_is_refused(images: Images, handle: str) -> None:
    with pytest.raises(WeightsError, match="its handle is damaged"):
        decoded(parse(offer_of(image_of(images, 0), handle=handle)))


def test_without_a_gpu_both_sides_say_what_is_missing(images: Images) -> None:
    offer = offer_of(image_of(images, 0))
    for use in (
        lambda: sender("cuda-ipc", WeightsConfig(transport="cuda-ipc"), run="r", changed=lambda: None),
        lambda: receiver(offer).stage(offer, deadline_s=1),
    ):
        with pytest.raises(WeightsError, match=r"needs learner and collector on one GPU, and .*transport at auto"):
            use()


def test_it_is_chosen_where_both_compute_on_the_same_gpu_and_only_there() -> None:
    learner = Place("a", "1", GPU)
    assert choose(learner, learner, "auto").transport == "cuda-ipc"
    assert choose(learner, Place("a", "1", "another"), "auto").transport == "shm"
    assert choose(learner, Place("a", "1", "cpu"), "auto").transport == "shm"
    assert choose(Place("a", "1", "cpu"), Place("a", "1", "cpu"), "auto").transport == "shm"


def test_a_buffer_that_holds_another_version_or_half_of_one_is_gone(images: Images) -> None:
    offer = parse(offer_of(image_of(images, 7)))
    for header, gone in (([2, 1, 7], False), ([3, 1, 7], True), ([4, 1, 9], True), ([0, 0, 0], True)):
        buffer = torch.cat([torch.tensor(header).view(torch.uint8), torch.zeros(10, dtype=torch.uint8)])
        if gone:
            with pytest.raises(WeightsGone, match="another version by now"):
                check_header(buffer, offer)
        else:
            check_header(buffer, offer)


def test_tensors_lie_in_whatever_memory_the_bytes_came_to(images: Images) -> None:
    image = image_of(images, 1)
    image.retain()
    memory = torch.tensor(image.data())
    image.release()
    tensors = tensors_in(memory, image.manifest)
    assert list(tensors) == ["a", "none", "b"]
    assert tensor_bytes("a", tensors["a"]) == tensor_bytes("a", torch.arange(1000.0) + 1)
    assert tensors["a"].untyped_storage().data_ptr() == memory.data_ptr(), "not copied"


class HostBuffer:
    """A double of the learner's memory on the GPU, on the CPU."""

    made = 0

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.sequence = size, 0
        HostBuffer.made += 1
        self.handle = encoded(msgspec.structs.replace(HANDLE, offset=HostBuffer.made))
        self.content = torch.zeros(size, dtype=torch.uint8, device=device)

    def write(self, weights: Weights, data: torch.Tensor) -> int:
        self.content.copy_(data)
        self.sequence += 2
        return self.sequence


def test_two_buffers_take_turns(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "Buffer", HostBuffer)
    monkeypatch.setattr(cuda_ipc, "own_gpu", lambda uuid: torch.device("cpu"))
    told = threading.Event()
    sending = CudaIpcSender(device=GPU, deadline_s=30, changed=told.set)
    found = []
    try:
        for version in range(4):
            image = image_of(images, version)
            sending.serve(image, [Recipient("c", "c-1", None, "cuda-ipc", None)])
            assert told.wait(30)
            told.clear()
            offer = sending.offer()
            assert offer is not None
            assert (offer["version"], offer["device"]) == (version, GPU)
            found.append((offer["handle"], offer["sequence"]))
        assert sending.measured()["bytes"] == 4 * image.nbytes
    finally:
        sending.close()
    first, second = found[0][0], found[1][0]
    assert first != second
    assert found == [(first, 2), (second, 2), (first, 4), (second, 4)]
    assert BUFFERS == 2


def test_closing_a_receiver_that_has_received_nothing_is_fine() -> None:
    CudaIpcReceiver().close()
