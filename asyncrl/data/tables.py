"""Files of typed columns: Parquet, Arrow, and the folders that Hugging Face's `datasets` saves, without that library.

Arrow files are mapped into memory, so what is read of them is the system's cache and not the process's memory. A large
Parquet file is unpacked once into such a file, because a single row of it costs the unpacking of its whole row group,
often a million rows.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.data.content import Room, Watched
from asyncrl.data.errors import DataError, RowError
from asyncrl.data.kept import kept

BATCH = 16384
"""Rows that are unpacked and written together: megabytes, and a file of ten million has few enough of them that they
can all be known."""

UNPACKED = "rows.arrow"

PACKED = 4
"""Times that what is unpacked is larger, about."""

PLAIN = (
    *(pa.types.is_null, pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating),
    *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
)
NESTED = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


class Part:
    """The record batches of one file. A user's own file that is mapped is not trusted: batches are checked before they
    are read, because damaged ones end the process with SIGSEGV, and so is that the file is as it was, because of one
    that somebody shortens a mapping ends it with SIGBUS."""

    def __init__(self, schema: pa.Schema, batches: Iterable[pa.RecordBatch], *, mapped: Path | None = None) -> None:
        """mapped: the file, if it is a user's and mapped."""
        self.schema = schema
        self.batches = list(batches)
        self._unchecked = set(range(len(self.batches))) if mapped is not None else set()
        self._watched = None if mapped is None else Watched(mapped)

    def check(self, n: int) -> None:
        """Before batch `n` is read. Raises DataError for a file that is damaged, or was changed."""
        if self._watched is None:
            return
        self._watched.check()
        if n in self._unchecked:
            _refuse_damaged(self._watched.path, self.batches[n])
            self._unchecked.remove(n)


