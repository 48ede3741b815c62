"""Files that are damaged, or change under a run: one error that says so, no crash, no rows lost without a word."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pytest

from asyncrl.data import content
from asyncrl.data import kept as keeping
from asyncrl.data.errors import DataError
from asyncrl.data.kept import SOURCE, kept
from tests.data.conftest import everything, opened

LIMIT_S = 120.0

COLUMNS = {"prompt": ["a" * 7001, "b" * 7001, "c"], "answer": ["1", "2", "3"]}


def arrow_file(path: Path, columns: dict[str, Any] = COLUMNS) -> Path:
    """A stream of one batch."""
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def not_utf8() -> pa.Array:
    """ "a", two bytes that are no text, "c"."""
    places = pa.py_buffer(np.array([0, 1, 3, 4], np.int32).tobytes())
    return pa.Array.from_buffers(pa.string(), 3, [None, places, pa.py_buffer(b"a\xff\xfec")])


READ = """
import sys
from asyncrl.config.recipe import DataSource
from asyncrl.data.dataset import Dataset
from asyncrl.data.errors import DataError
from asyncrl.data.tables import Part

if sys.argv[2] == "control":
    Part.check = lambda self, n: None
try:
    dataset = Dataset(DataSource(train=sys.argv[1]))
    if sys.argv[3:]:
        open(sys.argv[1], "r+b").truncate(600)  # as a program does that is about to write it anew
    print([len(row.prompt) for row in dataset.train])
except DataError as error:
    print(error)
"""


def read_apart(path: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a process that opens the file and reads it."""
    command = [sys.executable, "-c", READ, str(path), *arguments]
    environment = os.environ.copy()
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    return done.returncode, done.stdout


def test_a_damaged_arrow_file_is_named_and_ends_no_process(tmp_path: Path) -> None:
    """Control: without the check the process dies of a signal, and says nothing."""
    path = arrow_file(tmp_path / "rows.arrow")
    whole = path.read_bytes()
    offsets = struct.pack("<4i", 0, 7001, 14002, 14003)
    assert whole.count(offsets) == 1
    path.write_bytes(whole.replace(offsets, struct.pack("<4i", 0, 1 << 30, (1 << 30) + 7001, 14003)))
    code, said = read_apart(path, "guarded")
    assert (code, said.count("rows.arrow is damaged: column 'prompt': Offset invariant failure")) == (0, 1), said
    assert read_apart(path, "control")[0] < 0


def test_damage_behind_text_that_is_not_utf8_is_found(tmp_path: Path) -> None:
    """Arrow's own check ends at the first value of a struct that is wrong, and the one behind it ends the process."""
    texts = pa.StructArray.from_arrays([not_utf8(), pa.array(COLUMNS["prompt"])], names=["a", "b"])
    path = arrow_file(tmp_path / "rows.arrow", {"prompt": ["a", "b", "c"], "answer": ["1", "2", "3"], "x": texts})
    offsets = struct.pack("<4i", 0, 7001, 14002, 14003)
    path.write_bytes(path.read_bytes().replace(offsets, struct.pack("<4i", 0, 1 << 30, 14002, 14003)))
    code, said = read_apart(path, "guarded")
    assert (code, said.count("rows.arrow is damaged: column 'x': Offset invariant failure")) == (0, 1), said


def test_an_arrow_file_that_is_written_anew_under_a_run_is_refused_at_the_next_read(tmp_path: Path) -> None:
    """Control: without the check the process dies of SIGBUS."""
    columns = {"prompt": [f"{n}" + "y" * 999 for n in range(500)], "answer": ["1"] * 500}
    code, said = read_apart(arrow_file(tmp_path / "rows.arrow", columns), "guarded", "truncate")
    assert (code, said.count("rows.arrow was changed while it was in use")) == (0, 1), said
    assert read_apart(arrow_file(tmp_path / "rows.arrow", columns), "control", "truncate")[0] < 0


def test_one_value_that_is_not_utf8_is_a_fault_of_its_row_and_not_of_the_file(tmp_path: Path) -> None:
    path = arrow_file(tmp_path / "rows.arrow", {"prompt": not_utf8(), "answer": ["1", "2", "3"]})
    dataset = opened(path, bad_rows="skip")
    assert [row.prompt for row in everything(dataset)] == ["a", "c"]
    assert dataset.document()["read"]["train"]["left_out"].keys() == {"not-utf8"}


def test_a_large_packed_arrow_file_is_unpacked_once_and_takes_no_memory(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"prompt": [f"{n}" + "y" * 999 for n in range(2000)], "answer": ["1"] * 2000}
    feather.write_feather(pa.table(columns), tmp_path / "rows.arrow", compression="lz4", chunksize=100)
    before = pa.total_allocated_bytes()
    small = opened(tmp_path / "rows.arrow")
    assert pa.total_allocated_bytes() - before > 1_900_000, "which a small one may"
    rows = [row.prompt for row in everything(small)]
    del small
    monkeypatch.setattr(content, "SMALL", 1000)
    before = pa.total_allocated_bytes()
    for _ in range(2):
        large = opened(tmp_path / "rows.arrow")
        assert pa.total_allocated_bytes() - before < 100_000
        assert [row.prompt for row in everything(large)] == rows
    assert len([*cache.glob("*/rows.arrow")]) == 1


