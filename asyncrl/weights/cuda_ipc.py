"""Transport `cuda-ipc`: learner and collector compute on one GPU, and a version goes through that GPU's memory.

The learner's sender copies an image into a buffer on the GPU and announces the handle by which other processes open
that memory; a collector copies device to device, which takes milliseconds per gigabyte, and serves from its copy. Two
buffers take turns, so that one can be read while the other is written. Nobody waits for a reader: as in a segment
(`image.py`) a header says which version a buffer holds, and one that was overwritten meanwhile is `WeightsGone`.

Handles are those of torch's own sharing of tensors between processes (`UntypedStorage._share_cuda_`), with one
difference: a buffer is shared once and opened by any number of collectors, so that torch's count of its readers says
nothing. It only decides when the memory is given back, which is when the learner ends.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from asyncrl.staleness import Weights
from asyncrl.weights.base import Recipient, StagedWeights, Transport, WeightsError, WeightsGone
from asyncrl.weights.delta_codec import Bytes
from asyncrl.weights.file import Clock
from asyncrl.weights.image import Image
from asyncrl.weights.manifest import compare, tensors_in
from asyncrl.weights.memory import Spare, borrowed
from asyncrl.weights.newest_sender import NewestSender
from asyncrl.weights.offers import ManifestOffer, parse_manifest_offer
from asyncrl.weights.reach import device_named, device_of
from asyncrl.weights.stored import hashed

DATA_START = 4096
"""Bytes. A buffer begins with its header, int64 [3]: sequence (odd while it is written), lineage, version."""

BUFFERS = 2


class Handle(msgspec.Struct, frozen=True):
    """What `UntypedStorage._share_cuda_` returns and `_new_shared_cuda` takes, but for the device's index, which each
    process has its own of."""

    memory: bytes
    size: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_needed: bool


class CudaIpcOffer(ManifestOffer, frozen=True, kw_only=True):
    """What a receiver needs to open one version's buffer."""

    transport: str = "cuda-ipc"
    device: str  # the GPU's UUID
    sequence: int
    handle: str  # `Handle` as msgpack, base64

    def __str__(self) -> str:
        return f"weights {tuple(self.weights)} on GPU {self.device}"


class Buffer:
    """The learner's memory on the GPU for one version at a time."""

    def __init__(self, size: int, device: torch.device) -> None:
        """size: of an image, bytes."""
        self.size = size
        self._stream = _stream(device)  # training goes on beside it
        self._memory = torch.zeros(DATA_START + size, dtype=torch.uint8, device=device)
        torch.cuda.current_stream(device).synchronize()
        self._sequence = 0
        _, *shared = self._memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        self.handle = encoded(Handle(*shared))

    def write(self, weights: Weights, data: torch.Tensor) -> int:
        """Fill it with `data`, uint8 [size] on the CPU. Returns the header's sequence number once all is there."""
        with torch.cuda.stream(self._stream):
            self._head(self._sequence + 1, weights)
            self._memory[DATA_START:].copy_(data)
            self._head(self._sequence + 2, weights)
        self._sequence += 2
        return self._sequence

    def _head(self, sequence: int, weights: Weights) -> None:
        """Returns once it and all before it is there: what follows must not be seen before it."""
        header = torch.tensor([sequence, *weights], dtype=torch.int64).view(torch.uint8)
        self._memory[: len(header)].copy_(header)
        self._stream.synchronize()


class CudaIpcSender(NewestSender):
    """The learner's side."""

    transport: Transport = "cuda-ipc"

    def __init__(self, *, device: str, deadline_s: float, changed: Callable[[], None]) -> None:
        """device: the GPU's UUID, as in the learner's `Place`. Raises WeightsError: it cannot be used here."""
        self._uuid = device
        self._device = own_gpu(device)
        self._buffers: list[Buffer] = []
        super().__init__(f"GPU {device}", deadline_s=deadline_s, changed=changed)

    def _publish(self, image: Image, data: Bytes, recipients: Sequence[Recipient]) -> CudaIpcOffer:
        try:
            buffer = self._free(image.nbytes)
            sequence = buffer.write(image.weights, torch.from_numpy(borrowed(data)))
        except RuntimeError as error:  # torch's own, out of memory among them
            raise WeightsError(
                f"{BUFFERS} versions of {image.nbytes} bytes must fit beside the model: {error}"
            ) from error
        self._bytes += image.nbytes
        return CudaIpcOffer(
            lineage=image.weights.lineage,
            version=image.weights.version,
            device=self._uuid,
            sequence=sequence,
            handle=buffer.handle,
            manifest=image.manifest,
        )

    def _free(self, size: int) -> Buffer:
        """The buffer that was written longest ago; another one if there are too few, or it is of another size."""
        if len(self._buffers) < BUFFERS:
            buffer = Buffer(size, self._device)
        else:
            buffer = self._buffers.pop(0)
            if buffer.size != size:
                buffer = Buffer(size, self._device)
        self._buffers.append(buffer)
        return buffer


