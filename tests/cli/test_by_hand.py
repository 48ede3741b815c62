"""A store, a learner and a collector, each started by hand: the same run as `asyncrl run`, in either order."""

import itertools
import json
import queue
import signal
import socket
import threading
from pathlib import Path

import pytest

RUN_S = 150
STEPS = 6
ENDLESS = 100_000  # steps of a learner that is stopped
TAKEN_OVER = 40  # steps of which most are not made yet when the first is shown, and few enough to wait for


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def lines_of(stream) -> "queue.Queue[str]":
    """What a process says, line by line, so that a test can wait for a line with a limit."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in stream:
            lines.put(line)

    threading.Thread(target=read, daemon=True).start()
    return lines


def metrics(folder: Path) -> list[dict]:
    found = next((folder / "runs").glob("*/metrics.jsonl"))
    return [json.loads(line) for line in found.read_text().splitlines()]


def ordered(begin, port: int, steps: int = STEPS):
    url = f"redis://127.0.0.1:{port}/0"
    return {
        "store": lambda: begin("buffer", "serve", "--listen", f"127.0.0.1:{port}"),
        "learner": lambda: begin("learner", "--buffer", url, f"--set=run.max_steps={steps}", "--set=eval.prompts=8"),
        "collector": lambda: begin("collector", "--buffer", url, "--run", "tiny-reverse", "--wait", "2m"),
    }


def test_a_served_store_says_where_it_is_and_ends_well(begin, tmp_path):
    store = begin("buffer", "serve", "--listen", f"127.0.0.1:{free_port()}", "--password-env", "SECRET", SECRET="s3")
    said = lines_of(store.stdout).get(timeout=30)
    assert said.startswith("store redis://:***@127.0.0.1:")
    store.send_signal(signal.SIGTERM)
    assert store.wait(timeout=20) == 0
    assert (tmp_path / "store" / "store" / "appendonlydir").is_dir()


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_collector_may_be_there_before_store_and_learner_and_it_is_the_same_run(begin, tmp_path):
    how = ordered(begin, free_port())
    collector, store = how["collector"](), how["store"]()
    # A learner, unlike a collector, wants its store to be there; in the tests below it comes before the collector.
    assert lines_of(store.stdout).get(timeout=30).startswith("store ")
    learner = how["learner"]()
    out, err = learner.communicate(timeout=RUN_S)
    assert learner.returncode == 0, err
    assert f"step {STEPS}/{STEPS}" in out
    assert "success" in out
    _, err = collector.communicate(timeout=60)
    assert collector.returncode == 0, err
    assert "the run has ended" in err
    assert "waiting for" in err
    steps = [record["step"] for record in metrics(tmp_path) if "event" not in record]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_second_collector_takes_over_from_one_that_was_killed_and_the_audit_is_clean(begin, cli, tmp_path):
    port = free_port()
    how = ordered(begin, port, TAKEN_OVER)
    store = how["store"]()
    assert lines_of(store.stdout).get(timeout=30).startswith("store ")
    learner, first = how["learner"](), how["collector"]()
    said = lines_of(learner.stdout)
    for line in iter(lambda: said.get(timeout=RUN_S), ""):
        if line.startswith("step "):  # not each step has a line: they may be faster than the console looks
            break
    first.send_signal(signal.SIGKILL)
    second = how["collector"]()
    assert learner.wait(timeout=RUN_S) == 0
    assert second.wait(timeout=60) == 0
    steps = [record["step"] for record in metrics(tmp_path) if "event" not in record]
    assert steps == list(range(1, TAKEN_OVER + 1))
    served = set(itertools.chain.from_iterable(r.get("collectors", {}) for r in metrics(tmp_path)))
    assert len(served) == 2

    url = f"redis://127.0.0.1:{port}/0"
    audited = cli("buffer", "audit", "tiny-reverse", "--buffer", url)
    assert audited.returncode == 0, audited.stdout + audited.stderr
    assert audited.stdout.endswith("clean\n")
    assert f"archive: {TAKEN_OVER} steps" in audited.stdout
    assert cli("buffer", "audit", "no-such-run", "--buffer", url).returncode == 2

    next((tmp_path / "runs").glob("*/archive/step-*-000003.parquet")).unlink()
    damaged = cli("buffer", "audit", "tiny-reverse", "--buffer", url)
    assert damaged.returncode == 1, "with a part of the archive gone the audit must not be clean"
    assert "PROBLEM" in damaged.stdout


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_learner_stopped_by_hand_goes_on_and_a_second_one_is_refused(begin, cli, tmp_path):
    port = free_port()
    how = ordered(begin, port, ENDLESS)
    store = how["store"]()
    assert lines_of(store.stdout).get(timeout=30).startswith("store ")
    learner, collector = how["learner"](), how["collector"]()
    said = lines_of(learner.stdout)
    for line in iter(lambda: said.get(timeout=RUN_S), ""):
        if line.startswith("step "):  # not each step has a line: they may be faster than the console looks
            break
    url = f"redis://127.0.0.1:{port}/0"
    again = cli("learner", "--buffer", url, "--set", f"run.max_steps={ENDLESS}")
    assert again.returncode == 2
    assert "in use in this store" in again.stderr
    assert "--resume" in again.stderr
    learner.send_signal(signal.SIGTERM)
    assert learner.wait(timeout=60) == 143
    last = metrics(tmp_path)[-1]["version"] + 5
    resumed = cli("learner", "--resume", "--buffer", url, f"--set=run.max_steps={last}", timeout=RUN_S)
    assert resumed.returncode == 0, resumed.stderr
    assert collector.wait(timeout=60) == 0, "it served both learners"
    steps = [record["step"] for record in metrics(tmp_path) if "event" not in record]
    assert steps == list(range(1, last + 1))
