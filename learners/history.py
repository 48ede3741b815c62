"""The last versions of what a rank trains, each to be had again bit for bit: what sampled a token can be asked again.

A token is of some version v, at most max_trajectory_age behind the learner. To tell what the engine computed
differently from what training has changed since, the learner needs its own log-prob of that token under v
(`proximal.py`), so it keeps those versions: in the type that engines are served, for that is what they sampled from.

The newest version is whole. An older tensor is kept as the difference to the version after it, a *reverse* delta
(`weights/delta_codec.py`): what it was where it was another. That is lossless, whatever the numbers, and small where
few elements change: an update of 1e-6 moves one bfloat16 in a hundred. Where many do, as in float32, it stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.learners.parallel import ALONE, Ranks
from asyncrl.learners.parameters import Parameters
from asyncrl.weights.delta_codec import Bytes, Extent, apply, encode

SMALL = 64 * 1024
"""Bytes. Tensors up to this size, biases and norms, are kept whole: not worth looking."""

Kept = Tensor | bytes
"""A whole tensor, or its difference to the version after it."""


class History:
    """The newest version and the `keep` before it, of the trained parameters of `model` as this rank has them, in host
    memory. Begins with the weights that `model` has, as `version`.

    dtype: what engines are served. None: parameters are kept in their own, which is right for adapters, of which what
    engines are served is made.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        version: int,
        keep: int,
        dtype: torch.dtype | None = None,
        ranks: Ranks = ALONE,
        small: int = SMALL,
    ) -> None:
        self._parameters = Parameters(model, ranks)
        self._keep = keep
        self._dtype = dtype
        self._small = small
        self._versions: dict[int, list[Kept]] = {}
        self.restart(version)

    @property
    def versions(self) -> tuple[int, ...]:
        """Those that are held, without a gap, the newest first; the same on every rank."""
        return tuple(sorted(self._versions, reverse=True))

    @property
    def nbytes(self) -> int:
        """Bytes of host memory, on this rank."""
        return sum(
            len(kept) if isinstance(kept, bytes) else kept.nbytes
            for tensors in self._versions.values()
            for kept in tensors
        )

    def restart(self, version: int) -> None:
        """Forget all, and hold the weights of now as `version`: what led to them is no longer known."""
        self._versions = {version: self._now()}

    def remember(self, version: int) -> None:
        """Hold the weights of now as `version`, the one after the newest; the oldest is dropped when they are too many.

        Called after each step, one that was skipped included. Raises ValueError for another version.
        """
        newest = self.versions[0]
        if version != newest + 1:
            raise ValueError(f"version {version} cannot follow version {newest}: versions are remembered one by one")
        now = self._now()
        self._versions[newest] = [
            self._smallest(old, new) for old, new in zip(self._versions[newest], now, strict=True)
        ]
        self._versions[version] = now
        for old in [held for held in self._versions if held < version - self._keep]:
            del self._versions[old]

    @contextmanager
    def loading(self) -> Iterator[Callable[[int], None]]:
        """A function that gives the model the weights of a version. At the end, come what may, it has its own again.

        Only while the model's weights are those of the newest version, between two steps. The function raises KeyError
        for a version that is not held.
        """
        own = [
            kept if isinstance(kept, Tensor) and kept.dtype == live.dtype else live.to("cpu", copy=True)
            for kept, live in zip(self._versions[self.versions[0]], self._parameters.live(), strict=True)
        ]

        def load(version: int) -> None:
            self._parameters.write(self._whole(version, index) for index in range(len(self._parameters)))

        try:
            yield load
        finally:
            self._parameters.write(own)

    def _whole(self, version: int, index: int) -> Tensor:
        """One tensor of `version`."""
        deltas = []
        while isinstance(kept := self._versions[version][index], bytes):
            deltas.append(kept)
            version += 1  # the newest is whole: this ends
        if not deltas:
            return kept
        whole = kept.clone()
        for delta in reversed(deltas):
            apply(delta, _bytes(whole))
        return whole

    def _now(self) -> list[Kept]:
        return [*self._parameters.copies(self._dtype)]

    def _smallest(self, old: Kept, new: Kept) -> Kept:
        """`old` as the difference to `new`, or whole if that is small or most of it changed."""
        assert isinstance(old, Tensor)
        assert isinstance(new, Tensor)
        if old.nbytes <= self._small:
            return old
        delta = encode(_bytes(new), _bytes(old), [Extent(0, old.nbytes, old.element_size())])
        return old if delta is None else b"".join(delta.parts)


def _bytes(tensor: Tensor) -> Bytes:
    """uint8 [n]: the tensor's own memory."""
    return tensor.view(-1).view(torch.uint8).numpy()
