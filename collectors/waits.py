"""What a collector waits for inside itself, since when, and who ends it: goes out with every beat.

What it waits for in the store (an admissible ticket) the store knows by itself.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TypedDict

from asyncrl.collectors.fleet import Fleet
from asyncrl.collectors.updates import Updates
from asyncrl.config.recipe import CustomTask, Recipe, tasks_by_key
from asyncrl.weights.base import WeightsPhase

STILL_S = 5.0
"""An engine that made no token, or a score that is not there, for so long is named. Shorter pauses are ordinary."""

PHASES: dict[WeightsPhase, tuple[str, str]] = {
    "announce": ("the weights of {weights} to be offered over {transport}", "the learner's sender"),
    "stage": ("the weights of {weights} to arrive over {transport}", "their transport"),
    "activate": ("the weights of {weights} to be activated", "the engine, between two decode steps"),
    "verify": ("the weights of {weights} to be verified", "the engine, which hashes what it serves"),
}
"""Phase of weights on their way -> what is waited for, and who ends the wait."""

Wait = TypedDict("Wait", {"for": str, "since": float, "by": str})
"""As in a beat's `info`: what is waited for; since when, unix seconds; who or what ends the wait."""


def waits_of(
    recipe: Recipe, fleet: Fleet, updates: Updates, *, scoring: Collection[float], answering: Collection[float] = ()
) -> list[Wait]:
    """Everything that holds work up now; [] while the collector works. scoring, answering: when each score, and each
    answer of an environment, that is not there yet was asked for, monotonic seconds."""
    now, here = time.time(), time.monotonic()
    found: list[Wait] = []

    def add(what: str, since: float, by: str) -> None:
        found.append({"for": what, "since": round(now - (here - since), 3), "by": by})

    course = updates.course
    if updates.holding_since is not None:
        add("the end of an evaluation, to serve new weights", updates.holding_since, "this collector's engines")
    elif course.phase is not None and course.weights is not None:
        lineage, version = course.weights
        what, by = PHASES[course.phase]
        transport = "none" if course.choice is None else course.choice.transport
        what = what.format(weights=f"lineage {lineage} version {version}", transport=transport)
        add(what, course.since, f"{by}, within {recipe.weights.deadline_s:g} s")
    elif course.error:
        add(f"weights that it can take: {course.error}", course.failed_at, "the learner, which publishes the next")
    elif fleet.oldest is None and not any(host.failed for host in fleet.hosts):
        add("weights, of which none were announced", updates.began, "a learner")
    for host in fleet.hosts:
        if host.failed:
            what = f"engine {host.engine.name}, which failed: {host.failed}"
            add(what, host.failed_since, "this collector, which starts it again")
        elif host.engine.serving is None and host.failed_since:
            what = f"the newest weights for engine {host.engine.name}, which was started again"
            add(what, host.failed_since, f"their transport, within {recipe.weights.deadline_s:g} s")
        elif host.entrance.closed_since is not None and host.entrance.inside:
            what = f"the end of {host.entrance.inside} requests of engine {host.engine.name}, to serve new weights"
            within = recipe.collector.group_timeout_s if recipe.weights.update == "drain" else recipe.weights.deadline_s
            add(what, host.entrance.closed_since, f"the engine, within {within:g} s")
        elif (still := host.still_s(here)) > STILL_S:
            what = f"a token of engine {host.engine.name}, which has {host.entrance.inside} requests"
            add(what, here - still, f"the engine; it is started again after {recipe.collector.group_timeout_s:.0f} s")
    if fleet.waiting and here - min(fleet.waiting.values()) > STILL_S:
        what = f"an engine for {len(fleet.waiting)} requests"
        within = recipe.collector.group_timeout_s
        add(what, min(fleet.waiting.values()), f"an engine with weights they may use, within {within:.0f} s each")
    steps_s = [task.step_timeout_s for task in tasks_by_key(recipe.task).values() if isinstance(task, CustomTask)]
    if answering and here - min(answering) > STILL_S and steps_s:
        what = f"{len(answering)} environments"
        add(what, min(answering), f"their processes, within {max(steps_s):.0f} s of each step")
    if scoring and here - min(scoring) > STILL_S:
        what = f"{len(scoring)} scores"
        add(what, min(scoring), f"the verifiers, within {recipe.collector.score_timeout_s:.0f} s of work each")
    return found
