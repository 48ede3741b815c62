"""What is wrong with data files: said with file, row and fix."""

from __future__ import annotations

from typing import Literal

Reason = Literal[
    "not-utf8",
    "not-json",
    "not-csv",
    "not-text",
    "missing-column",
    "null",
    "empty",
    "wrong-type",
    "wrong-role",
    "wrong-tools",
    "same-id",
    "duplicate",
    "held-out",
    "chat-template",
    "too-large",
    "too-long",
]
"""Why a row cannot be used, in one word to count by. too-large: in bytes; too-long: in tokens."""


class DataError(Exception):
    """A data file cannot be used. One to three lines: file and row, what is wrong, and the fix."""


class RowError(DataError):
    """One row cannot be used; the others may. `rows`: how many it may be, where it is not clear where it ends."""

    def __init__(self, reason: Reason, message: str, *, rows: int = 1) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.rows = rows
