"""Parquet files that are there whole or not at all, also after a power failure."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def write_whole(table: pa.Table, path: Path, *, use_dictionary: bool) -> None:
    """Write `table` as `path`, over an older file; on return it survives a power failure.

    Both syncs are needed for what is written next (to the store, which syncs its log on its own) to come after it on
    disk as well: without the first the name may point at an empty file, without the second there is no name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    try:
        pq.write_table(table, temporary, compression="zstd", use_dictionary=use_dictionary)
        _sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
