"""A sink that is slow, raises, hangs or dies: one line about it, and nothing else changes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from asyncrl.config.errors import RecipeError
from asyncrl.config.recipe import Recipe, Telemetry, Wandb
from asyncrl.runtime import sinks
from asyncrl.runtime.sink_process import SAID, Courier, pass_on
from asyncrl.runtime.sinks import Sinks
from asyncrl.runtime.tail import JsonLines
from asyncrl.telemetry.metrics import MetricsWriter, read_metrics

STEPS = 20
LIMIT_S = 30.0


class Collecting:
    """A sink that keeps what it gets; `stuck` blocks it in the named call until the test ends. `far`: it is stuck in
    `log`, or has everything."""

    def __init__(self, *, stuck: str = "", raises: bool = False) -> None:
        self.got: list[int] = []
        self.closed = False
        self.far = threading.Event()
        self.release = threading.Event()
        self._stuck, self._raises = stuck, raises

    def log(self, point) -> None:
        if self._raises:
            raise ConnectionError("the server is down\nwith details")
        if self._stuck == "log" and self.got:
            self.far.set()
            self.release.wait(LIMIT_S)
        self.got.append(point.at)
        if len(self.got) == STEPS:
            self.far.set()

    def close(self) -> None:
        if self._stuck == "close":
            self.release.wait(LIMIT_S)
        self.closed = True


def written(folder: Path) -> JsonLines:
    writer = MetricsWriter(folder / "metrics.jsonl")
    for step in range(1, STEPS + 1):
        writer.write({"step": step, "loss": 0.5})
    writer.close()
    return JsonLines(folder / "metrics.jsonl")


async def delivered(
    sink: Collecting, lines: JsonLines, *, ends: str = "at once", close_s: float = LIMIT_S
) -> tuple[int, list[str]]:
    """Exit code of a sink's process around `sink`, and what it said. `ends`: of the run, at once, when the sink is
    `far`, or never."""
    said: list[str] = []
    stop = asyncio.Event()

    async def end() -> None:
        if ends == "far":
            assert await asyncio.to_thread(sink.far.wait, LIMIT_S)
        if ends != "never":
            stop.set()

    ending = asyncio.create_task(end())
    try:
        async with asyncio.timeout(2 * LIMIT_S):
            code = await pass_on(Courier(lambda: sink, lines), stop, close_s=close_s, say=said.append)
    finally:
        sink.release.set()  # its thread is waited for when the loop closes
    await ending
    return code, said


@pytest.mark.asyncio
async def test_everything_is_delivered_in_order_also_what_is_written_just_before_the_end(tmp_path):
    sink = Collecting()
    assert await delivered(sink, written(tmp_path)) == (0, [])
    assert sink.got == list(range(1, STEPS + 1))
    assert sink.closed


@pytest.mark.asyncio
async def test_a_slow_sink_is_given_up_after_the_run_and_what_it_missed_is_counted(tmp_path):
    code, (line,) = await delivered(Collecting(stuck="log"), written(tmp_path), ends="far", close_s=0.1)
    assert code == SAID
    assert line.startswith(f"{STEPS - 1} records were not delivered")


def test_without_the_limit_a_stuck_sink_is_waited_for(tmp_path):
    """The control: what the limit above guards against."""
    sink = Collecting(stuck="log")
    courier = Courier(lambda: sink, written(tmp_path))
    courier.stop.set()
    working = threading.Thread(target=courier.work)
    working.start()
    working.join(1.0)
    assert working.is_alive()
    sink.release.set()
    working.join(10)
    assert not working.is_alive()


@pytest.mark.asyncio
async def test_a_sink_whose_close_hangs_is_given_up(tmp_path):
    code, (line,) = await delivered(Collecting(stuck="close"), written(tmp_path), ends="far", close_s=1.0)
    assert code == SAID
    assert line.startswith("it did not close within")


@pytest.mark.asyncio
async def test_a_sink_that_raises_gets_nothing_more_and_is_said_in_one_line(tmp_path):
    code, (line,) = await delivered(Collecting(raises=True), written(tmp_path), ends="never")
    assert code == SAID
    assert line.startswith("ConnectionError: the server is down;")


def recipe(**telemetry) -> Recipe:
    return Recipe(telemetry=Telemetry(**telemetry))


def test_a_sink_whose_package_is_missing_is_refused_with_the_command_that_helps(monkeypatch, tmp_path):
    monkeypatch.setitem(sinks.PACKAGES, "tensorboard", "no_such_package")
    with pytest.raises(RecipeError, match=r"pip install 'asyncrl\[tensorboard\]'"):
        sinks.check(Telemetry(tensorboard=True))
    sinks.check(Telemetry())
    (tmp_path / "no_such_package").mkdir()  # a folder without code, such as wandb makes in the working folder
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(RecipeError):
        sinks.check(Telemetry(tensorboard=True))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


async def until(condition, seconds: float = 40) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (another process sets no event here)
            await asyncio.sleep(0.05)


@pytest.mark.asyncio
async def test_a_real_sink_follows_the_file_in_a_process_of_its_own(folder):
    watched = Sinks(recipe(tensorboard=True), folder, resume=False)
    await watched.start()
    await until(lambda: list((folder / "tensorboard").glob("*")))
    written(folder)
    assert await watched.close() == []
    (file,) = (folder / "tensorboard").iterdir()
    assert file.read_bytes().count(b"loss") == STEPS


@pytest.mark.asyncio
async def test_a_sink_whose_run_ends_while_it_is_still_starting_delivers_everything(folder):
    """Found by a slow machine: SIGTERM ended the process before it could take signals, and with it the records."""
    watched = Sinks(recipe(tensorboard=True), folder, resume=False)
    await watched.start()
    written(folder)
    assert await watched.close() == []
    (file,) = (folder / "tensorboard").iterdir()
    assert file.read_bytes().count(b"loss") == STEPS


@pytest.mark.asyncio
async def test_a_resumed_run_passes_on_only_what_is_new(folder):
    written(folder)
    watched = Sinks(recipe(tensorboard=True), folder, resume=True)
    writer = MetricsWriter(folder / "metrics.jsonl")
    writer.write({"step": STEPS + 1, "loss": 0.5})
    writer.close()
    await watched.start()
    await until(lambda: list((folder / "tensorboard").glob("*")))
    assert await watched.close() == []
    (file,) = (folder / "tensorboard").iterdir()
    assert file.read_bytes().count(b"loss") == 1


@pytest.mark.asyncio
async def test_a_sink_that_cannot_be_opened_is_said_once_and_the_file_is_complete(folder, monkeypatch):
    """wandb's place is taken by a module that raises on import."""
    (folder / "wandb.py").write_text("raise RuntimeError('broken install')\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    watched = Sinks(recipe(wandb=Wandb(), tensorboard=True), folder, resume=False)
    await watched.start()
    written(folder)
    news: list[str] = []
    await until(lambda: news.extend(watched.news()) or news)
    news += await watched.close()
    assert len(news) == 1
    assert news[0].startswith("wandb: RuntimeError: broken install;")
    assert len(read_metrics(folder / "metrics.jsonl")) == STEPS
    (file,) = (folder / "tensorboard").iterdir()  # the other sink is not touched
    assert file.read_bytes().count(b"loss") == STEPS


@pytest.mark.faults
@pytest.mark.asyncio
async def test_a_killed_sink_is_said_once(folder):
    watched = Sinks(recipe(tensorboard=True), folder, resume=False)
    await watched.start()
    await until(lambda: list((folder / "tensorboard").glob("*")))
    os.kill(watched._watched[0].child.pid, signal.SIGKILL)
    news: list[str] = []
    await until(lambda: news.extend(watched.news()) or news)
    assert await watched.close() == []
    assert len(news) == 1
    assert "ended with code -9" in news[0]


@pytest.mark.asyncio
async def test_no_sink_no_process(folder):
    watched = Sinks(recipe(), folder, resume=False)
    await watched.start()
    assert await watched.close() == []
    assert list((folder / "logs").iterdir()) == []


BROKEN_WANDB = """
import threading

class Error(Exception):
    pass

def Settings(**settings):
    return settings

class Run:
    offline = False

    def define_metric(self, name, step_metric=None):
        pass

    def log(self, data):
        {log}

    def finish(self):
        {finish}

def init(**arguments):
    return Run()
"""
HANG, FINE = "threading.Event().wait()", "pass"


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("log", "finish", "said"),
    [
        ("raise ConnectionResetError('gone')", FINE, "wandb: ConnectionResetError: gone"),
        (HANG, FINE, "records were not delivered within 15 s"),
        (FINE, HANG, "wandb: it did not close within 15 s"),
    ],
    ids=["raises", "hangs", "hangs when closed"],
)
def test_a_run_with_a_broken_sink_trains_as_it_would_without(start, tmp_path, log, finish, said):
    (tmp_path / "wandb.py").write_text(BROKEN_WANDB.format(log=log, finish=finish))
    keys = ("run.max_steps=4", "eval.prompts=8", "run.output_dir=out", "telemetry.wandb={}")
    settings = [argument for key in keys for argument in ("--set", key)]
    process = start("-m", "asyncrl.cli.main", "run", *settings, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert [line for line in out.splitlines() if line.startswith("wandb: ")] != []
    assert sum(said in line for line in out.splitlines()) == 1
    records = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [record["step"] for record in records if "event" not in record] == [1, 2, 3, 4]
    assert [record["event"] for record in records if "event" in record][-1] == "end"
