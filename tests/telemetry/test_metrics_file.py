"""metrics.jsonl: strict JSON, whole lines, going on after a resume or a kill."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.telemetry.metrics import MetricsWriter, read_metrics, surviving_steps


def write(path: Path, *records: dict[str, Any]) -> None:
    writer = MetricsWriter(path)
    for record in records:
        writer.write(record)
    writer.close()


def strict(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    record = {
        "step": 1,
        "reward/mean": 0.5,
        "skipped": False,
        "age/tokens": {"0": 3},
        "pass_rate": [0, 1],
        "waiting": "é",
    }
    write(tmp_path / "run" / "metrics.jsonl", record, {"event": "end"})
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == [record, {"event": "end"}]


def test_nan_and_infinity_become_null_and_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(
        path, {"loss": math.nan, "by_age": {"0": {"ess": math.inf, "kl": 0.1}}, "list": [1.0, -math.inf]}, {"loss": 1.0}
    )
    first, second = (json.loads(line, parse_constant=strict) for line in path.read_text().splitlines())
    assert first == {
        "loss": None,
        "by_age": {"0": {"ess": None, "kl": 0.1}},
        "list": [1.0, None],
        "nonfinite_values": 3,
    }
    assert second == {"loss": 1.0}


def test_numpy_and_torch_scalars_and_enums_are_plain_values(tmp_path: Path) -> None:
    class State(StrEnum):
        HELD = "held"

    path = tmp_path / "metrics.jsonl"
    write(
        path,
        {"a": np.float32(0.5), "b": np.int64(3), "c": torch.tensor(2.0), "d": {State.HELD: np.True_}, "e": State.HELD},
    )
    assert read_metrics(path) == [{"a": 0.5, "b": 3, "c": 2.0, "d": {"held": True}, "e": "held"}]
    write(path, {"f": np.float32(math.nan)})
    assert read_metrics(path)[1] == {"f": None, "nonfinite_values": 1}


def test_what_is_no_metric_is_refused_by_name_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    with pytest.raises(TypeError, match=r"metric ratio\.all is a ndarray"):
        writer.write({"step": 1, "ratio": {"all": np.zeros(2)}})
    writer.close()
    assert path.read_bytes() == b""


def test_each_record_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in range(3):
        writer.write({"step": step})
        assert len(read_metrics(path)) == step + 1
    writer.close()


def test_a_reopened_file_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1})
    write(path, {"step": 2})
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("torn", ['{"step": 2, "rew', "x" * 10_000])
def test_a_torn_last_line_is_not_read_and_does_not_spoil_the_next(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1})
    with path.open("a") as file:
        file.write(torn)
    assert read_metrics(path) == [{"step": 1}]
    write(path, {"step": 2})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_a_file_that_is_one_torn_line_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"st')
    write(path, {"step": 1})
    assert read_metrics(path) == [{"step": 1}]


@pytest.mark.parametrize("broken", ['{"step": 1}{"step": 2}', "[1]", ""])
def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{broken}\n{{"step": 3}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: "):
        read_metrics(path)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(records=st.lists(st.dictionaries(st.text(), JSON, max_size=4), max_size=4))
def test_any_json_object_round_trips(tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    write(path, *records)
    assert read_metrics(path) == records


def test_steps_done_again_after_a_resume_replace_what_followed_the_checkpoint() -> None:
    first = [{"step": step, "lineage": 1} for step in range(1, 6)]
    second = [{"step": step, "lineage": 2} for step in range(3, 5)]
    records = [{"event": "start"}, *first, {"event": "start"}, *second]
    assert surviving_steps(records) == [*first[:2], *second]


def test_telemetry_loads_neither_torch_nor_rich_for_reading_metrics() -> None:
    code = "import sys, asyncrl.telemetry.metrics as m; print(sorted({'torch', 'rich', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout == "[]\n"
