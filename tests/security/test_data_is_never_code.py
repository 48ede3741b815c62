"""What comes out of a store is data: validated, never unpickled, and no module of asyncrl could unpickle it."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pyarrow as pa
import pytest

from asyncrl.schema import SCHEMA, decode

ROOT = Path(__file__).parents[2]
FOLDERS = ("asyncrl", "buffers", "collectors", "learners")
EXECUTES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
"""Modules whose loaders run what they read."""


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return (Path.touch, (self.mark,))


def arrow_stream(schema: pa.Schema) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch([pa.nulls(1, field.type) for field in schema], schema=schema))
    return bytes(sink.getvalue())


def test_a_pickle_is_refused_and_does_not_run(tmp_path: Path) -> None:
    payload = pickle.dumps(Trap(tmp_path / "ran"))
    with pytest.raises(ValueError, match="not a whole Arrow stream"):
        decode(payload)
    assert not (tmp_path / "ran").exists()
    pickle.loads(payload)
    assert (tmp_path / "ran").exists(), "the trap works"


def test_a_pickle_inside_an_arrow_type_is_refused_and_does_not_run(tmp_path: Path) -> None:
    """Arrow has a type that carries the pickle of a Python class; pyarrow once loaded it (CVE-2023-47248)."""
    trap = pickle.dumps(Trap(tmp_path / "ran"))
    marks = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": trap}
    fields = list(SCHEMA)
    fields[0] = fields[0].with_metadata(marks)
    payload = arrow_stream(pa.schema(fields, metadata=SCHEMA.metadata))
    with pytest.raises(ValueError):
        decode(payload)
    assert not (tmp_path / "ran").exists()


def calls_that_execute(source: str) -> list[str]:
    """Imports of such modules, and `torch.load` without weights_only=True."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in EXECUTES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in EXECUTES:
            found.append(node.module or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
            found += [] if safe else [ast.unparse(node)]
    return found


def test_no_module_of_asyncrl_loads_what_runs() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).resolve().rglob("*.py")]
    assert len(files) > 100
    assert {str(path): found for path in files if (found := calls_that_execute(path.read_text()))} == {}


@pytest.mark.parametrize("source", ["import pickle", "from dill import loads", "torch.load(path)"])
def test_one_that_did_would_be_seen(source: str) -> None:
    assert calls_that_execute(source)
