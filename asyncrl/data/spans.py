"""Files whose rows are stretches of bytes: where each begins is found once, and a row is read when it is asked for.

A file of 10 million rows so takes no memory for them: the places are 8 bytes a row, on disk (`kept`), and finding them
is one pass at the speed of the disk. What a row says is looked at when it is read.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import pyarrow as pa

from asyncrl.data.content import SMALL, Content, Held, OnDisk
from asyncrl.data.errors import DataError, RowError
from asyncrl.data.json_text import object_of
from asyncrl.data.kept import kept

LARGEST_ROW = 32 << 20
"""Bytes of a row that is read: 8 million tokens are more than any model takes. A longer one is a file without line
ends, or something else by mistake."""

LARGEST_LIST = 512 << 20
"""Bytes of a file that is one JSON list. It has to be read as a whole to be taken apart."""

BLOCK = 8 << 20
"""Bytes looked at in one piece while places are found."""

IS_SPACE = np.isin(np.arange(256), list(b" \t\r\n\v\f"))

TWO = struct.Struct("=QQ")

COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


class Rows(Protocol):
    """The rows of one file, by position from 0. Positions are those of rows; `number` is what a person counts."""

    path: Path
    sources: Sequence[Path]
    """The files themselves, where `path` is a folder."""

    def __len__(self) -> int: ...

    def number(self, position: int) -> int:
        """From 1: the line of JSONL, else the row after a header."""

    def read(self, position: int) -> dict[str, Any]:
        """Raises RowError, and DataError for a file that was changed."""


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


class Spans:
    """Rows of JSONL, CSV and JSON lists."""

    def __init__(
        self, path: Path, content: Content, places: Places, decode: Callable[[str, bytes], dict[str, Any]]
    ) -> None:
        """decode: of FILE:ROW and its bytes."""
        self.path = path
        self.sources: Sequence[Path] = [path]
        self._content = content
        self._places = places
        self._decode = decode

    def __len__(self) -> int:
        return len(self._places)

    def number(self, position: int) -> int:
        return self._places.number(position)

    def read(self, position: int) -> dict[str, Any]:
        start, stop = self._places.span(position)
        where = f"{self.path}:{self.number(position)}"
        if stop - start > LARGEST_ROW:
            raise RowError(
                "too-large",
                f"{where}: the row has {stop - start:,} bytes, and {LARGEST_ROW:,} are the most: end each row with its "
                "line, or remove the row",
            )
        return self._decode(where, self._content.read(start, stop))


def json_lines(path: Path) -> Spans:
    """Rows of a JSONL file: one object a line, blank lines passed over. Raises DataError, OSError."""
    content = _open(path)
    return Spans(path, content, _find_places(path, content, quoted=False), object_of)


def csv_rows(path: Path) -> Spans:
    """Rows of a CSV file after its header: UTF-8, commas, RFC 4180; every value is text. Raises DataError, OSError."""
    content = _open(path)
    places = _find_places(path, content, quoted=True)
    if not len(places):
        raise DataError(f"{path} is empty: the first row of a CSV file names its columns")
    csv.field_size_limit(LARGEST_ROW)  # of the module, whose own limit is 128 KiB
    start, stop = places.span(0)
    try:
        header = _cells(f"{path}:header", content.read(start, min(stop, start + LARGEST_ROW)))
    except RowError as error:
        raise DataError(str(error)) from error
    if repeated := next((name for name in header if header.count(name) > 1), None):
        raise DataError(f"{path}: the header has {repeated!r} twice: give each column a name of its own")

    def decode(where: str, text: bytes) -> dict[str, Any]:
        cells = _cells(where, text)
        if len(cells) != len(header):
            raise RowError(
                "not-csv",
                f"{where}: {len(cells)} cells, but the header names {len(header)} columns: put cells with commas, "
                "quotes or line ends into quotes, and write quotes in them twice",
            )
        return dict(zip(header, cells, strict=True))

    return Spans(path, content, places.after_header(), decode)


def json_list(path: Path) -> Spans:
    """Rows of a file that is one JSON list of objects. Raises DataError, OSError."""
    content = _open(path)
    if content.size > LARGEST_LIST:
        raise DataError(
            f"{path} is a JSON list of {content.size:,} bytes, which would be read as a whole: make a JSONL file of it "
            "with `jq -c '.[]'`"
        )
    _refuse_utf16(path, content)
    # Bytes as letters one for one, so that positions of letters are positions of bytes. JSON's own signs are ASCII.
    text = content.read(0, content.size).decode("latin-1")
    begins = array("Q")
    decoder = json.JSONDecoder(object_pairs_hook=lambda _: None)
    space = re.compile(r"[ \t\r\n]*")

    def past(position: int) -> int:
        found = space.match(text, position)
        return position if found is None else found.end()

    position = past(_after_mark(content))
    try:
        if text[position : position + 1] != "[":
            raise json.JSONDecodeError("no list", text, position)
        position = past(position + 1)
        while text[position : position + 1] != "]" or begins:
            begins.append(position)
            position = past(decoder.raw_decode(text, position)[1])
            if text[position : position + 1] == "]":
                break
            if text[position : position + 1] != ",":
                raise json.JSONDecodeError("no comma and no end of the list", text, position)
            position = past(position + 1)
        if past(position + 1) < len(text):
            raise json.JSONDecodeError("something after the list", text, position + 1)
    except json.JSONDecodeError as error:
        row = f"row {len(begins)}" if begins else "at its start"
        raise DataError(
            f"{path} is no JSON list of objects ({row}, line {error.lineno}): {error.msg}: repair it, or write one "
            "object per line as .jsonl"
        ) from None
    except (RecursionError, ValueError) as error:
        raise DataError(f"{path}:{len(begins)}: {error}: repair the row") from None

    def decode(where: str, row: bytes) -> dict[str, Any]:
        return object_of(where, row.rstrip(b", \t\r\n"))

    return Spans(path, content, Places.of(np.array([*begins, position], np.uint64)), decode)


def _cells(where: str, text: bytes) -> list[str]:
    try:
        return next(csv.reader([text.decode().rstrip("\r\n")], strict=True))
    except UnicodeDecodeError as error:
        raise RowError(
            "not-utf8", f"{where}: not UTF-8 (byte {error.start} of the row): save the file as UTF-8"
        ) from None
    except csv.Error as error:
        raise RowError(
            "not-csv",
            f"{where}: not CSV: {error}: put cells with quotes or line ends into quotes, and write quotes twice",
        ) from None


# --- bytes ------------------------------------------------------------------------------------------------------------


def _open(path: Path) -> Content:
    """The file's bytes, unpacked if its name says that it is compressed."""
    method = COMPRESSED.get(path.suffix)
    if method is None:
        size = path.stat().st_size
        return Held(path.read_bytes()) if size <= SMALL else OnDisk(path)

    def unpacked() -> BinaryIO:
        return pa.input_stream(str(path), compression=method)  # type: ignore[no-any-return]

    def unpack(folder: Path) -> None:
        with unpacked() as source, (folder / "content").open("wb") as file:
            while block := source.read(BLOCK):
                file.write(block)

    try:
        with unpacked() as source:
            start = source.read(SMALL + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be unpacked: {error}: it is damaged, or not what its name says") from error
    return Held(start) if len(start) <= SMALL else OnDisk(kept([path], "content", unpack) / "content")


def _after_mark(content: Content) -> int:
    """Where the text begins: a byte order mark of UTF-8 says nothing, and is passed over."""
    return len(codecs.BOM_UTF8) if content.read(0, min(3, content.size)) == codecs.BOM_UTF8 else 0


def _refuse_utf16(path: Path, content: Content) -> None:
    if content.read(0, min(2, content.size)) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise DataError(f"{path} is UTF-16: save it as UTF-8 (`iconv -f UTF-16 -t UTF-8`)")


def _find_places(path: Path, content: Content, *, quoted: bool) -> Places:
    """Where rows begin; of a large file kept on disk. quoted: line ends between quotes end no row."""
    _refuse_utf16(path, content)
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
    position = _after_mark(content)
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
        return stop - start <= BLOCK and not content.read(start, stop).strip()

    blank = np.array([line for line in spaced if is_blank(line)], np.int64)
    return (np.delete(places, blank) if len(blank) else places), blank
