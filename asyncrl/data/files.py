"""From what a recipe names to rows: a file, several, a pattern, a folder; the format by what the name ends in."""

from __future__ import annotations

import glob
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar

from asyncrl.data.content import Room
from asyncrl.data.errors import DataError, RowError
from asyncrl.data.spans import COMPRESSED, Rows, csv_rows, json_lines, json_list, unpacked
from asyncrl.data.tables import arrow, is_saved_dataset, parquet

Format = Literal["auto", "jsonl", "json", "csv", "parquet", "arrow"]

OPENERS: dict[str, Callable[[Path, Room], Rows]] = {
    "jsonl": json_lines,
    "json": json_list,
    "csv": csv_rows,
    "parquet": parquet,
    "arrow": arrow,
}

SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}

T = TypeVar("T")


class Files:
    """The rows of several files as one sequence, in the order of the files; read one by one when they are asked for."""

    def __init__(self, parts: Sequence[tuple[Rows, str]]) -> None:
        """parts: the rows of each file with its format."""
        self._parts = [rows for rows, _ in parts]
        self.formats = [form for _, form in parts]
        self._ends = list(accumulate(len(rows) for rows in self._parts))
        self._names = _short_names([rows.path for rows in self._parts])

    @property
    def paths(self) -> list[Path]:
        return [rows.path for rows in self._parts]

    @property
    def sources(self) -> list[Path]:
        """The files themselves, those inside a saved dataset's folder too."""
        return [file for rows in self._parts for file in rows.sources]

    @property
    def warnings(self) -> list[str]:
        """What is not read of the files, for a person."""
        return [warning for rows in self._parts for warning in rows.warnings]

    def __len__(self) -> int:
        return self._ends[-1]

    def where(self, position: int) -> str:
        """FILE:ROW, for a person."""
        part, own = self._at(position)
        return f"{self._parts[part].path}:{self._parts[part].number(own)}"

    def read(self, position: int) -> tuple[str, str, dict[str, Any]]:
        """The row after FILE:ROW for a person, and the same short: wherever the files lie, and of no other row. Raises
        RowError, and DataError for a file that was changed."""
        part, own = self._at(position)
        rows = self._parts[part]
        number = rows.number(own)
        return f"{rows.path}:{number}", f"{self._names[part]}:{number}", rows.read(own)

    def parsed(
        self, parse: Callable[[str, str, dict[str, Any]], T], bad: Callable[[RowError], None], *, first: int
    ) -> Iterator[tuple[int, T]]:
        """`parse` of what `read` gives, for the `first` rows, with their positions; `bad` is told of each row that
        cannot be used, and decides by raising or returning."""
        for position in range(first):
            try:
                yield position, parse(*self.read(position))
            except RowError as error:
                bad(error)

    def described(self) -> list[dict[str, Any]]:
        """Of each file its path, format and rows."""
        return [
            {"path": str(rows.path), "format": form, "rows": len(rows)}
            for rows, form in zip(self._parts, self.formats, strict=True)
        ]

    def _at(self, position: int) -> tuple[int, int]:
        """Which file, and which of its rows."""
        part = bisect_right(self._ends, position)
        return part, position - self._ends[part] + len(self._parts[part])


def open_files(given: str | Sequence[str], form: Format, *, key: str) -> Files:
    """The rows of what the recipe's `key` names; nothing of them is read yet. Raises DataError."""
    names = [given] if isinstance(given, str) else list(given)
    if not all(names) or not names:
        raise DataError(f"{key} is {given!r}: name a file, a pattern or a folder")
    paths = [path for name in names for path in _found(name, key)]
    named: dict[Path, Path] = {}
    for path in paths:
        try:
            str(path).encode()
        except UnicodeEncodeError:  # its rows would be called by it, and nothing that is called so can be sent
            raise DataError(f"{key}: the name of a file is not UTF-8, {str(path)!a}: rename it") from None
        before = named.setdefault(path.resolve(), path)
        if before is not path:
            raise DataError(
                f"{key} names {before} twice{f', also as {path}' if path != before else ''}: its rows would count twice"
            )
    room = Room()
    return Files([_open(path, form, key, room) for path in paths])


def _found(name: str, key: str) -> list[Path]:
    """The files of one name, sorted where there are several."""
    path = Path(name).expanduser()
    if not path.exists():
        matching = [Path(found) for found in sorted(glob.glob(str(path), recursive=True)) if Path(found).is_file()]
        if glob.has_magic(name) and matching:
            return matching
        what = "matches no file" if glob.has_magic(name) else "does not exist"
        raise DataError(f"{path} {what} (relative to {Path.cwd()}): correct {key}")
    if path.is_file() or is_saved_dataset(path):
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} is no file, but a pipe or a device, which can be read once: write a file, as {key}")
    # As of a pattern, none that is hidden: editors and other systems leave such beside the files themselves.
    shown = (file for file in path.iterdir() if not file.name.startswith("."))
    inside = sorted(file for file in shown if file.is_file() and _by_name(file) is not None)
    forms = {_by_name(file) for file in inside}
    if len(forms) != 1:
        found = f"files of the formats {', '.join(sorted(map(str, forms)))}" if forms else "no file"
        raise DataError(
            f"{path} is a folder with {found}, of {', '.join(SUFFIXES)}: name its files, as in {path}/*.jsonl, as {key}"
        )
    return inside


def _by_name(path: Path) -> str | None:
    """The format that the name of a file says."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return SUFFIXES.get(name.suffix.lower())


def _open(path: Path, form: Format, key: str, room: Room) -> tuple[Rows, str]:
    try:
        chosen = _format(path, form, key)
        return OPENERS[chosen](path, room), chosen
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"{path} cannot be read: {reason}: correct {key}") from error


def _format(path: Path, form: Format, key: str) -> str:
    if path.is_dir():
        return "arrow"
    named = _by_name(path)
    if form != "auto":
        if path.suffix.lower() in COMPRESSED and form in ("parquet", "arrow"):
            raise DataError(f"{path}: a {form} file is compressed inside: unpack it, and name the file itself as {key}")
        return form
    if named is None:
        raise DataError(
            f"{path}: its name ends in none of {', '.join(SUFFIXES)}: rename it, or say what it is: "
            f"{key.rpartition('.')[0]}.format"
        )
    if named == "json" and _first_byte(path) == b"{":
        return "jsonl"  # one object a line under the other name, as several hubs write it
    return named


def _first_byte(path: Path) -> bytes:
    try:
        with unpacked(path) as file:
            return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    except OSError:  # said by whoever reads it all
        return b""


def _short_names(paths: Sequence[Path]) -> list[str]:
    """A name for each: the last part, or as much more of the path as tells them apart."""
    names = [path.name for path in paths]
    if len(set(names)) == len(names):
        return names
    above = os.path.commonpath([path.resolve().parent for path in paths])
    return [str(path.resolve().relative_to(above)) for path in paths]
