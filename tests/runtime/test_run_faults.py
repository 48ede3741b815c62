"""`asyncrl run` with real processes that are killed, stopped and continued. Each wait has a hard limit."""

import signal

import psutil
import pytest

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(240)]

START_S = 90.0
"""Making the built-in model, once, and importing torch three times on two busy cores."""

END_S = 60.0


def test_no_process_survives_a_supervisor_that_is_killed(begin, is_alive, eventually):
    run = begin()
    tree = run.tree()
    names = [" ".join(psutil.Process(pid).cmdline()) for pid in tree]
    for role in ("valkey-server", "learner", "collector", "asyncrl.rewards.worker"):
        assert any(role in name for name in names), (role, names)
    run.process.send_signal(signal.SIGKILL)
    assert eventually(15, lambda: not any(map(is_alive, tree))), [
        (pid, psutil.Process(pid).cmdline()) for pid in tree if is_alive(pid)
    ]


def test_a_collector_that_is_killed_is_started_again_and_the_run_ends_well(begin, start, is_alive, eventually):
    run = begin(max_steps=30)
    killed = run.child("collector")
    verifiers = [process.pid for process in killed.children(recursive=True)]
    killed.send_signal(signal.SIGKILL)
    assert eventually(10, lambda: not any(map(is_alive, [killed.pid, *verifiers])))
    out, err = run.process.communicate(timeout=START_S)
    assert run.process.returncode == 0, out + err
    assert run.steps() == list(range(1, 31))
    assert "collector-0 ended with code -9; starting it again in 1 s (1 of 5)" in out

    # The store of an ended run is started again for as long as the audit takes.
    audit = start("-m", "asyncrl.cli.main", "buffer", "audit", cwd=run.working)
    out, err = audit.communicate(timeout=END_S)
    assert audit.returncode == 0, out + err
    assert "archive: 30 steps" in out

    # A run that ended well goes on with more steps.
    more = start("-m", "asyncrl.cli.main", "run", "--resume", "--set", "run.max_steps=32", cwd=run.working)
    out, err = more.communicate(timeout=START_S)
    assert more.returncode == 0, out + err
    assert run.steps() == list(range(1, 33))


def test_the_learners_death_ends_the_run_with_the_end_of_its_log(begin, is_alive, eventually):
    run = begin()
    tree = run.tree()
    run.child("learner").send_signal(signal.SIGKILL)
    _, err = run.process.communicate(timeout=END_S)
    assert run.process.returncode == 1
    assert "learner ended with code -9" in err
    assert str(run.folder / "logs" / "learner.log") in err
    assert "Traceback" not in err
    assert eventually(10, lambda: not any(map(is_alive, tree)))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_leaves_a_checkpoint_from_which_the_run_goes_on(
    begin, start, is_alive, eventually, number, code
):
    run = begin(steps=3)
    tree = run.tree()
    run.process.send_signal(number)
    out, err = run.process.communicate(timeout=END_S)
    assert run.process.returncode == code, out + err
    assert not any(map(is_alive, tree))
    reached = run.steps()[-1]
    saved = [record["version"] for record in run.records() if record.get("event") == "checkpoint"]
    assert saved[-1] == reached
    assert "stopped early, resume with --resume" in out

    last = reached + 3
    resumed = start("-m", "asyncrl.cli.main", "run", "--resume", "--set", f"run.max_steps={last}", cwd=run.working)
    out, err = resumed.communicate(timeout=START_S)
    assert resumed.returncode == 0, out + err
    assert run.steps() == list(range(1, last + 1)), "no step is lost and none is repeated"
    assert {record["lineage"] for record in run.records() if record.get("event") == "start"} == {1, 2}


def test_a_killed_run_goes_on_from_its_newest_checkpoint(begin, start, eventually):
    run = begin("--set", "learner.checkpoint.every_steps=3", steps=5)
    run.process.send_signal(signal.SIGKILL)
    run.process.wait(timeout=10)
    reached = run.steps()[-1]
    saved = max(record["version"] for record in run.records() if record.get("event") == "checkpoint")
    resumed = start(
        "-m", "asyncrl.cli.main", "run", "--resume", "--set", f"run.max_steps={reached + 2}", cwd=run.working
    )
    out, err = resumed.communicate(timeout=START_S)
    assert resumed.returncode == 0, out + err
    starts = [record for record in run.records() if record.get("event") == "start"]
    assert [record["version"] for record in starts] == [0, saved]
    assert run.steps()[-1] == reached + 2


