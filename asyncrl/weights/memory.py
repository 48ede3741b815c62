"""Mapped memory that knows when nobody uses it any more."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np
from numpy.typing import NDArray


class Memory:
    """A mapping as arrays and tensors see it. When the last of them is gone, and this object, `gone` is called once.

    That holds for every tensor made of `bytes()`, however it was sliced, viewed or passed on: nobody has to say that he
    is done, and nobody can say so too early.
    """

    def __init__(self, mapped: mmap.mmap, *, gone: Callable[[], object]) -> None:
        """`mapped` is not closed or resized by anybody, but lives as long as this object."""
        view = np.frombuffer(mapped, np.uint8)
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": view.shape,
            # "not read-only", also of a mapping that is: torch has no read-only tensors and would warn of it. A store
            # into one ends the process, which is better than to serve something else in silence.
            "data": (view.ctypes.data, False),
        }
        self._mapped = mapped
        weakref.finalize(self, gone)

    def bytes(self) -> NDArray[np.uint8]:
        """uint8 [size], not copied."""
        return np.asarray(self)


class Spare:
    """Private memory for one version at a time, used again when the last of its tensors is gone: a page costs more to
    map than to copy."""

    def __init__(self) -> None:
        self._free: mmap.mmap | None = None

    def take(self, size: int) -> Memory:
        """Memory for `size` bytes, undefined: the one kept from before, if it is free and its size is right."""
        memory, self._free = self._free, None
        if memory is None or len(memory) != max(size, 1):
            memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without them
                    memory.madvise(mmap.MADV_HUGEPAGE)  # the first copy then takes a third of the time
        return Memory(memory, gone=partial(setattr, self, "_free", memory))

    def drop(self) -> None:
        """Keep nothing that is free."""
        self._free = None


def borrowed(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same memory under another flag: torch has no read-only tensors, and warns of arrays that are. Not to be
    written to."""
    interface = {**data.__array_interface__, "data": (data.__array_interface__["data"][0], False)}
    return np.asarray(type("Borrowed", (), {"__array_interface__": interface, "owner": data})())
