"""`resume`: kill -9 at a random moment of a random step, then `--resume`; are the bits those of a run left alone?

The tiny recipe with `run.deterministic`, a few steps long. At age 0 everything must be equal: what each step trained
(prompts, tokens, log-probs, rewards), the last checkpoint's weights, the optimizer's moments and counts, the random
numbers. At a higher age which version samples what depends on time, and each step must train the same prompts.

Controls, each killed right after a step whose answers are lost with it: without the optimizer's moments, and with other
draws at a second attempt, bits must differ; with a lookahead, prompts.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.resume_child import DRAWS, LEFT_OUT, MODULE, MOMENTS
from asyncrl.benchmarks.resume_left import Left, difference, left_by
from asyncrl.benchmarks.runs import RUN_LIMIT_S
from asyncrl.benchmarks.watched_run import ASYNCRL, WatchedRun
from asyncrl.telemetry.metrics import read_metrics

STEPS, EVERY_STEPS = 15, 3

SETTINGS: Mapping[str, Any] = {
    "run.name": "resume",  # seeds are a function of it
    "run.deterministic": "true",
    "run.max_steps": STEPS,
    "collector.group_size": 4,
    "learner.groups_per_step": 4,
    "learner.checkpoint.every_steps": EVERY_STEPS,
    "eval.at_start": "false",
    "eval.at_end": "false",
}
"""Small, since starting takes the time. The learning rate still warms up in the steps that are made again."""

AGE = 2  # of the runs of which only the prompts must be equal
KILLS, QUICK_KILLS, FULL_KILLS = 5, 2, 10  # at age 0; half as many at AGE

Victim = Literal["tree", "learner", "collector"]
VICTIMS: tuple[Victim, ...] = ("tree", "tree", "learner", "tree", "collector")
"""In turns: all processes at once, or one of them."""

LAST = STEPS - 5
"""Steps after which a kill still comes before the end, however late this process sees the step."""

LOSING = EVERY_STEPS + 2
"""Steps after which a kill loses answers of weights that die with it. Those of the step after the checkpoint's were
sampled by weights that the checkpoint has, and are trained again as they are."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One that is planned: SIGKILL once `after` steps are made, and then a part of a step's time later."""

    victim: Victim
    after: int
    part: float


@dataclass(frozen=True, slots=True)
class Kind:
    """What is killed: a run, or a control. left_out: what that does without (`resume_child`)."""

    name: str
    age: int
    left_out: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


CONTROLS = (
    Kind("without moments", 0, left_out=MOMENTS),
    Kind("other draws", 0, left_out=DRAWS),
    Kind("not in order", AGE, settings={"buffer.lookahead": 1.5}),
)
"""Each must differ from the undisturbed run of its age."""


