"""`asyncrl run` whose store is killed, goes back in time, or loses everything. Each wait has a hard limit."""

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import redis

from asyncrl.buffers.server import EmbeddedServer
from asyncrl.runtime import restarts
from asyncrl.runtime.restarts import LIMIT
from asyncrl.runtime.store_keeper import StoreKeeper

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

END_S = 120.0

FORGETS_TO_RECOVER = """
import asyncrl.learners.lasting as lasting
lasting.is_behind = lambda store, own: False
"""


def store_of(run) -> psutil.Process:
    """The running store among the children of a run."""
    return next(p for p in psutil.Process(run.process.pid).children() if "valkey-server" in p.cmdline()[0])


def has_store(run) -> bool:
    return any(p.cmdline() and "valkey-server" in p.cmdline()[0] for p in psutil.Process(run.process.pid).children())


def files_of(run) -> Path:
    return run.folder / "store" / "appendonlydir"


def reaches(run, eventually, step: int) -> None:
    assert eventually(END_S, lambda: len(run.steps()) >= step or run.process.poll() is not None)
    assert run.process.poll() is None, run.process.communicate()


def ends_well(run, steps: int) -> str:
    out, err = run.process.communicate(timeout=END_S)
    assert run.process.returncode == 0, out + err
    assert run.steps() == list(range(1, steps + 1)), "each step is made once"
    return out


def is_clean(run, start) -> None:
    audit = start("-m", "asyncrl.cli.main", "buffer", "audit", cwd=run.working)
    out, err = audit.communicate(timeout=END_S)
    assert audit.returncode == 0, out + err


def recovered(run) -> list[dict]:
    return [record for record in run.records() if record.get("event") == "recovered"]


@pytest.mark.slow
def test_a_store_that_is_killed_again_and_again_loses_nothing_and_nobody(begin, start, eventually):
    run = begin(max_steps=40)
    processes = {role: run.child(role).pid for role in ("learner", "collector")}
    where = json.loads((run.folder / "store.json").read_text())["url"]
    for _ in range(3):
        step = len(run.steps())
        assert eventually(20, lambda: has_store(run))
        store_of(run).send_signal(signal.SIGKILL)
        reaches(run, eventually, step + 3)
    assert json.loads((run.folder / "store.json").read_text())["url"] == where
    assert {role: run.child(role).pid for role in processes} == processes, "nobody else had to start again"
    out = ends_well(run, 40)
    assert out.count("the store ended with code -9; starting it again in 1 s with its data (1 of 5)") == 3
    assert recovered(run) == [], "its append-only file had everything"
    is_clean(run, start)


@pytest.mark.slow
def test_a_run_that_is_stopped_while_its_store_is_dead_has_its_checkpoint(begin, start, eventually):
    run = begin(steps=3)
    store_of(run).send_signal(signal.SIGKILL)
    run.process.send_signal(signal.SIGTERM)
    out, err = run.process.communicate(timeout=END_S)
    assert run.process.returncode == 143, out + err
    reached = run.steps()[-1]
    assert run.saved()[-1] == reached
    assert "stopped early, resume with --resume" in out
    is_clean(run, start)


@pytest.mark.slow
def test_a_store_that_went_back_in_time_is_told_what_was_trained_since(begin, start, eventually, tmp_path):
    run = begin(steps=4, max_steps=30)
    earlier = tmp_path / "earlier"
    shutil.copytree(files_of(run), earlier)
    reaches(run, eventually, len(run.steps()) + 5)
    store = store_of(run)
    os.kill(run.process.pid, signal.SIGSTOP)
    store.send_signal(signal.SIGKILL)  # held back from being started again until it is another one's
    assert eventually(10, lambda: not store.is_running() or store.status() == psutil.STATUS_ZOMBIE)
    shutil.rmtree(files_of(run))
    shutil.copytree(earlier, files_of(run))
    os.kill(run.process.pid, signal.SIGCONT)
    out = ends_well(run, 30)
    (event,) = recovered(run)
    assert event["steps"] == event["version"] - event["store_version"] >= 5
    assert "recovered: lineage 1" in out
    is_clean(run, start)


