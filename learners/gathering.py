"""Sharded parameters on their way into rank 0's image, in buckets: nobody ever holds a whole tensor.

FSDP2 cuts each parameter along its first dimension, so that a rank's part is one stretch of the parameter's elements in
row-major order. All parameters one after the other are a stream, which is cut into buckets of `BUCKET_BYTES`; of each
bucket every rank sends its stretches as one message, in the type that engines compute in. While rank 0 writes a bucket,
the next one arrives: it holds two of them beside the image, the others one or two as they send.

All ranks compute the same plan (`buckets`) from sizes that all of them know, so nothing is negotiated; each checks that
its own part has the size that the plan says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from asyncrl.learners.lora import in_dtype
from asyncrl.weights.manifest import Pieces

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BUCKET_BYTES = 64 << 20
"""Long enough that a message's fixed cost does not count: 6 ms at 10 GB/s. Two are little beside any model that needs
several ranks."""


class Stretch(NamedTuple):
    """Elements of one parameter that one rank holds: `start` to `stop` of that rank's own part."""

    parameter: int
    rank: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def part_sizes(shape: Sequence[int], ranks: int) -> list[int]:
    """Elements each rank holds of a parameter that is cut along its first dimension, as torch.chunk does.

    >>> part_sizes((5, 4), 2), part_sizes((2, 3), 4), part_sizes((0, 3), 2)
    ([12, 8], [3, 3, 0, 0], [0, 0])
    """
    rows = -(-shape[0] // ranks)
    row = torch.Size(shape[1:]).numel()
    return [max(0, min(shape[0], (rank + 1) * rows) - rank * rows) * row for rank in range(ranks)]


def buckets(sizes: Sequence[Sequence[int]], limit: int) -> Iterator[list[Stretch]]:
    """The stream of all parameters in buckets of at most `limit` elements, each full but the last.

    sizes[parameter][rank]: elements. Ranks follow each other within a parameter, as its elements do.

    >>> [[tuple(stretch) for stretch in bucket] for bucket in buckets([[3, 2], [2, 0]], 4)]
    [[(0, 0, 0, 3), (0, 1, 0, 1)], [(0, 1, 1, 2), (1, 0, 0, 2)]]
    """
    bucket: list[Stretch] = []
    room = limit
    for parameter, parts in enumerate(sizes):
        for rank, size in enumerate(parts):
            start = 0
            while start < size:
                stop = min(size, start + room)
                bucket.append(Stretch(parameter, rank, start, stop))
                room -= stop - start
                start = stop
                if room == 0:
                    yield bucket
                    bucket, room = [], limit
    if bucket:
        yield bucket


class Gathering:
    """One publication's parameters, seen from one rank. `rank`, `size`: of the process group of training."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, *, rank: int, size: int) -> None:
        """The trained parameters of `model`, which is sharded by FSDP2, in the order of its names."""
        self._rank, self._dtype = rank, dtype
        self._named = [(name, p.detach()) for name, p in model.named_parameters() if p.requires_grad]
        self._own: list[Tensor] = []  # this rank's part of each parameter, flat
        self._sizes: list[list[int]] = []
        for name, parameter in self._named:
            own, sizes = _cut(parameter, size)
            if own.numel() != sizes[rank] and sizes[rank]:
                raise RuntimeError(
                    f"rank {rank} holds {own.numel()} elements of {name} {tuple(parameter.shape)}, not {sizes[rank]}: "
                    "it is not cut along its first dimension"
                )
            self._own.append(own)
            self._sizes.append(sizes)

    def send(self) -> None:
        """As another rank than 0: hand over this rank's stretches. Raises RuntimeError where rank 0 is gone."""
        from torch import distributed as dist

        before: tuple[Any, Tensor] | None = None
        for bucket in self._buckets():
            mine = [stretch for stretch in bucket if stretch.rank == self._rank]
            if not mine:
                continue
            message = self._buffer(mine)
            at = 0
            for stretch in mine:
                message[at : at + stretch.length].copy_(self._stretch(stretch))
                at += stretch.length
            sending = dist.isend(message, dst=0)
            if before is not None:
                before[0].wait()
            before = (sending, message)
        if before is not None:
            before[0].wait()

    def receive(self) -> Iterator[tuple[str, Pieces]]:
        """As rank 0: each parameter by its name. Its pieces must be consumed before the next one is asked for. Raises
        RuntimeError where another rank is gone."""
        stream = self._arriving()
        for n, (name, parameter) in enumerate(self._named):
            yield name, Pieces(self._dtype, tuple(parameter.shape), _first(stream, sum(self._sizes[n])))

    def _arriving(self) -> Iterator[Tensor]:
        """All stretches in order, flat. Each is good until the next one is asked for."""
        ahead = None
        for bucket in self._buckets():
            following = (bucket, self._post(bucket))
            if ahead is not None:
                yield from self._landed(*ahead)
            ahead = following
        if ahead is not None:
            yield from self._landed(*ahead)

    def _post(self, bucket: list[Stretch]) -> dict[int, tuple[Any, Tensor]]:
        """Begin to receive what the other ranks send of a bucket."""
        from torch import distributed as dist

        posted = {}
        for rank in sorted({stretch.rank for stretch in bucket} - {0}):
            message = self._buffer([stretch for stretch in bucket if stretch.rank == rank])
            posted[rank] = (dist.irecv(message, src=rank), message)
        return posted

    def _landed(self, bucket: list[Stretch], posted: dict[int, tuple[Any, Tensor]]) -> Iterator[Tensor]:
        taken = dict.fromkeys(posted, 0)
        for receiving, _ in posted.values():
            receiving.wait()
        for stretch in bucket:
            if stretch.rank == 0:
                yield self._stretch(stretch).to(self._dtype)
            else:
                at = taken[stretch.rank]
                taken[stretch.rank] += stretch.length
                yield posted[stretch.rank][1][at : at + stretch.length]

    def _buckets(self) -> Iterator[list[Stretch]]:
        return buckets(self._sizes, BUCKET_BYTES // self._dtype.itemsize)

    def _stretch(self, stretch: Stretch) -> Tensor:
        """This rank's own elements, as they are trained."""
        return self._own[stretch.parameter][stretch.start : stretch.stop]

    def _buffer(self, stretches: list[Stretch]) -> Tensor:
        return buffer(sum(stretch.length for stretch in stretches), self._dtype, self._own[0].device)


def buffer(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for one message: all that a gathering holds is made here."""
    return torch.empty(length, dtype=dtype, device=device)


def merged(
    served: Iterable[tuple[str, Tensor]], arriving: Iterator[tuple[str, Pieces]], dtype: str
) -> Iterator[tuple[str, Tensor | Pieces]]:
    """`served`, all that engines are given in its order, with what has been trained as it arrives."""
    ahead = next(arriving, None)
    for name, tensor in served:
        if ahead is None or ahead[0] != name:
            yield from in_dtype([(name, tensor)], dtype)
        else:
            yield ahead
            ahead = next(arriving, None)
    if ahead is not None:
        raise RuntimeError(f"{ahead[0]} is trained, but not among what is served, or in another order")


def _cut(parameter: Tensor, ranks: int) -> tuple[Tensor, list[int]]:
    """What this rank holds of a parameter, flat, and how many elements each takes part with. What is not sharded every
    rank has: rank 0 takes its own."""
    from torch.distributed.tensor import DTensor

    if isinstance(parameter, DTensor):
        return parameter.to_local().reshape(-1), part_sizes(parameter.shape, ranks)
    return parameter.reshape(-1), [parameter.numel()] + [0] * (ranks - 1)


def _first(stream: Iterator[Tensor], count: int) -> Iterator[Tensor]:
    """Stretches of `stream` until there are `count` elements. Stretches never reach beyond a parameter."""
    while count > 0:
        part = next(stream)
        count -= part.numel()
        yield part
        del part  # nothing of a bucket is held while one after the next begins to arrive
