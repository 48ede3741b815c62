"""Where the rows of a file begin: found once, 8 bytes a row, of a large file kept on disk."""

from __future__ import annotations

import codecs
import io
import struct
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from asyncrl.data.content import Content, Held, OnDisk
from asyncrl.data.errors import DataError
from asyncrl.data.kept import kept

BLOCK = 8 << 20
"""Bytes looked at in one piece."""

LONGEST_BLANK = 1 << 20
"""Bytes of a line of nothing but white space that is passed over; a longer one is a row that says nothing."""

IS_SPACE = np.isin(np.arange(256), list(b" \t\r\n\v\f"))

TWO = struct.Struct("=QQ")


class Places:
    """Where rows begin and end, 8 bytes a row."""

    def __init__(self, ends: Content, blank: np.ndarray, *, skipped: int = 0) -> None:
        """ends: as uint64, where each row begins and the last one ends. blank: numbers, from 0, of lines among the rows
        that are none. skipped: rows at the beginning that are none."""
        self._ends = ends
        self._blank = blank
        self._skipped = skipped
        self._rows_before_blank = (blank - np.arange(len(blank))).tolist()

    @classmethod
    def of(cls, ends: np.ndarray, blank: np.ndarray | None = None) -> Places:
        """In memory."""
        return cls(Held(ends.tobytes()), np.zeros(0, np.int64) if blank is None else blank)

    def after_header(self) -> Places:
        """Without the first row, and counted anew."""
        return Places(self._ends, np.zeros(0, np.int64), skipped=1)

    def __len__(self) -> int:
        return self._ends.size // 8 - 1 - self._skipped

    def span(self, position: int) -> tuple[int, int]:
        at = 8 * (position + self._skipped)
        start, stop = TWO.unpack(self._ends.read(at, at + 16))
        return start, stop

    def number(self, position: int) -> int:
        return position + 1 + bisect_right(self._rows_before_blank, position)


def find_places(path: Path, content: Content, *, quoted: bool) -> Places:
    """Where rows begin; of a large file kept on disk. quoted: line ends between quotes end no row."""
    refuse_utf16(path, content)
    if isinstance(content, Held):
        memory = io.BytesIO()
        spaced = _write_places(content, memory, quoted=quoted)
        return Places.of(*_without_blanks(content, np.frombuffer(memory.getbuffer(), np.uint64), spaced))

    def find(folder: Path) -> None:
        with (folder / "all").open("wb") as file:
            spaced = _write_places(content, file, quoted=quoted)
        places, blank = _without_blanks(content, np.memmap(folder / "all", np.uint64, "r"), spaced)
        places.tofile(folder / "places")
        blank.tofile(folder / "blank")
        (folder / "all").unlink()

    folder = kept([path], f"places, {quoted=}", find)
    return Places(OnDisk(folder / "places"), np.fromfile(folder / "blank", np.int64))


def _write_places(content: Content, into: BinaryIO, *, quoted: bool) -> list[int]:
    """Write where each line begins, and where the last one ends. Returns the numbers, from 0, of lines that begin with
    white space, among them the blank ones."""
    position = after_mark(content)
    spaced: list[int] = []
    written = 0
    inside = False  # of quotes
    begins = np.array([position])
    while position < content.size:
        block = np.frombuffer(content.read(position, min(position + BLOCK, content.size)), np.uint8)
        ends = block == ord("\n")
        if quoted:
            within = np.logical_xor.accumulate(block == ord('"')) ^ inside
            inside = bool(within[-1])
            ends &= ~within
        begins = np.concatenate((begins, np.flatnonzero(ends) + (position + 1)))
        here = begins[begins < position + len(block)]
        spaced += (np.flatnonzero(IS_SPACE[block[here - position]]) + written).tolist()
        into.write(here.astype(np.uint64).tobytes())
        written += len(here)
        begins = begins[len(here) :]  # at most one, at the end of the block
        position += len(block)
    into.write(np.uint64(content.size).tobytes())
    return spaced


def _without_blanks(content: Content, places: np.ndarray, spaced: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The places of the lines that say something, and the numbers, from 0, of the others."""

    def is_blank(line: int) -> bool:
        start, stop = int(places[line]), int(places[line + 1])
        return stop - start <= LONGEST_BLANK and not content.read(start, stop).strip()

    blank = np.array([line for line in spaced if is_blank(line)], np.int64)
    return (np.delete(places, blank) if len(blank) else places), blank


def after_mark(content: Content) -> int:
    """Where the text begins: a byte order mark of UTF-8 says nothing, and is passed over."""
    return len(codecs.BOM_UTF8) if content.read(0, min(3, content.size)) == codecs.BOM_UTF8 else 0


def refuse_utf16(path: Path, content: Content) -> None:
    begin = content.read(0, min(4, content.size))
    if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        name = "UTF-32" if begin == codecs.BOM_UTF32_LE else "UTF-16"
        raise DataError(f"{path} is {name}: save it as UTF-8 (`iconv -f {name} -t UTF-8`)")
