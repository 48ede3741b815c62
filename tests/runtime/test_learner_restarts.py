"""A learner that dies is started again, one that fails is not: what is decided, and runs whose learners really die.

What a kill in each phase of each rank does to what is trained is the question of `benchmarks/test_soak.py`.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from asyncrl.benchmarks.soak import Account, account
from asyncrl.buffers.archive import Archive
from asyncrl.config.recipe import Learner, Recipe, Run
from asyncrl.learners import phase as phases
from asyncrl.learners.phase import LearnerPhase, Phase
from asyncrl.runtime.learner_keeper import LearnerKeeper, died
from asyncrl.telemetry.metrics import read_metrics
from tests.processes import ASYNCRL, within

END_S = 120.0

FAST = {
    "learner.ranks": 2,
    "learner.groups_per_step": 4,
    "eval.at_start": "false",
    "eval.at_end": "false",
    "run.output_dir": "out",
}
"""Starting takes most of the time."""


def sets(**keys: object) -> list[str]:
    return [f"--set={key}={value}" for key, value in {**FAST, **keys}.items()]


def word(phase: Phase) -> LearnerPhase:
    return LearnerPhase(phase=phase, step=3, since=1.0, pid=1, host="h")


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (-signal.SIGKILL, None, True),  # while it imported
        (-signal.SIGSEGV, word(Phase.TRAINING), True),
        (1, word(Phase.TRAINING), True),  # a rank was lost
        (1, word(Phase.ENDED), False),  # it failed, or a newer learner has taken over
        (1, None, False),  # it failed before it began
        (2, None, False),
        (0, word(Phase.ENDED), False),
        (143, word(Phase.TRAINING), False),  # a second signal, or no grace left: somebody wanted it to end
        (-signal.SIGSEGV, word(Phase.ENDED), False),  # in the interpreter's own end
    ],
)
def test_a_learner_has_died_where_it_came_to_no_end_of_its_own(
    code: int, said: LearnerPhase | None, expected: bool
) -> None:
    assert died(code, said) is expected


@pytest.fixture
def keeper(tmp_path: Path) -> LearnerKeeper:
    (tmp_path / "logs").mkdir()
    return LearnerKeeper(Recipe(run=Run(name="r"), learner=Learner(max_restarts=2)), tmp_path, resume=False)


@pytest.mark.asyncio
async def test_restarts_are_bounded_until_there_is_a_newer_checkpoint(keeper: LearnerKeeper, tmp_path: Path) -> None:
    assert [await keeper.plan_restart(f"death {n}") for n in range(3)] == [True, True, False]
    keeper.on_record({"event": "checkpoint", "version": 4})
    assert [await keeper.plan_restart(f"death {n}") for n in range(3, 6)] == [True, True, False]
    keeper.on_record({"event": "checkpoint", "version": 4})  # the same, made again: no progress
    assert not await keeper.plan_restart("death 6")
    assert keeper.tried() == [
        "the learner died 3 times without a newer checkpoint in between (learner.max_restarts: 2); the last time:"
    ]
    written = read_metrics(tmp_path / "metrics.jsonl")
    assert [(event["reason"], event["count"], event["limit"], event["delay_s"]) for event in written] == [
        ("death 0", 1, 2, 1.0),
        ("death 1", 2, 2, 2.0),
        ("death 3", 1, 2, 1.0),
        ("death 4", 2, 2, 2.0),
    ]


@pytest.mark.asyncio
async def test_without_restarts_the_first_death_is_the_last(tmp_path: Path) -> None:
    keeper = LearnerKeeper(Recipe(run=Run(name="r"), learner=Learner(max_restarts=0)), tmp_path, resume=False)
    assert not await keeper.plan_restart("a death")
    assert keeper.tried() == []
    assert not (tmp_path / "metrics.jsonl").exists()


def test_what_a_learner_said_is_forgotten_before_the_next_starts(tmp_path: Path) -> None:
    (tmp_path / phases.FILE).write_text('{"phase": "ended", "step": 1, "since": 1.0, "pid": 1, "host": "h"}')
    assert phases.read(tmp_path) is not None
    phases.forget(tmp_path)
    phases.forget(tmp_path)
    assert phases.read(tmp_path) is None


def starts(run) -> list[dict[str, object]]:
    return [record for record in run.records() if record.get("event") == "start"]


def rank_of(run) -> psutil.Process:
    """Rank 1 of the learner that runs now."""
    return next(p for p in run.child("learner").children(recursive=True) if "--rank" in p.cmdline())


def steps_since(run, lineage: int) -> int:
    return sum(record.get("lineage") == lineage for record in run.records() if "event" not in record)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_whose_restarts_are_used_up_ends_and_tells_its_collectors(begin, start, is_alive, eventually) -> None:
    run = begin(*sets(**{"learner.max_restarts": 1, "learner.checkpoint.every_steps": 1000}))
    rank = rank_of(run)
    learner = run.child("learner").pid
    rank.send_signal(signal.SIGKILL)
    assert eventually(END_S, lambda: len(starts(run)) == 2)
    assert not any(map(is_alive, [learner, rank.pid])), "what was left of the first learner is gone"
    assert starts(run)[1]["version"] == 0, "from the initial weights: there was no checkpoint"
    assert eventually(END_S, lambda: steps_since(run, 2) >= 1)
    tree = run.tree()
    run.child("learner").send_signal(signal.SIGKILL)
    out, err = run.process.communicate(timeout=END_S)
    assert run.process.returncode == 1
    named = f"learner rank 1 (process {rank.pid}) was killed by SIGKILL (out of memory?); its log: "
    assert sum(named in line for line in out.splitlines()) == 1
    assert "starting it again from the newest checkpoint in 1 s (1 of 1)" in out
    assert err.startswith(
        "Error: the learner died 2 times without a newer checkpoint in between (learner.max_restarts: 1); the last "
        "time:\nlearner was killed by SIGKILL (out of memory?); the last lines of "
    )
    assert err.count("Error: ") == 1
    assert "Traceback" not in err
    assert eventually(10, lambda: not any(map(is_alive, tree)))

    status = start(*ASYNCRL, "status", "out", cwd=run.working)
    out, err = status.communicate(timeout=END_S)
    assert "it failed: the learner died 2 times" in out, out + err


IMPATIENT = """
import signal
from asyncrl.runtime import supervisor

