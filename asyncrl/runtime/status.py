"""`asyncrl status`: where a run is, what its learner does, and who waits for whom."""

from __future__ import annotations

from asyncrl.buffers.base import Blocked, State, Stats
from asyncrl.buffers.blocked import blocked_table, process_state
from asyncrl.buffers.limits import Limits
from asyncrl.learners import phase as phases
from asyncrl.learners.phase import LearnerPhase, Phase
from asyncrl.runtime.inspection_text import error_lines, member_lines, run_fact
from asyncrl.runtime.place import Place, opened
from asyncrl.runtime.weights_text import weights_lines
from asyncrl.telemetry import text
from asyncrl.telemetry.table import aligned


async def status_of(place: Place) -> list[str]:
    """What a person sees. Raises BufferError, and ValueError for a learner.json that no learner wrote."""
    learner = None if place.folder is None else phases.read(place.folder)
    async with opened(place) as buffer:
        stats, limits = await buffer.stats(), buffer.limits
    facts = [run_fact(stats, limits), ("learner", learner_fact(learner, stats))]
    after = error_lines(stats) or ["", *who_waits(stats, limits, learner)]
    weights = weights_lines(stats) if stats.phase != "ended" else []
    return [*aligned(facts), "", *member_lines(stats, limits), *(["", *weights] if weights else []), *after]


def who_waits(stats: Stats, limits: Limits, learner: LearnerPhase | None, *, most: int | None = None) -> list[str]:
    """The table, with what this host sees of the learner's process. `most`: rows."""
    lost = lost_learner(learner) if learner is not None and stats.phase != "ended" else []
    return blocked_table(stats, limits, more=lost, most=most)


def learner_fact(learner: LearnerPhase | None, stats: Stats) -> str:
    """What the learner does, by its own word; without that, by what the store sees of it."""
    if learner is not None:
        if learner.phase is Phase.ENDED:
            return "has ended"
        step = f" step {learner.step}" if learner.step else ""
        since = text.duration(max(0.0, stats.time - learner.since))
        return f"{learner.phase}{step} for {since} (process {learner.pid} on {learner.host})"
    if stats.states[State.LEASED]:
        return f"has the batch of step {stats.version + 1}; what it does with it, its run folder knows"
    if stats.waiting is not None:
        return f"leasing step {stats.version + 1}"
    return "never started" if stats.lineage == 0 else "between two calls, or not there; its run folder knows"


def lost_learner(learner: LearnerPhase) -> list[Blocked]:
    """The learner as someone who waits: one whose process is stopped, or gone before its end."""
    if learner.phase is Phase.ENDED or not (state := process_state(learner.pid, learner.host)):
        return []
    if state == "is stopped":
        what, by = f"its process, which is stopped in mid-{learner.phase}", f"kill -CONT {learner.pid}"
    else:
        what, by = "a new one: its process is gone", "asyncrl run --resume"
    return [Blocked("learner", what, learner.since, by)]
