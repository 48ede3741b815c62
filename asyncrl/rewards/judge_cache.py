"""Replies of judges, kept in a folder: the same question is paid for once, also by the next run and by other processes.

A table in SQLite, which makes each entry whole or absent, with several processes at once and after a kill. A reply is a
function of all that was asked, so nothing in it has to change while it can be read; the folder can be removed at any
time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

FILE = "judge.sqlite"
BUSY_S = 10.0
"""Longest wait for another process that writes, which takes milliseconds."""


class ReplyCache:
    """The replies in a folder. Calls block for a file's read or write; they may come from any thread, one at a time."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError or sqlite3.Error where it cannot be read and written."""
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        self._table = sqlite3.connect(folder / FILE, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        with suppress(sqlite3.OperationalError):  # a network's file system has no shared memory: slower, as safe
            self._table.execute("PRAGMA journal_mode = WAL")
        self._table.execute("PRAGMA synchronous = NORMAL")  # what a power cut takes is asked again
        self._table.execute("CREATE TABLE IF NOT EXISTS replies (question BLOB PRIMARY KEY, reply TEXT) WITHOUT ROWID")

    def get(self, key: bytes) -> str | None:
        """The reply, None if it is not known."""
        found = self._table.execute("SELECT reply FROM replies WHERE question = ?", (key,)).fetchone()
        return None if found is None else str(found[0])

    def put(self, key: bytes, reply: str) -> None:
        """Keep a reply, in the place of one that cannot be read, or that another process kept meanwhile."""
        self._table.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))

    def close(self) -> None:
        self._table.close()


def key_of(request: Mapping[str, Any]) -> bytes:
    """Hash of a request: who is asked, what, and by which settings. Never of a password."""
    return blake2b(msgspec.json.encode(request, order="deterministic"), digest_size=20).digest()