class CudaIpcReceiver:
    """The collector's side. Keeps the learner's buffers open from call to call."""

    def __init__(self) -> None:
        self._open: dict[str, torch.UntypedStorage] = {}  # by handle
        self._spare = Spare()

    def stage(self, offer: Mapping[str, Any], *, deadline_s: float, verify: bool = True) -> StagedWeights:
        """A copy on the GPU, which no engine has to copy again. To be verified it is copied to the CPU once.

        Raises WeightsGone (overwritten), WeightsLate, WeightsError (another GPU, or what came is not what the manifest
        says).
        """
        expected = parse(offer)
        manifest, clock = expected.manifest, Clock(deadline_s)
        device = own_gpu(expected.device)
        try:
            with torch.cuda.stream(_stream(device)):  # decoding goes on beside it
                shared = self._buffer(expected, device)
                check_header(shared, expected)
                copy = torch.empty(manifest.size, dtype=torch.uint8, device=device)
                copy.copy_(shared[DATA_START : DATA_START + manifest.size])
                check_header(shared, expected)  # comes after the copy, and waits for itself
            copy.record_stream(torch.cuda.default_stream(device))  # the engine's: its reads come before new use
            clock.check(f"the checksums of {expected}")
            if verify and manifest.checksum:
                host = self._spare.take(manifest.size).bytes()[: manifest.size]
                torch.from_numpy(host).copy_(copy)
                compare(manifest, hashed(manifest.tensors, host), where=str(expected))
        except WeightsError:
            raise
        except RuntimeError as error:  # torch's own
            raise WeightsError(f"{expected}: {error}. Has the learner ended?") from error
        # Nobody writes to the copy, so the engine may serve from it.
        tensors = tensors_in(copy, manifest)
        return StagedWeights(
            expected.weights, tensors, manifest.tied, manifest.served, mapped=True, adapter=manifest.adapter
        )

    def close(self) -> None:
        """What has been staged stays good."""
        self._open.clear()
        self._spare.drop()

    def _buffer(self, expected: CudaIpcOffer, device: torch.device) -> torch.Tensor:
        """The learner's memory, uint8. Opening it takes a while, so the last ones stay open."""
        storage = self._open.pop(expected.handle, None)
        if storage is None:
            storage = torch.UntypedStorage._new_shared_cuda(device.index, *msgspec.structs.astuple(decoded(expected)))
        self._open = dict([*self._open.items(), (expected.handle, storage)][-BUFFERS:])
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def encoded(handle: Handle) -> str:
    """As text, for a document."""
    return base64.b64encode(msgspec.msgpack.encode(handle)).decode()


def decoded(offer: CudaIpcOffer) -> Handle:
    """Its handle. Raises WeightsError."""
    try:
        return msgspec.msgpack.decode(base64.b64decode(offer.handle, validate=True), type=Handle)
    except (ValueError, msgspec.DecodeError) as error:
        raise WeightsError(f"{offer}: its handle is damaged: {error}") from error


def parse(offer: Mapping[str, Any]) -> CudaIpcOffer:
    """The announced offer, checked in itself. Raises WeightsError."""
    return parse_manifest_offer(offer, CudaIpcOffer, "cuda-ipc")


def own_gpu(uuid: str) -> torch.device:
    """This process's device of that UUID. Raises WeightsError, saying what is missing."""
    if not torch.cuda.is_available():
        why = "this build of torch has no CUDA" if torch.version.cuda is None else "torch finds no GPU here"
        raise WeightsError(
            f"weights.transport cuda-ipc needs learner and collector on one GPU, and {why}. Leave weights.transport at "
            "auto, which takes it where it can"
        )
    if (device := device_named(uuid)) is not None:
        return device
    seen = ", ".join(device_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count()))
    raise WeightsError(f"weights.transport cuda-ipc: the learner's GPU is {uuid}, this process sees {seen}")


def check_header(shared: torch.Tensor, expected: CudaIpcOffer) -> None:
    """Raises WeightsGone unless the buffer holds exactly this version, completely written."""
    header = shared[:24].cpu().view(torch.int64).tolist()
    if header != [expected.sequence, *expected.weights]:
        raise WeightsGone(f"{expected}: the buffer holds, or gets, another version by now")


def _stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
