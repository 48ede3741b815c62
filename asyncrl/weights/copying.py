"""Large memory copied and hashed in one go: chunk by chunk, so that the second of the two passes finds in the core's
cache what the first one loaded. The hash then costs a tenth of the copy, not half. Tensors are copied beside each
other, since the hash of one is a chain that no second thread can shorten."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import xxhash
from numpy.typing import NDArray

CHUNK = 1 << 19
"""Bytes: source and target of one fit in a second-level cache of a megabyte. Half as much and twice as much are
slower."""

MOST_THREADS = 4
"""With one thread for every two memory channels or so, a copy is limited by memory and no longer by a core."""


class Copier:
    """Copies as many tensors at once as there are cores, which is as fast as memory goes."""

    def __init__(self, workers: int | None = None) -> None:
        """`workers`: threads; by default `threads()`."""
        self.workers = threads() if workers is None else workers
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="asyncrl-copy")  # none before its use

    def begin(self, into: NDArray[np.uint8], source: NDArray[np.uint8], *, hashed: bool) -> Future[str]:
        """Copy uint8 [n]; the result is the xxh3_64 (hex) of the copy, "" without. Neither side is to be touched before
        it is there. What is smaller than a chunk is copied at once: a thread would take longer to hear of it."""
        if len(source) >= CHUNK:
            return self._pool.submit(copy, into, source, hashed=hashed)
        done: Future[str] = Future()
        done.set_result(copy(into, source, hashed=hashed))
        return done

    def close(self) -> None:
        """End the threads, with what they have begun."""
        self._pool.shutdown()


def copy(into: NDArray[np.uint8], source: NDArray[np.uint8], *, hashed: bool) -> str:
    """Copy uint8 [n] in this thread, and return the xxh3_64 (hex) of the copy, "" without."""
    if not hashed:
        np.copyto(into, source)
        return ""
    digest = xxhash.xxh3_64()
    for start in range(0, len(source), CHUNK):
        chunk = into[start : start + CHUNK]
        np.copyto(chunk, source[start : start + CHUNK])
        digest.update(chunk.data)
    return digest.hexdigest()


def threads() -> int:
    """How many threads copy or hash together: one for each core that this process may use, MOST_THREADS at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_THREADS)
