"""A learner that is killed, or stopped, between two optimizer updates of one step."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from asyncrl.learners.checkpoint import survey
from asyncrl.telemetry.metrics import read_metrics
from tests.processes import within

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 6
UPDATES = 2
HALFWAY = 4  # the version whose step is interrupted between its updates; the newest checkpoint is of version 3
EARLIER = 1  # so is this one's, where the learner is stopped, and continued

INTERRUPTED = f"""
import os, signal, sys
from asyncrl.cli.main import main
from asyncrl.learners import stepping
from asyncrl.learners.model import load_tokenizer
from asyncrl.learners.optimize import Optimizer
from asyncrl.learners.writing import save

how, keeps_half = sys.argv.pop(1), sys.argv.pop(1) == "half"
compute, update = stepping.Learner._compute, Optimizer.update
learners = []

def remember(self, *arguments):
    learners.append(self)
    return compute(self, *arguments)

def update_and_stand(self, *arguments, **named):
    done = update(self, *arguments, **named)
    at = ({EARLIER}, {HALFWAY}) if how == "SIGSTOP" else ({HALFWAY},)
    if self.steps in at and self.updates == self.steps * {UPDATES} + 1:
        if keeps_half:
            of = learners[-1]
            save(
                of.run_dir / "checkpoints",
                model=of.trainer.whole,
                tokenizer=load_tokenizer(of.trainer.whole.name_or_path),
                training={{"optimizer": self.state_dict()}},
                weights=of.weights,
                forks=of.lineages.forks,
                trained=of.consumed,
                tokens=of.tokens_total,
            )
        os.kill(os.getpid(), getattr(signal, how))
    return done

stepping.Learner._compute, Optimizer.update = remember, update_and_stand
main()
"""
"""`asyncrl`, whose learner gets a signal between the updates of one step. `half`: as if what an update has changed were
a version, it leaves a checkpoint there."""

LEARN_S = 150.0  # the built-in model is made once, torch is imported three times on two busy cores

Spawn = Callable[..., "subprocess.Popen[str]"]


def steps_of(folder: Path) -> list[int]:
    return [record["step"] for record in read_metrics(folder / "metrics.jsonl") if "event" not in record]


def interrupted(spawn: Spawn, tmp_path: Path, url: str, how: str, *, half: bool = False) -> subprocess.Popen[str]:
    """A learner of a new run on its way to the first update of step `HALFWAY`, and the run's collector."""
    settings = {
        "run.name": tmp_path.name,
        "run.max_steps": STEPS,
        "run.deterministic": "true",
        "learner.groups_per_step": 4,
        "learner.updates_per_step": UPDATES,
        "learner.checkpoint.every_steps": 3,
        "eval.at_start": "false",
        "eval.at_end": "false",
    }
    setting = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    program = ("-c", INTERRUPTED, how, "half" if half else "whole")
    first = spawn("first", "learner", "--buffer", url, *setting, program=program)
    spawn("collector", "collector", "--buffer", url, "--run", tmp_path.name, "--wait", "3m")
    return first


def stands_still(learner: subprocess.Popen[str]) -> bool:
    """Whether it is stopped by now; not if it has ended, or does neither in time."""
    stopped = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    within(LEARN_S, lambda: psutil.Process(learner.pid).status() in stopped)
    return psutil.Process(learner.pid).status() == psutil.STATUS_STOPPED


def ends_well(spawn: Spawn, tmp_path: Path, url: str, folder: Path) -> tuple[int, int, int]:
    """Exit codes of the audit and of a replay, and the optimizer updates that are in the last weights."""
    audit = spawn("audit", "buffer", "audit", str(folder), "--buffer", url)
    assert audit.wait(timeout=60) in (0, 1), (tmp_path / "audit.log").read_text()
    replay = spawn("replay", "buffer", "replay", str(folder), "--check")
    assert replay.wait(timeout=LEARN_S) in (0, 1), (tmp_path / "replay.log").read_text()
    newest = survey(folder / "checkpoints")[0][0]
    assert newest.weights.version == STEPS
    return audit.returncode, replay.returncode, newest.training_state()["optimizer"]["updates"]


def resumed_after_a_kill(spawn: Spawn, tmp_path: Path, url: str, *, half: bool) -> tuple[int, int, int]:
    first = interrupted(spawn, tmp_path, url, "SIGKILL", half=half)
    assert first.wait(timeout=LEARN_S) == -signal.SIGKILL, (tmp_path / "first.log").read_text()
    folder = next((tmp_path / "runs").iterdir())
    assert steps_of(folder) == [1, 2, 3, 4]
    assert not (folder / "archive" / f"step-0001-{HALFWAY:06d}.parquet").exists(), "the step was not over"
    second = spawn("second", "learner", "--resume", str(folder), "--buffer", url)
    assert second.wait(timeout=LEARN_S) == 0, (tmp_path / "second.log").read_text()
    return ends_well(spawn, tmp_path, url, folder)


def test_a_learner_killed_between_two_updates_is_resumed_and_neither_is_made_twice(
    server_url: str, tmp_path: Path, spawn: Spawn
) -> None:
    assert resumed_after_a_kill(spawn, tmp_path, server_url, half=False) == (0, 0, STEPS * UPDATES)


def test_half_a_step_in_a_checkpoint_would_be_trained_twice_and_the_replay_says_so(
    server_url: str, tmp_path: Path, spawn: Spawn
) -> None:
    """Negative control: a checkpoint that is not between steps. The ledger cannot see it, the weights can."""
    audited, replayed, updates = resumed_after_a_kill(spawn, tmp_path, server_url, half=True)
    assert (audited, replayed, updates) == (0, 1, STEPS * UPDATES + 1)
    assert f"version {HALFWAY} " in (tmp_path / "replay.log").read_text()


def test_a_learner_stopped_between_two_updates_makes_the_second_or_leaves_nothing_of_its_step_if_it_was_replaced(
    server_url: str, tmp_path: Path, spawn: Spawn
) -> None:
    first = interrupted(spawn, tmp_path, server_url, "SIGSTOP")
    assert stands_still(first), (tmp_path / "first.log").read_text()
    folder = next((tmp_path / "runs").iterdir())
    assert steps_of(folder) == [1]
    first.send_signal(signal.SIGCONT)
    assert within(LEARN_S, lambda: len(steps_of(folder)) > EARLIER)
    assert stands_still(first), (tmp_path / "first.log").read_text()
    assert steps_of(folder) == [1, 2, 3, 4]

    # On another host, from a copy: on this one the folder is locked as long as the stopped learner lives.
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere)
    second = spawn("second", "learner", "--resume", str(elsewhere), "--buffer", server_url)
    assert within(LEARN_S, lambda: steps_of(elsewhere)[-1:] > [4] or second.poll() is not None)
    first.send_signal(signal.SIGCONT)
    assert first.wait(timeout=60) == 1, (tmp_path / "first.log").read_text()
    assert "was replaced by lineage 2" in (tmp_path / "first.log").read_text()
    assert steps_of(folder) == [1, 2, 3, 4], "it made its second update and committed nothing"
    assert second.wait(timeout=LEARN_S) == 0, (tmp_path / "second.log").read_text()
    assert ends_well(spawn, tmp_path, server_url, elsewhere) == (0, 0, STEPS * UPDATES)
