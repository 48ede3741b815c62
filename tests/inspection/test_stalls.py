"""Runs that do not move, with real processes: `asyncrl status` names who is late, and the run ends with that table."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from asyncrl.buffers.server import EmbeddedServer
from asyncrl.buffers.store import open_store
from asyncrl.config.convert import convert
from asyncrl.config.identity import recipe_hash
from asyncrl.config.recipe import to_builtins
from asyncrl.learners.limits import limits_of

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(200)]

START_S = 90.0
"""Making the built-in model, once, and importing torch on two busy cores."""

NO_PROGRESS_S = 12
SHORT = ("collector.score_timeout_s=2", "collector.group_timeout_s=5", f"run.no_progress_s={NO_PROGRESS_S}")


def sets(*keys: str) -> list[str]:
    return [word for key in keys for word in ("--set", key)]


def until(condition: Callable[[], object], *, within: float) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def steps(working: Path) -> int:
    return sum(file.read_text().count('"step"') for file in working.glob("runs/*/metrics.jsonl"))


def child(parent: int, role: str) -> psutil.Process:
    return next(process for process in psutil.Process(parent).children() if role in process.cmdline())


def test_a_collector_that_is_stopped_is_named_and_goes_on_when_it_is_continued(begin, cli, tmp_path):
    run = begin("run", *sets("run.max_steps=500"))
    until(lambda: steps(tmp_path) >= 2, within=START_S)
    before = cli("status").stdout
    assert "a sign of life" not in before, "as long as nobody is late nobody is named"
    stopped = child(run.pid, "collector")
    stopped.suspend()
    shown = ""

    def named() -> bool:
        nonlocal shown
        shown = cli("status").stdout
        return "a sign of life" in shown and "leasing" in shown

    until(named, within=40)
    (row,) = [line for line in shown.splitlines() if "a sign of life" in line]
    assert row.startswith("collector-0")
    assert f"its process, {stopped.pid} on {socket.gethostname()}, which is stopped" in row
    assert any(line.startswith("learner      ") and "collector" in line for line in shown.splitlines()), shown
    made = steps(tmp_path)
    stopped.resume()
    until(lambda: steps(tmp_path) > made, within=60)


def test_a_run_without_a_collector_says_so_and_ends_with_the_table(begin, cli, tmp_path):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    url = f"redis://127.0.0.1:{port}"
    begin("buffer", "serve", "--listen", f"127.0.0.1:{port}")
    learner = None

    def started() -> bool:
        nonlocal learner
        learner = learner or begin("learner", "--buffer", url, *sets(*SHORT))
        assert learner.poll() is None, learner.communicate()
        return "leasing step 1" in cli("status", "--buffer", url).stdout

    until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, within=20)
    until(started, within=START_S)
    shown = cli("status", "--buffer", url).stdout
    assert "no collector is connected" in shown
    assert any(line.startswith("learner ") and "a collector to join" in line for line in shown.splitlines()), shown
    out, err = learner.communicate(timeout=NO_PROGRESS_S + 60)
    assert learner.returncode == 1, out + err
    error = err[err.rindex("Error: ") :]
    assert "(run.no_progress_s); step 1 waits: a collector to join" in error
    assert "who      waits for" in error
    assert "learner  a collector to join (none is connected)" in error
    assert "Traceback" in err, "the log says where"
    ended = cli("status", "--buffer", url)
    assert ended.returncode == 0, ended.stderr
    assert "ended with an error" in ended.stdout.splitlines()[0]
    assert "it failed: LearnerError: no step for" in ended.stdout
    assert ended.stdout.splitlines()[-1].startswith("learner  a collector to join")


def test_a_run_whose_collector_was_killed_ends_with_the_table_though_it_had_moved(begin, tmp_path):
    run = begin("run", *sets("run.max_steps=500", *SHORT))
    until(lambda: steps(tmp_path) >= 2, within=START_S)
    moved = time.monotonic()
    until(lambda: time.monotonic() > moved + NO_PROGRESS_S, within=2 * NO_PROGRESS_S)
    assert run.poll() is None, "the limit is counted from the last step: a run that moves goes on"
    stopped = child(run.pid, "collector")
    stopped.suspend()
    try:
        out, err = run.communicate(timeout=NO_PROGRESS_S + 60)
    finally:
        stopped.send_signal(signal.SIGKILL) if stopped.is_running() else None
    assert run.returncode == 1, out + err
    assert "(run.no_progress_s)" in err
    assert "who          waits for" in err
    assert f"its process, {stopped.pid} on {socket.gethostname()}, which is stopped" in err
    assert f"collector-0, process {stopped.pid}, is stopped" in err
    assert err.startswith("Error: the learner failed: LearnerError: no step for")
    assert "Traceback" not in err


def test_weights_that_are_never_published_are_named(begin, cli, tmp_path):
    recipe = convert(
        {
            "run": {"name": "unpublished", "no_progress_s": 20.0},
            "collector": {
                "engine": {"type": "simulated", "slots": 8},
                "group_size": 2,
                "group_timeout_s": 5.0,
                "score_timeout_s": 2.0,
            },
            "learner": {"groups_per_step": 2},
        }
    )
    server = EmbeddedServer(tmp_path / "store")
    asyncio.run(server.start())

    async def create() -> None:
        store = await open_store(server.url)
        await store.create_run(
            "unpublished",
            recipe=to_builtins(recipe),
            recipe_hash=recipe_hash(recipe),
            limits=limits_of(recipe, max_length=64),
        )
        await store.close()

    try:
        asyncio.run(create())
        collector = begin("collector", "--buffer", server.url, "--run", "unpublished", "--name", "c0")

        def shown() -> str:
            said = cli("status", "--buffer", server.url, "--run", "unpublished")
            assert said.returncode == 0, said.stderr
            return said.stdout

        until(lambda: "weights, of which none were announced" in shown(), within=60)
        found = shown()
        assert any(line.startswith("c0 ") and line.endswith("a learner") for line in found.splitlines()), found
        assert "learner          never started" in found
        _, err = collector.communicate(timeout=80)
        assert collector.returncode == 1, err
        assert "nothing to do for 2" in err
        assert "c0   weights, of which none were announced" in err
    finally:
        asyncio.run(server.stop())
