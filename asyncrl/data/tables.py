"""Files of typed columns: Parquet, Arrow, and the folders that Hugging Face's `datasets` saves, without that library.

Arrow files are mapped into memory, so what is read of them is the system's cache and not the process's memory. A large
Parquet file is unpacked once into such a file, because a single row of it costs the unpacking of its whole row group,
often a million rows.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.data.content import SMALL
from asyncrl.data.errors import DataError, RowError
from asyncrl.data.kept import kept

BATCH = 16384
"""Rows that are unpacked and written together: megabytes, and a file of ten million has few enough of them that they
can all be known."""

PLAIN = (
    *(pa.types.is_null, pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating),
    *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
)
NESTED = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


class Table:
    """The rows of record batches. Columns that hold no JSON (times, bytes, decimals) are left out, and named once."""

    def __init__(
        self, path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], *, sources: Sequence[Path] = ()
    ) -> None:
        self.path = path
        self.sources: Sequence[Path] = sources or [path]
        names = [field.name for field in schema]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise DataError(f"{path} has the column {repeated!r} twice: give each column a name of its own")
        left_out = [f"{field.name} ({field.type})" for field in schema if not _is_json(field.type)]
        said = f"{path}: columns that hold no text, numbers, lists or objects are left out: {', '.join(left_out)}"
        self.warnings: Sequence[str] = [said] if left_out else []
        usable = [field.name for field in schema if _is_json(field.type)]
        self._batches = [batch.select(usable) for batch in batches if batch.num_rows]
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def number(self, position: int) -> int:
        return position + 1

    def read(self, position: int) -> dict[str, Any]:
        n = bisect_right(self._ends, position)
        batch = self._batches[n]
        try:
            row: dict[str, Any] = batch.slice(position - self._ends[n] + batch.num_rows, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            raise RowError(
                "not-utf8", f"{self.path}:{self.number(position)}: not UTF-8 (byte {error.start} of a column)"
            ) from None
        return row


def parquet(path: Path) -> Table:
    """Rows of a Parquet file. Raises DataError, OSError."""
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            unpacked = sum(file.metadata.row_group(n).total_byte_size for n in range(file.num_row_groups))
            if unpacked <= SMALL:
                return Table(path, file.schema_arrow, list(file.iter_batches(BATCH)))
        rows = kept([path], "parquet", lambda folder: _unpack(path, folder / "rows.arrow")) / "rows.arrow"
        return Table(path, *_mapped(rows))
    except pa.ArrowException as error:
        raise DataError(f"{path} is no intact Parquet file: {_first_line(error)}") from error


def arrow(path: Path) -> Table:
    """Rows of an Arrow file, of either form, or of a folder that `Dataset.save_to_disk` wrote. Raises DataError,
    OSError."""
    files = _shards(path) if path.is_dir() else [path]
    try:
        parts = [_mapped(file) for file in files]
    except pa.ArrowException as error:
        raise DataError(f"{path} is no intact Arrow file: {_first_line(error)}") from error
    return Table(path, parts[0][0], [batch for _, batches in parts for batch in batches], sources=files)


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
        named = json.loads((folder / "state.json").read_bytes())["_data_files"]
        files = [folder / file["filename"] for file in named]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder}: its state.json is not as `save_to_disk` writes it ({error!r})") from error
    if not files:
        raise DataError(f"{folder} is a dataset without files")
    return files


def _unpack(source: Path, destination: Path) -> None:
    with (
        pq.ParquetFile(source, pre_buffer=False) as file,
        pa.OSFile(str(destination), "wb") as sink,
        pa.ipc.new_stream(sink, file.schema_arrow) as writer,
    ):
        for batch in file.iter_batches(BATCH):
            writer.write_batch(batch)


def _mapped(path: Path) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
    source = pa.memory_map(str(path))
    if source.read(6) == b"ARROW1":
        file = pa.ipc.open_file(source)
        return file.schema, [file.get_batch(n) for n in range(file.num_record_batches)]
    source.seek(0)
    stream = pa.ipc.open_stream(source)
    return stream.schema, list(stream)


def _is_json(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_json(kind.value_type)
    if any(is_of(kind) for is_of in NESTED):
        return _is_json(kind.value_type)
    if pa.types.is_struct(kind):
        return all(_is_json(kind.field(n).type) for n in range(kind.num_fields))
    return any(is_of(kind) for is_of in PLAIN)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