def test_the_second_signal_ends_everything_now(begin, is_alive, eventually):
    run = begin()
    tree = run.tree()
    collector = run.child("collector").pid
    run.child("learner").suspend()  # it cannot checkpoint, so the first signal alone would take all the grace
    run.process.send_signal(signal.SIGTERM)
    assert eventually(15, lambda: not is_alive(collector)), "the first signal has been taken"
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(timeout=10) == 143
    assert eventually(10, lambda: not any(map(is_alive, tree)))


def test_the_folder_of_a_live_run_cannot_be_resumed(begin, start):
    run = begin()
    second = start("-m", "asyncrl.cli.main", "run", "--resume", cwd=run.working)
    _, err = second.communicate(timeout=END_S)
    assert second.returncode == 2
    assert "in use by a live run" in err
    assert err.count("\n") <= 3
    assert run.process.poll() is None


def rank_of(run) -> psutil.Process:
    """Rank 1 of the run's learner."""
    return next(p for p in psutil.Process(run.process.pid).children(recursive=True) if "--rank" in p.cmdline())


def test_a_killed_rank_ends_the_run_with_one_error_that_names_it(begin, is_alive, eventually):
    run = begin("--set", "learner.ranks=2")
    tree = run.tree()
    rank = rank_of(run)
    rank.send_signal(signal.SIGKILL)
    _, err = run.process.communicate(timeout=END_S)
    assert run.process.returncode == 1
    assert err.count("Error: ") == 1, err
    assert f"learner rank 1 (process {rank.pid}) was killed by SIGKILL" in err
    assert "Traceback" not in err
    assert eventually(10, lambda: not any(map(is_alive, tree)))


def test_no_rank_survives_rank_0(begin, is_alive, eventually):
    run = begin("--set", "learner.ranks=2")
    tree = run.tree()
    run.child("learner").send_signal(signal.SIGKILL)
    assert run.process.wait(timeout=END_S) == 1
    assert eventually(10, lambda: not any(map(is_alive, tree)))


def test_a_rank_that_hangs_ends_the_run_and_is_named(begin, is_alive, eventually):
    limits = ("collector.score_timeout_s=5", "collector.group_timeout_s=10", "run.no_progress_s=40")
    run = begin("--set", "learner.ranks=2", *(text for limit in limits for text in ("--set", limit)))
    tree = run.tree()
    rank = rank_of(run)
    rank.suspend()
    _, err = run.process.communicate(timeout=END_S + 60)
    assert run.process.returncode == 1
    assert f"rank 1 (process {rank.pid}) is stopped" in err
    assert eventually(10, lambda: not any(map(is_alive, tree)))


def test_a_run_of_two_ranks_is_stopped_and_goes_on_with_one_and_with_two_again(begin, start, is_alive):
    run = begin("--set", "learner.ranks=2", steps=3)
    tree = run.tree()
    run.process.send_signal(signal.SIGTERM)
    out, err = run.process.communicate(timeout=END_S)
    assert run.process.returncode == 143, out + err
    assert not any(map(is_alive, tree))
    last = run.steps()[-1]
    assert [record["version"] for record in run.records() if record.get("event") == "checkpoint"][-1] == last
    for ranks, updates in ((1, 1), (2, 3)):
        last += 3
        more = (f"run.max_steps={last}", f"learner.ranks={ranks}", f"learner.updates_per_step={updates}")
        setting = [text for key in more for text in ("--set", key)]
        resumed = start("-m", "asyncrl.cli.main", "run", "--resume", *setting, cwd=run.working)
        out, err = resumed.communicate(timeout=START_S)
        assert resumed.returncode == 0, out + err
        assert run.steps() == list(range(1, last + 1)), "no step is lost and none is repeated"
        assert [record["updates"] for record in run.records() if "updates" in record][-3:] == [updates] * 3
