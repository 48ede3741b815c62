"""Large memory copied and hashed in one go: chunk by chunk, so that the second of the two passes finds in the core's
cache what the first one loaded. The hash then costs a tenth of the copy, not half."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import xxhash
from numpy.typing import NDArray

CHUNK = 1 << 20
"""Bytes: source and target of one fit in a core's second-level cache. Twice or four times as much is as fast, less is
slower."""

MOST_HELPERS = 3
"""With one thread for every two memory channels or so, a copy is limited by memory and no longer by a core."""


class Copier:
    """Copies as fast as memory goes where cores are idle, and as fast as one thread does where none is."""

    def __init__(self, helpers: int | None = None) -> None:
        """`helpers`: threads beside the caller's; by default one for each further core, MOST_HELPERS at most."""
        self._helpers = threads() - 1 if helpers is None else helpers
        self._pool = ThreadPoolExecutor(max(self._helpers, 1), thread_name_prefix="asyncrl-copy")  # none before its use

    @property
    def threads(self) -> int:
        """How many copy, the caller's included."""
        return 1 + self._helpers

    def copy(self, into: NDArray[np.uint8], source: NDArray[np.uint8], *, hashed: bool) -> str:
        """Copy uint8 [n] and return the xxh3_64 (hex) of the source, "" without. The helpers take chunks from the end;
        the caller hashes all, in order, and copies those that are left: nobody waits for a helper that gets no core."""
        left = deque(range(0, len(source), CHUNK))

        def help() -> None:
            with suppress(IndexError):  # none is left
                while True:
                    _copy_chunk(into, source, left.pop())

        helping = [self._pool.submit(help) for _ in range(min(self._helpers, len(left) - 1))]
        digest = xxhash.xxh3_64()
        for start in range(0, len(source), CHUNK):
            if hashed:
                digest.update(source[start : start + CHUNK].data)
            with suppress(IndexError):  # a helper was faster
                _copy_chunk(into, source, left.popleft())  # `start`: from this end only this thread takes
        for helper in helping:
            if not helper.cancel():
                helper.result()
        return digest.hexdigest() if hashed else ""

    def close(self) -> None:
        """End the helpers."""
        self._pool.shutdown()


def copy_and_hash(into: NDArray[np.uint8], source: NDArray[np.uint8]) -> str:
    """Copy uint8 [n] in this thread, and return the xxh3_64 (hex) of the copy."""
    digest = xxhash.xxh3_64()
    for start in range(0, len(source), CHUNK):
        _copy_chunk(into, source, start)
        digest.update(into[start : start + CHUNK].data)
    return digest.hexdigest()


def _copy_chunk(into: NDArray[np.uint8], source: NDArray[np.uint8], start: int) -> None:
    np.copyto(into[start : start + CHUNK], source[start : start + CHUNK])


def threads() -> int:
    """How many threads copy or hash together: one for each core that this process may use, 1 + MOST_HELPERS at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 1 + MOST_HELPERS)
