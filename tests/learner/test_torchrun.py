"""A learner whose ranks torchrun starts, on two hosts as far as it knows: two of it on this machine, one rank each."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(400)]

START_S = 120.0
"""To import torch in torchrun, in the ranks and in a collector, on two busy cores."""

END_S = 90.0
NAME = "launched"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def records(folder: Path) -> list[dict[str, Any]]:
    files = list((folder / "runs").glob("*/metrics.jsonl"))
    lines = files[0].read_text().splitlines() if files else []
    return [json.loads(line) for line in lines]


def surviving(found: list[dict[str, Any]]) -> list[int]:
    """The steps that the newest weights are made of: a start forgets those beyond the version it goes on from."""
    steps: list[int] = []
    for record in found:
        if record.get("event") == "start":
            steps = [step for step in steps if step <= record["version"]]
        elif "event" not in record and "step" in record:
            steps.append(record["step"])
    return steps


def rank_process(launchers: list[subprocess.Popen[str]], rank: int) -> psutil.Process:
    for launcher in launchers:
        for child in psutil.Process(launcher.pid).children(recursive=True):
            if child.environ().get("RANK") == str(rank) and "learner" in child.cmdline():
                return child
    raise AssertionError(f"rank {rank} does not run")


class Launchers:
    """torchrun on each of two hosts, which share a store of torchrun's and the working folder."""

    def __init__(self, start: Callable[..., subprocess.Popen[str]], folder: Path, url: str) -> None:
        self._start, self._folder, self._url = start, folder, url
        self.logs = [folder / "host-0.log", folder / "host-1.log"]

    def hosts(self, count: int, ranks: int, *options: str, settings: dict[str, object]) -> list[subprocess.Popen[str]]:
        endpoint = f"127.0.0.1:{free_port()}"
        chosen = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
        here = ["--local-addr", "127.0.0.1"]  # whatever this machine's name stands for
        rendezvous = ["--nnodes", str(count), "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, *here]
        command = ["-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(ranks), *options]
        resume = ["--resume"] if "run.name" not in settings else []
        started = []
        for log in self.logs[:count]:
            with log.open("w") as output:
                learner = ["-m", "asyncrl.cli.main", "learner", *resume, *chosen]
                started.append(
                    self._start(*command, *learner, cwd=self._folder, output=output, ASYNCRL_BUFFER=self._url)
                )
        return started

    def said(self) -> str:
        return "\n".join(log.read_text() for log in self.logs if log.exists())


@contextmanager
def explained(launchers: Launchers) -> Iterator[None]:
    try:
        yield
    except BaseException:
        print(launchers.said())  # noqa: T201  # pytest shows it with the failure
        raise


def test_ranks_of_two_hosts_go_on_after_the_loss_of_one_and_from_a_checkpoint_with_any_launcher(
    start: Callable[..., subprocess.Popen[str]],
    begin: Callable[..., subprocess.Popen[str]],
    cli: Callable[..., subprocess.CompletedProcess[str]],
    eventually: Callable[[float, Callable[[], object]], bool],
    server_url: str,
    tmp_path: Path,
) -> None:
    launchers = Launchers(start, tmp_path, server_url)
    with explained(launchers):
        collector = begin("collector", "--run", NAME, "--wait", "5m", ASYNCRL_BUFFER=server_url)
        endless = {"run.name": NAME, "run.max_steps": 100000, "learner.checkpoint.every_steps": 2, "eval.prompts": 8}
        hosts = launchers.hosts(2, 1, "--max-restarts", "1", settings=endless)
        assert eventually(START_S, lambda: len(surviving(records(tmp_path))) >= 3)

        # One rank is killed: all end, torchrun starts them again, and they go on by themselves.
        lost = rank_process(hosts, 1)
        lost.send_signal(signal.SIGKILL)
        assert eventually(START_S, lambda: [r.get("event") for r in records(tmp_path)].count("start") == 2)
        second = [record for record in records(tmp_path) if record.get("event") == "start"][1]
        assert second["version"] >= 2
        assert second["parent"] == [1, second["version"]]
        assert second["machine"]["ranks"] == 2
        assert f"the learner failed: learner rank 1 (process {lost.pid} on " in launchers.said()
        assert "was killed or does not answer" in launchers.said()
        assert eventually(START_S, lambda: surviving(records(tmp_path))[-1] >= second["version"] + 2)

        # The launchers are told to end, and tell their ranks: none of them leaves before the checkpoint is there.
        for host in hosts:
            host.send_signal(signal.SIGTERM)
        for host in hosts:
            assert host.wait(END_S) != 0, "torchrun's own way to say that it was told to end"
        found = records(tmp_path)
        reached = surviving(found)[-1]
        assert found[-1] == {**found[-1], "event": "end", "version": reached, "stopped": True}
        assert [r["version"] for r in found if r.get("event") == "checkpoint"][-1] == reached

        # What they have saved, ranks that a learner starts itself go on from, and torchrun's from what those saved.
        own = ("learner.ranks=2", f"run.max_steps={reached + 2}")
        chosen = [text for setting in own for text in ("--set", setting)]
        local = begin("learner", "--resume", *chosen, ASYNCRL_BUFFER=server_url)
        out, err = local.communicate(timeout=START_S)
        assert local.returncode == 0, out + err
        out, err = collector.communicate(timeout=END_S)
        assert collector.returncode == 0, out + err

        (host,) = launchers.hosts(1, 2, settings={"run.max_steps": reached + 4})
        # Earlier it would find the run as it has ended, and end.
        assert eventually(START_S, lambda: [r.get("event") for r in records(tmp_path)].count("start") == 4)
        begin("collector", "--run", NAME, ASYNCRL_BUFFER=server_url)
        assert host.wait(START_S) == 0
        found = records(tmp_path)
        assert surviving(found) == list(range(1, reached + 5)), "no step is lost and none is repeated"
        assert [record["version"] for record in found if record.get("event") == "start"][2:] == [reached, reached + 2]

    audit = cli("buffer", "audit", "--buffer", server_url)
    assert audit.returncode == 0, audit.stdout + audit.stderr