def have(patience):
    supervisor.HANG_S = patience

signal.signal(signal.SIGUSR1, lambda *_: have(-25.0))
signal.signal(signal.SIGUSR2, lambda *_: have(120.0))
from asyncrl.cli.main import main
main()
"""
"""`asyncrl`, which takes a learner that is silent for 5 s for dead from SIGUSR1 to SIGUSR2: not while one starts."""


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_that_hang_are_named_and_the_run_goes_on_to_its_end(begin, start, is_alive, eventually) -> None:
    limits = {"collector.score_timeout_s": 5, "collector.group_timeout_s": 10, "run.no_progress_s": 30}
    run = begin(*sets(**limits, **{"learner.checkpoint.every_steps": 2}), max_steps=60, program=("-c", IMPATIENT))
    rank, tree = rank_of(run), run.tree()
    rank.suspend()
    assert eventually(END_S, lambda: len(starts(run)) == 2)
    assert not is_alive(rank.pid)
    assert eventually(END_S, lambda: steps_since(run, 2) >= 1)
    run.child("learner").suspend()
    run.process.send_signal(signal.SIGUSR1)
    assert eventually(END_S, lambda: sum(record.get("event") == "restart" for record in run.records()) == 2)
    run.process.send_signal(signal.SIGUSR2)
    out, err = run.process.communicate(timeout=END_S)
    assert run.process.returncode == 0, out + err
    assert f"rank 1 (process {rank.pid}) is stopped" in out
    assert "no step for 5 s and no word from the learner; starting it again from the newest checkpoint" in out
    assert json.loads((run.folder / "summary.json").read_text())["restarts"] == 2
    assert account(Archive(run.folder / "archive"), steps=60, groups_per_step=4, group_size=8) == Account(240, 0, 0)
    audit = start(*ASYNCRL, "buffer", "audit", "out", cwd=run.working)
    out, err = audit.communicate(timeout=END_S)
    assert audit.returncode == 0, out + err
    assert eventually(10, lambda: not any(map(is_alive, tree)))


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_is_stopped_while_its_learner_is_dead_and_goes_on_from_its_checkpoint(begin, start, is_alive) -> None:
    run = begin(*sets(**{"learner.checkpoint.every_steps": 3, "learner.ranks": 1}), steps=5)
    assert within(END_S, run.saved), "a checkpoint is written beside the steps after it"
    tree = run.tree()
    run.child("learner").send_signal(signal.SIGKILL)
    run.process.send_signal(signal.SIGTERM)
    out, err = run.process.communicate(timeout=END_S)
    assert run.process.returncode == 143, out + err
    assert not any(map(is_alive, tree))
    reached = run.steps()[-1]
    saved = max(run.saved())
    resumed = start(*ASYNCRL, "run", "--resume", "out", f"--set=run.max_steps={reached + 2}", cwd=run.working)
    out, err = resumed.communicate(timeout=END_S)
    assert resumed.returncode == 0, out + err
    assert [record["version"] for record in starts(run)] == [0, saved]
    assert run.steps()[-1] == reached + 2
