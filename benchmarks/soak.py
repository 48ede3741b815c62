"""`soak`: kill -9, again and again, in every phase of a real run. Is anything lost, trained twice, or does it hang?

`asyncrl run` with a simulated engine, a learner of two ranks and the embedded store. Each kill is in a phase that was
named beforehand (`soak_child`), or of the store or the launcher from outside; some steps must follow before the next.
Where the launcher died, the run goes on with `asyncrl run --resume`, as a person would; all others it starts again.

Judged by the archive alone. The store never has more tickets than steps left to train them, so a run that has ended
after S steps of B groups has trained exactly the tickets 0 .. S x B - 1 in the weights that survive, each once.

Controls, in the benchmark's own processes: a new lineage that undoes none of the training that died with the old one's
weights must lose tickets, and one that undoes all of it must train some twice.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.soak_child import POINTS, SABOTAGE
from asyncrl.benchmarks.soak_run import ENDING, ENDLESS, GROUP_SIZE, GROUPS_PER_STEP, OUTSIDE, SoakRun
from asyncrl.benchmarks.watched_run import Ended, Hung
from asyncrl.buffers.archive import Archive

PHASES = (*POINTS, *OUTSIDE)

KILLS, QUICK_KILLS = 200, len(PHASES)
ENOUGH = 15  # kills in each phase, of KILLS

BETWEEN = (4, 6)
"""Steps from one kill to the next. The least of them outlasts what was held when a collector died (two steps' worth at
age 1), so that it must have come back, and no ticket lives through three such deaths, which would be poison."""

MOST_HUNG = 3  # more would only repeat what is known, at minutes each
LAST_STEPS = 6  # made after the last kill, so that the run ends by itself
FIRST_STEPS = 5  # before the first kill
CONTROL_STEPS = 20  # of a control, whose one kill is over by then


class Kill(NamedTuple):
    """One that is planned. The point of a kill from outside is its phase."""

    phase: str
    point: str


class Struck(NamedTuple):
    """One that was done. `seconds` until the steps after it were made."""

    phase: str
    point: str
    wrong: Literal["", "hung", "ended"]
    seconds: float


@dataclass(frozen=True, slots=True)
class Account:
    """What the archive says of an ended run's surviving weights, in tickets."""

    tickets: int  # that its steps had to train
    lost: int  # not trained, or not all members
    duplicated: int  # some member trained more than once


@dataclass(frozen=True, slots=True)
class Soaked:
    """One run and its kills."""

    kills: Sequence[Struck]
    account: Account
    audit: str  # "" or what `asyncrl buffer audit` found
    lineages: int
    seconds: float

    def went(self, wrong: Literal["hung", "ended"]) -> int:
        """Kills after which it went so."""
        return sum(kill.wrong == wrong for kill in self.kills)


def measure(*, quick: bool, say: Say, kills: int | None = None) -> Measured:
    """One row per phase, one for the whole run, one per control. kills: 200, or with `quick` one in each phase."""
    count = kills or (QUICK_KILLS if quick else KILLS)
    with tempfile.TemporaryDirectory(prefix="asyncrl-soak-") as folder:
        soaked = soak(Path(folder) / "soak", schedule(count, seed=0), say=say)
        controls = {how: control(Path(folder) / how, how, say=say) for how in SABOTAGE}
    return Measured(rows=rows(soaked, controls), targets=targets(soaked, controls))