@pytest.mark.parametrize("damage", ["shorter", "gone"])
def test_what_is_kept_and_no_longer_whole_is_made_anew(tmp_path: Path, cache: Path, damage: str) -> None:
    """A machine that loses power leaves files of the right name and no length: half of the places would be half of the
    rows, and nobody would know."""
    (tmp_path / "rows").write_text("x")
    made: list[Path] = []

    def make(folder: Path) -> None:
        (folder / "places").write_bytes(b"12345678" * 4)
        made.append(folder)

    folder = kept([tmp_path / "rows"], "what", make)
    assert kept([tmp_path / "rows"], "what", make) == folder
    assert len(made) == 1
    if damage == "gone":
        (folder / "places").unlink()
    else:
        os.truncate(folder / "places", 16)
    assert kept([tmp_path / "rows"], "what", make) == folder
    assert (folder / "places").stat().st_size == 32
    assert len(made) == 2


def test_what_could_not_be_made_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "rows").write_text("x")

    def fills_the_disk(folder: Path) -> None:
        (folder / "half").write_bytes(b"x" * 1000)
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match="No space left on device"):
        kept([tmp_path / "rows"], "what", fills_the_disk)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_file_that_changes_while_it_is_looked_at_is_refused(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "rows"
    file.write_text("x")

    def make(folder: Path) -> None:
        file.write_text("other")

    with pytest.raises(DataError, match=r"rows was changed while it was read"):
        kept([file], "what", make)
    assert not [*cache.glob(f"*/{SOURCE}")]
    file.unlink()
    with pytest.raises(DataError, match=r"rows cannot be read: No such file"):
        kept([file], "what", lambda folder: None)


def test_what_a_process_was_killed_over_is_made_anew(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "rows").write_text("x")
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from asyncrl.data.kept import kept\n"
        "def make(folder):\n"
        "    (folder / 'places').write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "kept([Path(sys.argv[1])], 'what', make)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "rows")]
    killed = subprocess.run(command, check=False, timeout=LIMIT_S, env=os.environ.copy())
    assert killed.returncode == -signal.SIGKILL

    def make(folder: Path) -> None:
        (folder / "places").write_bytes(b"whole")

    folder = kept([tmp_path / "rows"], "what", make)
    assert (folder / "places").read_bytes() == b"whole"
    assert keeping.SIZES in {path.name for path in folder.iterdir()}


def test_the_lines_that_a_stray_quote_takes_in_are_counted(tmp_path: Path) -> None:
    """A cell in quotes may have line ends, so a quote that is not closed takes all that follow to the next one."""
    path = tmp_path / "rows.csv"
    path.write_text("prompt,answer\na,1\nb,2\n" + '5" disk,3\n' + "c,4\n" * 40 + '6" disk,5\nd,6\n')
    dataset = opened(path, bad_rows="skip")
    assert [row.prompt for row in everything(dataset)] == ["a", "b", "d"]
    found = dataset.document()["read"]["train"]["left_out"]["not-csv"]
    assert found["rows"] == 42
    assert "rows.csv:3: not CSV: a line end outside of quotes, in 42 lines from one quote to another" in found["first"]
    path.write_text('prompt,answer\na,1\nb,2\n"open,3\n' + "c,4\n" * 99)
    dataset = opened(path, bad_rows="skip")
    assert "; left out: 100" in dataset.line()


def test_shards_of_a_saved_dataset_may_have_other_columns(tmp_path: Path) -> None:
    """A column that only a later one has is not lost, one that it lacks is named by its row."""
    folder = tmp_path / "saved"
    folder.mkdir()
    shards: list[dict[str, Any]] = [
        {"prompt": ["a", "b"], "answer": ["1", "2"]},
        {"prompt": ["c"], "answer": ["3"], "level": [7]},
        {"prompt": ["d"]},
        {"prompt": ["e"], "answer": [5], "level": [b"bytes"]},
    ]
    names = [arrow_file(folder / f"{n}.arrow", columns).name for n, columns in enumerate(shards)]
    listed = ", ".join(f'{{"filename": "{name}"}}' for name in names)
    (folder / "state.json").write_text(f'{{"_data_files": [{listed}]}}')
    dataset = opened(folder, bad_rows="skip")
    found = {row.id: (row.prompt, row.answer, dict(row.info)) for row in everything(dataset)}
    assert found == {
        "saved:1": ("a", "1", {}),
        "saved:2": ("b", "2", {}),
        "saved:3": ("c", "3", {"level": 7}),
        "saved:5": ("e", "5", {}),
    }
    assert dataset.warnings[0].endswith("are left out: level (binary)")
    assert "left out (missing-column): " in dataset.warnings[1]
    assert "saved:4: no column 'answer'" in dataset.warnings[1]
    (folder / "state.json").write_text(f'{{"_data_files": [{listed}], "_indices_data_files": [{{"filename": "i"}}]}}')
    with pytest.raises(DataError, match=r"saved with a choice of rows beside its files.*call flatten_indices\(\)"):
        opened(folder)
