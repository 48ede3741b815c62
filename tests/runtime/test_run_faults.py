"""`asyncrl run` with real processes that are killed, stopped and continued. Each wait has a hard limit."""

import signal

import psutil
import pytest

from asyncrl.learners.checkpoint import survey
from tests.processes import ASYNCRL, within

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(240)]

START_S = 90.0
"""Making the built-in model, once, and importing torch three times on two busy cores."""

END_S = 60.0

SMALL = ("--set=learner.groups_per_step=4", "--set=eval.prompts=8")


def test_no_process_survives_a_supervisor_that_is_killed(begin, is_alive, eventually):
    run = begin(*SMALL)
    tree = run.tree()
    names = [" ".join(psutil.Process(pid).cmdline()) for pid in tree]
    for role in ("valkey-server", "learner", "collector", "asyncrl.rewards.worker"):
        assert any(role in name for name in names), (role, names)
    run.process.send_signal(signal.SIGKILL)
    assert eventually(15, lambda: not any(map(is_alive, tree))), [
        (pid, psutil.Process(pid).cmdline()) for pid in tree if is_alive(pid)
    ]


def test_a_collector_that_is_killed_is_started_again_and_the_run_ends_well(begin, start, is_alive, eventually):
    run = begin("--set=eval.prompts=8", max_steps=30)
    killed = run.child("collector")
    verifiers = [process.pid for process in killed.children(recursive=True)]
    killed.send_signal(signal.SIGKILL)
    assert eventually(10, lambda: not any(map(is_alive, [killed.pid, *verifiers])))
    out, err = run.process.communicate(timeout=START_S)
    assert run.process.returncode == 0, out + err
    assert run.steps() == list(range(1, 31))
    assert "collector-0 was killed by SIGKILL (out of memory?); starting it again in 1 s (1 of 5)" in out

    # The store of an ended run is started again for as long as the audit takes.
    audit = start(*ASYNCRL, "buffer", "audit", cwd=run.working)
    out, err = audit.communicate(timeout=END_S)
    assert audit.returncode == 0, out + err
    assert "archive: 30 steps" in out


def test_the_first_signal_leaves_a_checkpoint_of_the_last_step(begin, is_alive):
    run = begin(*SMALL, steps=3)
    tree = run.tree()
    run.process.send_signal(signal.SIGINT)  # SIGTERM, and going on: below, with two ranks
    out, err = run.process.communicate(timeout=END_S)
    assert run.process.returncode == 130, out + err
    assert not any(map(is_alive, tree))
    assert run.saved()[-1] == run.steps()[-1]
    assert "stopped early, resume with --resume" in out


def test_a_live_run_cannot_be_resumed_and_the_second_signal_ends_it_now(begin, start, is_alive, eventually):
    run = begin(*SMALL)
    second = start(*ASYNCRL, "run", "--resume", cwd=run.working)
    _, err = second.communicate(timeout=END_S)
    assert second.returncode == 2
    assert "in use by a live run" in err
    assert err.count("\n") <= 3
    assert run.process.poll() is None

    tree = run.tree()
    collector = run.child("collector").pid
    run.child("learner").suspend()  # it cannot checkpoint, so the first signal alone would take all the grace
    run.process.send_signal(signal.SIGTERM)
    assert eventually(15, lambda: not is_alive(collector)), "the first signal has been taken"
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(timeout=10) == 143
    assert eventually(10, lambda: not any(map(is_alive, tree)))


def test_a_grace_that_is_too_short_ends_with_the_checkpoint_before(begin, is_alive):
    run = begin(*SMALL, "--set=learner.checkpoint.every_steps=2", "--grace=1", steps=5)
    assert within(START_S, run.saved), "a checkpoint is written beside the steps after it"
    tree = run.tree()
    run.child("learner").suspend()  # a step that takes longer than the grace
    run.process.send_signal(signal.SIGINT)
    out, err = run.process.communicate(timeout=END_S)
    assert run.process.returncode == 130, out + err
    assert "the learner did not stop within 1 s; ending it" in out
    assert not any(map(is_alive, tree))
    last = run.saved()[-1]
    sound, damaged = survey(run.folder / "checkpoints")
    assert sound[0].weights.version in (last, last + 2), "the next one may be whole and not told yet"
    assert damaged == []


def test_a_run_of_two_ranks_is_stopped_and_goes_on_with_one(begin, start, is_alive):
    run = begin(*SMALL, "--set=learner.ranks=2", steps=3)
    tree = run.tree()
    run.process.send_signal(signal.SIGTERM)
    out, err = run.process.communicate(timeout=END_S)
    assert run.process.returncode == 143, out + err
    assert not any(map(is_alive, tree))
    last = run.steps()[-1]
    assert run.saved()[-1] == last
    last += 3
    more = (f"--set=run.max_steps={last}", "--set=learner.ranks=1", "--set=learner.updates_per_step=3")
    resumed = start(*ASYNCRL, "run", "--resume", *more, cwd=run.working)
    out, err = resumed.communicate(timeout=START_S)
    assert resumed.returncode == 0, out + err
    assert run.steps() == list(range(1, last + 1)), "no step is lost and none is repeated"
    assert [record["updates"] for record in run.records() if "updates" in record][-3:] == [3] * 3
