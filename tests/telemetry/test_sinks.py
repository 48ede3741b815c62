"""What sinks get, and that what they write can be read."""

from __future__ import annotations

import struct
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from asyncrl.config.recipe import Wandb
from asyncrl.telemetry.sinks.base import point
from asyncrl.telemetry.sinks.tensorboard import TensorboardSink

STEP = {
    "step": 3,
    "version": 3,
    "time": 1e9,
    "reward/mean": 0.5,
    "loss": None,
    "skipped": False,
    "waiting": "groups",
    "age/tokens": {"0": 8, "1": 2},
    "by_age": {"0": {"ess": 0.9}},
    "pass_rate": [1, 0],
}
EVALUATION = {"event": "eval", "version": 0, "success": 0.25, "n": 128, "unscored": 0, "path": "eval/eval-1-0.json"}


def test_nested_numbers_have_the_names_of_the_file_joined_by_slashes():
    found = point(STEP)
    assert (found.axis, found.at, found.time) == ("step", 3, 1e9)
    assert found.values == {
        "step": 3,
        "version": 3,
        "reward/mean": 0.5,
        "skipped": 0,
        "age/tokens/0": 8,
        "age/tokens/1": 2,
        "by_age/0/ess": 0.9,
        "pass_rate/0": 1,
        "pass_rate/1": 0,
    }


def test_evaluations_have_an_axis_of_their_own_and_other_events_are_no_points():
    found = point(EVALUATION)
    assert (found.axis, found.at) == ("eval/version", 0)
    assert found.values == {"eval/version": 0, "eval/success": 0.25, "eval/n": 128, "eval/unscored": 0}
    measured = point({**EVALUATION, "metrics": {"pass@1": 0.5, "wrong/malformed": 0.25}})
    assert (measured.values["eval/pass@1"], measured.values["eval/wrong/malformed"]) == (0.5, 0.25)
    assert point({"event": "start", "lineage": 1}) is None


def events(file: Path) -> Iterator[Event]:
    """The records of an event file: length, its checksum, the message, its checksum (TFRecord)."""
    data = file.read_bytes()
    while data:
        (length,) = struct.unpack_from("<Q", data)
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_tensorboards_event_files_hold_every_number_at_its_step(tmp_path):
    sink = TensorboardSink(tmp_path)
    for record in (STEP, EVALUATION):
        sink.log(point(record))
    sink.close()
    (file,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    found = {
        value.tag: (event.step, value.simple_value, event.wall_time)
        for event in events(file)
        for value in event.summary.value
    }
    assert found["age/tokens/1"] == (3, 2.0, 1e9)
    assert found["by_age/0/ess"][1] == pytest.approx(0.9)
    assert found["eval/success"][:2] == (0, 0.25)
    assert set(found) == {*point(STEP).values, *point(EVALUATION).values}


class Double(types.ModuleType):
    """A stand-in for the package wandb, with the documented signatures that the sink uses: `init`, `teardown`,
    `Settings`, `Error`; of a run `define_metric`, `log`, `finish`, `dir`, `offline`."""

    class Error(Exception):
        pass

    def __init__(self, *, reachable: bool) -> None:
        super().__init__("wandb")
        self.reachable = reachable
        self.calls: list[dict[str, Any]] = []
        self.logged: list[dict[str, float]] = []
        self.axes: dict[str, str] = {}
        self.finished = False
        self.taken = ""  # the id that wandb's service holds, also after an `init` that failed

    def Settings(self, *, init_timeout: float, console: str, silent: bool) -> dict[str, Any]:
        return {"init_timeout": init_timeout, "console": console, "silent": silent}

    def init(
        self,
        *,
        project=None,
        entity=None,
        dir=None,
        id=None,
        name=None,
        config=None,
        mode=None,
        resume=None,
        settings=None,
    ):
        self.calls.append({"project": project, "id": id, "mode": mode, "config": config, "name": name})
        if self.taken == id:
            raise self.Error(f"run ID {id} is in use")
        self.taken = id
        if mode != "offline" and not self.reachable:
            raise self.Error("api_key not configured (no-tty)\ncall wandb.login")
        self.offline = mode == "offline"
        self.dir = f"{dir}/wandb/offline-run-1/files" if self.offline else f"{dir}/wandb/run-1/files"
        return self

    def teardown(self) -> None:
        self.taken = ""

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self.logged.append(data)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Open the sink over a double; returns it, the double and what was said."""

    def opened(*, reachable: bool, mode: str = "online"):
        double, said = Double(reachable=reachable), []
        monkeypatch.setitem(sys.modules, "wandb", double)
        monkeypatch.delitem(sys.modules, "asyncrl.telemetry.sinks.wandb", raising=False)
        from asyncrl.telemetry.sinks.wandb import WandbSink

        sink = WandbSink(Wandb(mode=mode), folder=tmp_path, recipe={"run": {"seed": 0}}, say=said.append)
        return sink, double, said

    yield opened
    sys.modules.pop("asyncrl.telemetry.sinks.wandb", None)  # it holds the double


def test_wandb_gets_the_same_numbers_on_axes_that_late_evaluations_and_resumed_runs_may_use(opened, tmp_path):
    sink, double, said = opened(reachable=True)
    sink.log(point(STEP))
    sink.log(point(EVALUATION))
    sink.close()
    assert double.logged == [point(STEP).values, point(EVALUATION).values]
    assert double.axes == {"*": "step", "eval/*": "eval/version"}
    assert double.calls[0]["project"] == "asyncrl"
    assert double.calls[0]["config"] == {"run": {"seed": 0}}
    assert double.finished
    assert said == []


def test_a_resumed_run_is_the_same_wandb_run(opened, tmp_path):
    (tmp_path / "wandb-run-id").touch()  # a start that was killed before it wrote
    _, first, _ = opened(reachable=True)
    _, second, _ = opened(reachable=True)
    assert first.calls[0]["id"] == second.calls[0]["id"] != ""


def test_wandb_without_a_key_or_network_records_offline_and_says_so_in_one_line(opened, tmp_path):
    sink, double, said = opened(reachable=False)
    sink.log(point(STEP))
    assert [call["mode"] for call in double.calls] == [None, "offline"]
    assert double.logged
    (line,) = said
    assert "api_key not configured" in line
    assert f"wandb sync {tmp_path}/wandb/offline-run-1" in line
    assert "\n" not in line


def test_wandb_that_is_asked_to_be_offline_reaches_for_no_server(opened):
    _, double, (line,) = opened(reachable=True, mode="offline")
    assert [call["mode"] for call in double.calls] == ["offline"]
    assert "mode is offline" in line