class Table:
    """The rows of record batches. Columns that hold no JSON (times, bytes, decimals) are left out, and named once. Each
    part may have columns of its own."""

    def __init__(self, path: Path, parts: Sequence[Part], *, sources: Sequence[Path] = ()) -> None:
        self.path = path
        self.sources: Sequence[Path] = sources or [path]
        left_out: dict[str, None] = {}
        self._places: list[tuple[Part, int, pa.RecordBatch]] = []
        self._has_floats = any(_has_floats(field.type) for part in parts for field in part.schema)
        for part in parts:
            names = part.schema.names
            if repeated := next((name for name in names if names.count(name) > 1), None):
                raise DataError(f"{path} has the column {repeated!r} twice: give each column a name of its own")
            left_out |= {f"{field.name} ({field.type})": None for field in part.schema if not _is_json(field.type)}
            usable = [field.name for field in part.schema if _is_json(field.type)]
            self._places += [(part, n, batch.select(usable)) for n, batch in enumerate(part.batches) if batch.num_rows]
        said = f"{path}: columns that hold no text, numbers, lists or objects are left out: {', '.join(left_out)}"
        self.warnings: Sequence[str] = [said] if left_out else []
        self._ends = list(accumulate(batch.num_rows for _, _, batch in self._places))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def number(self, position: int) -> int:
        return position + 1

    def read(self, position: int) -> dict[str, Any]:
        place = bisect_right(self._ends, position)
        part, n, batch = self._places[place]
        part.check(n)
        try:
            row: dict[str, Any] = batch.slice(position - self._ends[place] + batch.num_rows, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            raise RowError(
                "not-utf8", f"{self.path}:{self.number(position)}: not UTF-8 (byte {error.start} of a column)"
            ) from None
        except pa.ArrowException as error:
            raise DataError(
                f"{self.path}:{self.number(position)} is damaged: {_first_line(error)}: write the file again"
            ) from error
        return _without_nan(row) if self._has_floats else row


def parquet(path: Path, room: Room) -> Table:
    """Rows of a Parquet file. Raises DataError, OSError."""
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            unpacked = sum(file.metadata.row_group(n).total_byte_size for n in range(file.num_row_groups))
            if room.take(unpacked):
                return Table(path, [Part(file.schema_arrow, _intact(path, file.iter_batches(BATCH)))])

        def unpack(folder: Path) -> None:
            with pq.ParquetFile(path, pre_buffer=False) as file:
                _write(file.schema_arrow, _intact(path, file.iter_batches(BATCH)), folder / UNPACKED)

        return Table(path, [Part(*_mapped(kept([path], "parquet", unpack) / UNPACKED))])
    except (pa.ArrowException, UnicodeDecodeError) as error:  # names of columns are text, too
        raise DataError(f"{path} is no intact Parquet file: {_first_line(error)}") from error


def arrow(path: Path, room: Room) -> Table:
    """Rows of an Arrow file, of either form, or of a folder that `Dataset.save_to_disk` wrote. Raises DataError,
    OSError."""
    files = _shards(path) if path.is_dir() else [path]
    parts = []
    for file in files:
        try:
            parts.append(_arrow_file(file, room))
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise DataError(f"{file} is no intact Arrow file: {_first_line(error)}") from error
    return Table(path, parts, sources=files)


def _intact(path: Path, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        _refuse_damaged(path, batch)
        yield batch


def _refuse_damaged(path: Path, batch: pa.RecordBatch) -> None:
    """Raise DataError where a value could not be read. Text that is not UTF-8 is no damage: it is its row's fault."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if damage := _damage(column):
            raise DataError(f"{path} is damaged: column {name!r}: {damage}: write it again")


def _damage(array: pa.Array) -> str:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            return _first_line(error)
    else:
        return ""
    # Columns behind the first with text that is not UTF-8 were not looked at; of that one the places of texts were.
    kind = array.type
    if pa.types.is_struct(kind):
        return next(filter(None, (_damage(array.field(n)) for n in range(kind.num_fields))), "")
    if pa.types.is_dictionary(kind):
        return _damage(array.indices) or _damage(array.dictionary)
    return _damage(array.values) if any(is_of(kind) for is_of in NESTED) else ""


def is_saved_dataset(folder: Path) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote the folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _shards(folder: Path) -> list[Path]:
    """The Arrow files of a saved dataset, in order."""
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
            raise DataError(
                f"{folder} has the splits {', '.join(splits)}: name one, as in {folder / splits[0]}, and another as "
                "the held-out data"
            )
        state = json.loads((folder / "state.json").read_bytes())
        files = [folder / file["filename"] for file in state["_data_files"]]
        if state.get("_indices_data_files"):
            raise DataError(
                f"{folder} was saved with a choice of rows beside its files, as old versions of `datasets` do, and all "
                "rows would be read: load it there, call flatten_indices(), and save it again"
            )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{folder}: its state.json or dataset_dict.json is not as `save_to_disk` writes it ({error!r})"
        ) from error
    if not files:
        raise DataError(f"{folder} is a dataset without files")
    return files


def _arrow_file(path: Path, room: Room) -> Part:
    """A large file whose batches are packed is unpacked into another: in memory they would take what they unpack to."""
    if _is_packed(path) and not room.take(PACKED * path.stat().st_size):
        path = kept([path], "arrow", lambda folder: _write(*_mapped(path), folder / UNPACKED)) / UNPACKED
        return Part(*_mapped(path))
    return Part(*_mapped(path), mapped=path)


def _is_packed(path: Path) -> bool:
    """Whether its first batch takes memory when it is mapped."""
    before = pa.total_allocated_bytes()
    first = next(iter(_mapped(path)[1]), None)
    return first is not None and pa.total_allocated_bytes() - before >= first.nbytes // 2


def _write(schema: pa.Schema, batches: Iterable[pa.RecordBatch], path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _mapped(path: Path) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
    source = pa.memory_map(str(path))
    if source.read(6) == b"ARROW1":
        file = pa.ipc.open_file(source)
        return file.schema, (file.get_batch(n) for n in range(file.num_record_batches))
    source.seek(0)
    stream = pa.ipc.open_stream(source)
    return stream.schema, stream


def _is_json(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_json(kind.value_type)
    if any(is_of(kind) for is_of in NESTED):
        return _is_json(kind.value_type)
    if pa.types.is_struct(kind):
        return all(_is_json(kind.field(n).type) for n in range(kind.num_fields))
    return any(is_of(kind) for is_of in PLAIN)


def _has_floats(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_has_floats(kind.field(n).type) for n in range(kind.num_fields))
    if any(is_of(kind) for is_of in NESTED) or pa.types.is_dictionary(kind):
        return _has_floats(kind.value_type)
    return bool(pa.types.is_floating(kind))


def _without_nan(value: Any) -> Any:
    """With null for numbers that are none, with which columnar files say that a value is missing, and JSON has not."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
