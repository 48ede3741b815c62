from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys

import click
import pytest

from asyncrl.benchmarks import BENCHMARKS
from asyncrl.benchmarks.frame import Result, Target, machine, options_of, run
from asyncrl.cli.bench import bench
from asyncrl.cli.errors import Failure


@pytest.mark.parametrize(
    ("value", "better", "met"),
    [
        (0.9, "higher", True),
        (0.89, "higher", False),
        (0.9, "lower", True),
        (0.91, "lower", False),
        (None, "lower", False),
    ],
)
def test_a_target_is_met_at_its_number_and_never_without_one(value: float | None, better: str, met: bool) -> None:
    assert Target("share", value, 0.9, better).met is met  # type: ignore[arg-type]


def test_a_result_is_written_with_everything_needed_to_compare_it() -> None:
    met, missed = Target("a", 1.0, 0.5, "higher"), Target("b", 1.0, 0.5, "lower")
    result = Result("x", machine(), {"python": "3"}, "asyncrl bench x", [{"k": 1, "policy": "wait"}], [met, missed])
    document = json.loads(json.dumps(result.document(), allow_nan=False))
    assert list(document) == ["name", "machine", "versions", "command", "rows", "targets"]
    assert document["rows"] == [{"k": 1, "policy": "wait"}]
    assert document["targets"][1] == {"name": "b", "value": 1.0, "target": 0.5, "better": "lower", "met": False}
    assert result.missed == [missed]
    assert document["machine"]["cores"] >= 1


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_the_one_function_that_is_called(name: str) -> None:
    module = importlib.import_module(BENCHMARKS[name][0])
    first, second, *options = inspect.signature(module.measure).parameters.values()
    assert [first.name, second.name] == ["quick", "say"]
    assert options_of(name) == {option.name for option in options}
    assert all(option.default is not option.empty for option in options)
    assert module.__doc__


def test_an_unknown_name_is_not_run() -> None:
    with pytest.raises(KeyError):
        run("first-walk", quick=True, command="", say=lambda line: None)


def test_the_list_of_benchmarks_loads_nothing_heavy() -> None:
    code = (
        "import sys, asyncrl.benchmarks, asyncrl.benchmarks.frame\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("asyncrl.benchmarks.frame.run", measured)
    for name in ("honest-ages", "all"):
        with pytest.raises(click.UsageError, match=f"--plot is an option of staleness, {name} has no picture"):
            bench.main([name, "--plot", "x.png"], standalone_mode=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Failure, match=r"pip install 'asyncrl\[plot\]'"):
        bench.main(["staleness", "--plot", "x.png"], standalone_mode=False)