def schedule(kills: int, *, seed: int) -> list[Kill]:
    """`kills` kills, round by round of one in each phase, in another order each round; a phase's points take turns."""
    source = random.Random(seed)
    chosen: list[Kill] = []
    for number in range(-(-kills // len(PHASES))):
        for phase in source.sample(PHASES, len(PHASES)):
            points = POINTS.get(phase, (phase,))
            chosen.append(Kill(phase, points[number % len(points)]))
    return chosen[:kills]


def soak(
    folder: Path,
    kills: Sequence[Kill],
    *,
    say: Say,
    sabotage: str = "",
    every_steps: int = 2,
    ranks: int = 2,
    last: int | None = None,
) -> Soaked:
    """Run in `folder`, kill by kill, to an end of its own; then count. every_steps: between two checkpoints; last: the
    run's last step, None: LAST_STEPS after the last kill."""
    began = time.monotonic()
    source = random.Random(1)
    done: list[Struck] = []
    with SoakRun(folder, sabotage=sabotage, every_steps=every_steps, ranks=ranks) as run:
        run.begin(ENDLESS if last is None else last)
        run.steps(FIRST_STEPS)
        for phase, point in kills:
            at = time.monotonic()
            wrong: Literal["", "hung", "ended"] = ""
            try:
                run.kill(point)
                at = time.monotonic()
                if phase in ENDING:
                    run.go_on()
                run.steps(source.randint(*BETWEEN))
            except (Hung, Ended) as error:
                wrong = "hung" if isinstance(error, Hung) else "ended"
                say(f"kill {len(done) + 1}, {point}: {error}")
                run.go_on(by_force=True)
                run.steps(BETWEEN[0])
            done.append(Struck(phase, point, wrong, time.monotonic() - at))
            say(f"kill {len(done)} of {len(kills)}, {point}: went on after {done[-1].seconds:.1f} s")
            if sum(kill.wrong == "hung" for kill in done) > MOST_HUNG:
                break
        steps = run.end_after(LAST_STEPS) if last is None else run.end(last)
        archive = Archive(run.folder / "archive")
        return Soaked(
            kills=done,
            account=account(archive, steps=steps, groups_per_step=GROUPS_PER_STEP, group_size=GROUP_SIZE),
            audit=run.audit(),
            lineages=max(part.lineage for part in archive.parts()),
            seconds=time.monotonic() - began,
        )


def control(folder: Path, how: str, *, say: Say) -> Soaked:
    """One kill of the learner, with the guard taken out of the store's scripts. Without a checkpoint everything that
    was trained is dead, and with one after every second step some of it is not."""
    every_steps = 2 if how == "undo-everything" else 1000
    kills = [Kill("optimizer", "optimizer.after")]
    return soak(folder, kills, say=say, sabotage=how, every_steps=every_steps, ranks=1, last=CONTROL_STEPS)


def account(archive: Archive, *, steps: int, groups_per_step: int, group_size: int) -> Account:
    """Count the tickets of an ended run by the parts of its surviving branch. Raises FileNotFoundError where a step has
    no part."""
    branch = archive.branch(steps)
    made = sum(stretch.last_step - stretch.first_step + 1 for stretch in branch)
    if made != steps:
        raise FileNotFoundError(f"{archive.folder}: the surviving branch has {made} steps of {steps}")
    rows = archive.table(branch, columns=["ticket", "member"])
    trained = Counter(zip(rows["ticket"].to_pylist(), rows["member"].to_pylist(), strict=True))
    due = range(steps * groups_per_step)
    return Account(
        tickets=len(due),
        lost=sum(not all(trained[ticket, member] for member in range(group_size)) for ticket in due),
        duplicated=len({ticket for (ticket, _), times in trained.items() if times > 1}),
    )


def rows(soaked: Soaked, controls: dict[str, Soaked]) -> list[Row]:
    found: list[Row] = []
    for phase in PHASES:
        kills = [kill for kill in soaked.kills if kill.phase == phase]
        if kills:
            seconds = [kill.seconds for kill in kills]
            found.append(
                {
                    "kind": "phase",
                    "phase": phase,
                    "points": ", ".join(sorted({kill.point for kill in kills})),
                    "kills": len(kills),
                    "went_wrong": sum(bool(kill.wrong) for kill in kills),
                    "seconds_median": median(seconds),
                    "seconds_max": max(seconds),
                }
            )
    for kind, run in {"soak": soaked, **controls}.items():
        found.append(
            {
                "kind": kind,
                "kills": len(run.kills),
                **asdict(run.account),
                "hung": run.went("hung"),
                "ended": run.went("ended"),
                "audit": run.audit,
                "lineages": run.lineages,
                "seconds": run.seconds,
                "seconds_per_kill": run.seconds / max(1, len(run.kills)),
            }
        )
    return found


def targets(soaked: Soaked, controls: dict[str, Soaked]) -> list[Target]:
    count = Counter(kill.phase for kill in soaked.kills)
    planned = min(ENOUGH, max(1, len(soaked.kills) // len(PHASES)))
    return [
        Target("tickets lost", soaked.account.lost, 0, "lower"),
        Target("tickets trained more than once", soaked.account.duplicated, 0, "lower"),
        Target("kills after which the run hung", soaked.went("hung"), 0, "lower"),
        Target("kills that ended a run which should have gone on", soaked.went("ended"), 0, "lower"),
        Target("kills in the rarest phase", min(count[phase] for phase in PHASES), planned, "higher"),
        Target("the audit found something", float(bool(soaked.audit)), 0, "lower"),
        Target(
            "control: tickets lost where dead training is not undone",
            controls["undo-nothing"].account.lost,
            1,
            "higher",
        ),
        Target(
            "control: tickets trained twice where living training is undone",
            controls["undo-everything"].account.duplicated,
            1,
            "higher",
        ),
    ]
