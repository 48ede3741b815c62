"""Files whose rows are stretches of bytes: where each begins is found once, and a row is read when it is asked for.

A file of 10 million rows so takes no memory for them: the places are 8 bytes a row, on disk (`kept`), and finding them
is one pass at the speed of the disk. What a row says is looked at when it is read.
"""

from __future__ import annotations

import csv
import json
import re
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import pyarrow as pa

from asyncrl.data.content import Content, Held, OnDisk, Room
from asyncrl.data.errors import DataError, RowError
from asyncrl.data.json_text import object_of
from asyncrl.data.kept import kept
from asyncrl.data.places import BLOCK, Places, after_mark, find_places, refuse_utf16

LARGEST_ROW = 32 << 20
"""Bytes of a row that is read: 8 million tokens are more than any model takes. A longer one is a file without line
ends, or something else by mistake."""

LARGEST_LIST = 512 << 20
"""Bytes of a file that is one JSON list. It has to be read as a whole to be taken apart."""

COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


class Rows(Protocol):
    """The rows of one file, by position from 0. Positions are those of rows; `number` is what a person counts."""

    path: Path
    sources: Sequence[Path]
    """The files themselves, where `path` is a folder."""
    warnings: Sequence[str]
    """What is not read of the file, for a person."""

    def __len__(self) -> int: ...

    def number(self, position: int) -> int:
        """From 1: the line of JSONL, else the row after a header."""

    def read(self, position: int) -> dict[str, Any]:
        """Raises RowError, and DataError for a file that was changed."""


class Spans:
    """Rows of JSONL, CSV and JSON lists."""

    def __init__(
        self, path: Path, content: Content, places: Places, decode: Callable[[str, bytes], dict[str, Any]]
    ) -> None:
        """decode: of FILE:ROW and its bytes."""
        self.path = path
        self.sources: Sequence[Path] = [path]
        self.warnings: Sequence[str] = ()
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
                "line, close what CSV has in quotes, or remove the row",
            )
        return self._decode(where, self._content.read(start, stop))


def json_lines(path: Path, room: Room) -> Spans:
    """Rows of a JSONL file: one object a line, blank lines passed over. Raises DataError, OSError."""
    content = _open(path, room)
    return Spans(path, content, find_places(path, content, quoted=False), object_of)


def csv_rows(path: Path, room: Room) -> Spans:
    """Rows of a CSV file after its header: UTF-8, commas, RFC 4180; every value is text. Raises DataError, OSError."""
    content = _open(path, room)
    places = find_places(path, content, quoted=True)
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


def json_list(path: Path, room: Room) -> Spans:
    """Rows of a file that is one JSON list of objects. Raises DataError, OSError."""
    content = _open(path, room)
    if content.size > LARGEST_LIST:
        raise DataError(
            f"{path} is a JSON list of {content.size:,} bytes, which would be read as a whole: make a JSONL file of it "
            "with `jq -c '.[]'`"
        )
    refuse_utf16(path, content)
    # Bytes as letters one for one, so that positions of letters are positions of bytes. JSON's own signs are ASCII.
    text = content.read(0, content.size).decode("latin-1")
    begins = array("Q")
    decoder = json.JSONDecoder(object_pairs_hook=lambda _: None, parse_int=len)  # nothing of it is looked at
    space = re.compile(r"[ \t\r\n]*")

    def past(position: int) -> int:
        found = space.match(text, position)
        return position if found is None else found.end()

    position = past(after_mark(content))
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
        lines = text.rstrip(b"\r\n").count(b"\n") + 1
        taken = f", in {lines:,} lines from one quote to another, which may all be rows" if lines > 1 else ""
        said = "a line end outside of quotes" if "new-line" in str(error) else error  # it asks for a mode to open it in
        raise RowError(
            "not-csv",
            f"{where}: not CSV: {said}{taken}: put cells with quotes or line ends into quotes, and write quotes twice",
            rows=lines,
        ) from None


def unpacked(path: Path) -> BinaryIO:
    """The file's bytes from the beginning, unpacked if its name says that it is compressed. Raises OSError."""
    method = COMPRESSED.get(path.suffix.lower())
    return pa.input_stream(str(path), compression=method)  # type: ignore[no-any-return]


def _open(path: Path, room: Room) -> Content:
    """The file's bytes, unpacked if its name says that it is compressed."""
    if path.suffix.lower() not in COMPRESSED:
        return Held(path.read_bytes()) if room.take(path.stat().st_size) else OnDisk(path)

    def unpack(folder: Path) -> None:
        with unpacked(path) as source, (folder / "content").open("wb") as file:
            while block := source.read(BLOCK):
                file.write(block)

    try:
        with unpacked(path) as source:
            start = source.read(room.left + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be unpacked: {error}: it is damaged, or not what its name says") from error
    return Held(start) if room.take(len(start)) else OnDisk(kept([path], "content", unpack) / "content")