@pytest.mark.slow
def test_a_store_that_lost_everything_is_told_all_that_was_trained(begin, start, eventually):
    run = begin(steps=6, max_steps=20)
    shutil.rmtree(files_of(run))
    store_of(run).send_signal(signal.SIGKILL)
    ends_well(run, 20)
    (event,) = recovered(run)
    assert (event["store_version"], event["steps"]) == (0, event["version"])
    is_clean(run, start)


@pytest.mark.slow
def test_without_recovery_a_store_that_lost_everything_ends_the_run(begin, start, eventually, tmp_path):
    """Negative control of the tests above: it is `recover` that saves the run."""
    (tmp_path / "sitecustomize.py").write_text(FORGETS_TO_RECOVER)
    run = begin(steps=4, max_steps=20, PYTHONPATH=str(tmp_path))
    shutil.rmtree(files_of(run))
    store_of(run).send_signal(signal.SIGKILL)
    out, err = run.process.communicate(timeout=END_S)
    assert run.process.returncode == 1, out + err
    assert len(run.steps()) < 20


@pytest.mark.slow
def test_a_run_is_resumed_with_a_store_that_lost_everything(begin, start, eventually):
    run = begin("--set", "learner.checkpoint.every_steps=4", steps=6)
    run.process.send_signal(signal.SIGKILL)
    run.process.wait(timeout=10)
    reached = run.steps()[-1]
    shutil.rmtree(files_of(run))
    resumed = start(
        "-m", "asyncrl.cli.main", "run", "--resume", "--set", f"run.max_steps={reached + 3}", cwd=run.working
    )
    out, err = resumed.communicate(timeout=END_S)
    assert resumed.returncode == 0, out + err
    starts = [record for record in run.records() if record.get("event") == "start"]
    assert [record["lineage"] for record in starts] == [1, 2], "a name that weights had is not given again"
    assert starts[1]["version"] > 0
    assert [event["store_version"] for event in recovered(run)] == [0]
    is_clean(run, start)


def test_a_served_store_that_is_killed_goes_on_at_its_address(start, tmp_path, eventually):
    serving = start("-m", "asyncrl.cli.main", "buffer", "serve", "--dir", "s", cwd=tmp_path, PYTHONUNBUFFERED="1")
    url = serving.stdout.readline().split()[1]
    client = redis.Redis.from_url(url)
    client.set("key", "value")
    (store,) = psutil.Process(serving.pid).children()
    store.send_signal(signal.SIGKILL)

    def answers() -> bool:
        try:
            return client.get("key") == b"value"
        except redis.ConnectionError:
            return False

    assert eventually(5, lambda: not answers())
    assert eventually(20, answers)
    assert "the store ended with code -9; starting it again in 1 s with its data" in serving.stdout.readline()
    serving.send_signal(signal.SIGTERM)
    assert serving.wait(timeout=20) == 0


@pytest.mark.asyncio
async def test_a_store_that_dies_again_and_again_is_given_up(tmp_path, monkeypatch, eventually):
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.0)
    said: list[str] = []
    async with EmbeddedServer(tmp_path) as server:
        keeper = StoreKeeper(server, said.append)
        failures = []
        for _ in range(LIMIT + 1):
            os.kill(server.pid, signal.SIGKILL)
            assert await asyncio.to_thread(eventually, 10, lambda: server.returncode is not None)
            failures.append(keeper.tend())
            assert keeper.tend() is None or failures[-1]
    assert failures[:-1] == [None] * LIMIT
    assert f"the store ended {LIMIT + 1} times in 10 minutes, the last time with code -9" in failures[-1]
    assert len(said) == LIMIT