def measure(*, quick: bool, say: Say, full: bool = False) -> Measured:
    """One row per kill, one per control. 5 kills at age 0 and 2 at age 2; quick: 2 and 1; full: 10 and 5."""
    from asyncrl.learners.tiny import ensure_tiny  # loads torch

    ensure_tiny(0)  # made once per machine and cached: not part of a run
    kills = FULL_KILLS if full else QUICK_KILLS if quick else KILLS
    rows: list[Row] = []
    wanted: dict[int, Left] = {}
    with tempfile.TemporaryDirectory(prefix="asyncrl-resume-") as name:
        folder = Path(name)

        def row(kind: Kind, kill: Kill) -> None:
            rows.append(killed(folder / str(len(rows)), kind, kill, wanted[kind.age]))
            say(told(rows[-1]))

        for kind, count in ((Kind("kill", 0), kills), (Kind("kill", AGE), kills // 2)):
            wanted[kind.age] = undisturbed(folder / f"age{kind.age}", kind.age)
            say(f"age {kind.age}: {STEPS} steps that nobody disturbed")
            for kill in schedule(count, seed=kind.age):
                row(kind, kill)
        for kind in CONTROLS:
            row(kind, Kill("tree", LOSING, 0.5))
    return Measured(rows=rows, targets=targets(rows))


def schedule(kills: int, *, seed: int) -> list[Kill]:
    """`kills` kills of VICTIMS in turns, each after another random step where there are enough."""
    source = random.Random(seed)
    steps = list(range(1, LAST + 1))
    source.shuffle(steps)
    return [
        Kill(VICTIMS[number % len(VICTIMS)], steps[number % len(steps)], source.random()) for number in range(kills)
    ]


def undisturbed(folder: Path, age: int) -> Left:
    """What a run leaves that nobody kills. Raises RunError."""
    with WatchedRun(folder) as run:
        run.start({**SETTINGS, "buffer.max_trajectory_age": age})
        run.ends_well(limit_s=RUN_LIMIT_S)
    return left_by(run.folder, steps=STEPS)


def killed(folder: Path, kind: Kind, kill: Kill, wanted: Left) -> Row:
    """A run that is killed once and goes on to its end, compared with what an undisturbed one left.

    Raises RunError: it does not end well, or hangs."""
    began = time.monotonic()
    module, environment = (MODULE, {LEFT_OUT: kind.left_out}) if kind.left_out else (ASYNCRL, {})
    with WatchedRun(folder, module=module, environment=environment) as run:
        run.start({**SETTINGS, "buffer.max_trajectory_age": kind.age, **kind.settings})
        run.steps(kill.after - 1)
        before = time.monotonic()
        run.steps(1)
        time.sleep(kill.part * min(1.0, time.monotonic() - before))  # a random moment of the next step
        strike(run, kill.victim)
        if run.ended(limit_s=RUN_LIMIT_S) != 0:  # the supervisor is dead: else it starts again what died
            run.resume()
            run.ends_well(limit_s=RUN_LIMIT_S)
    starts = [record for record in read_metrics(run.folder / "metrics.jsonl") if record.get("event") == "start"]
    differs = difference(wanted, left_by(run.folder, steps=STEPS), bits=kind.age == 0)
    return {
        "kind": kind.name,
        "age": kind.age,
        "victim": kill.victim,
        "killed_after": kill.after,
        "resumed_from": starts[-1]["version"] if len(starts) > 1 else None,
        "equal": not differs,
        "differs": differs,
        "seconds": time.monotonic() - began,
    }


def strike(run: WatchedRun, victim: Victim) -> None:
    """SIGKILL."""
    if victim == "tree":
        run.kill_all()
    else:
        for process in run.children(victim):
            process.kill()  # type: ignore[no-untyped-call]


def told(row: Row) -> str:
    whence = "went on" if row["resumed_from"] is None else f"resumed from version {row['resumed_from']}"
    outcome = "equal" if row["equal"] else f"differs in {row['differs']}"
    return (
        f"{row['kind']}, age {row['age']}: {row['victim']} killed after step {row['killed_after']}, {whence}, "
        f"{outcome}; {row['seconds']:.0f} s"
    )


def targets(rows: Sequence[Row]) -> list[Target]:
    """What the rows should say."""

    def those(kind: str, age: int) -> list[Row]:
        return [row for row in rows if (row["kind"], row["age"]) == (kind, age)]

    def different(kind: str, age: int) -> int:
        return sum(not row["equal"] for row in those(kind, age))

    exact, apart = len(those("kill", 0)), len(those("kill", AGE))
    again = sum(row["killed_after"] - row["resumed_from"] for row in rows if row["resumed_from"] is not None)
    return [
        Target(f"age 0: kills of {exact} after which a bit is another", different("kill", 0), 0, "lower"),
        Target(f"age {AGE}: kills of {apart} after which a prompt is another", different("kill", AGE), 0, "lower"),
        Target("steps that were lost and made again", again, 1, "higher"),
        *(Target(f"control: {c.name}, runs of 1 that differ", different(c.name, c.age), 1, "higher") for c in CONTROLS),
    ]
