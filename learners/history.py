"""The last versions of what a rank trains, each to be had again bit for bit: what sampled a token can be asked again.

A token is of some version v, at most max_trajectory_age behind the learner. To tell what the engine computed
differently from what training has changed since, the learner needs its own log-prob of that token under v
(`proximal.py`), so it keeps those versions: in the type that engines are served, for that is what they sampled from.

The newest version is whole. An older tensor is kept as the difference to the version after it, a *reverse* delta: where
it was another, and what it was there. That is lossless, whatever the numbers, and small where few elements change: an
update of 1e-6 moves one bfloat16 in a hundred. Where most change, as in float32, the tensor is kept whole instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.learners.parallel import ALONE, Ranks

SMALL = 64 * 1024
"""Bytes. Tensors up to this size, biases and norms, are kept whole: not worth looking."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers to compare floats by: NaN is then equal to itself, and -0.0 is not 0.0."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A tensor, told by the version after it: where it was another, places int32 or int64 [n] in the flat tensor, and
    what it was there, values [n]."""

    places: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.places.nbytes + self.values.nbytes


Kept = Tensor | Changed


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
        self._model = model
        # The objects: a sharded model that has gathered its weights shows others in their place.
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._keep = keep
        self._dtype = dtype
        self._ranks = ranks
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
        return sum(kept.nbytes for tensors in self._versions.values() for kept in tensors)

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

        Newest first is cheapest: each version is then made from the one before it. Only while the model's weights are
        those of the newest version, between two steps. The function raises KeyError for a version that is not held.
        """
        own = [
            kept if isinstance(kept, Tensor) and kept.dtype == live.dtype else live.to("cpu", copy=True)
            for kept, live in zip(self._versions[self.versions[0]], self._live(), strict=True)
        ]
        loaded: int | None = None

        def load(version: int) -> None:
            nonlocal loaded
            with torch.no_grad():
                for index, live in enumerate(self._live()):
                    self._load(index, live, version, loaded)
            loaded = version
            self._ranks.refresh(self._model)

        try:
            yield load
        finally:
            with torch.no_grad():
                for live, tensor in zip(self._live(), own, strict=True):
                    live.copy_(tensor)
            self._ranks.refresh(self._model)

    def _load(self, index: int, live: Tensor, version: int, loaded: int | None) -> None:
        """Write tensor `index` of `version` into `live`, which holds that of version `loaded`, unless it is None."""
        deltas: list[Changed] = []
        at = version
        while at != loaded:
            kept = self._versions[at][index]
            if isinstance(kept, Tensor):
                live.copy_(kept)
                break
            deltas.append(kept)
            at += 1  # the newest is whole: this ends
        for delta in reversed(deltas):
            live.view(-1)[delta.places.to(live.device)] = delta.values.to(live)

    def _live(self) -> Iterator[Tensor]:
        return (self._ranks.own(parameter).detach() for parameter in self._parameters)

    def _now(self) -> list[Kept]:
        return [live.to("cpu", self._dtype or live.dtype, copy=True) for live in self._live()]

    def _smallest(self, old: Kept, new: Kept) -> Kept:
        """`old` as the difference to `new`, or whole if that is not larger."""
        assert isinstance(old, Tensor)
        assert isinstance(new, Tensor)
        if old.nbytes <= self._small:
            return old
        bits = _BITS[old.element_size()]
        places = (old.view(-1).view(bits) != new.view(-1).view(bits)).nonzero().squeeze(1)
        if old.numel() < 2**31:
            places = places.int()
        delta = Changed(places, old.view(-1)[places])
        return delta if delta.nbytes < old.nbytes else old
