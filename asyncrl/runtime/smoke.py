"""`asyncrl run --smoke`: two steps with all of a recipe's real parts, what each took, and what the whole run will take.

Which settings make a recipe short, and what the short run's records say; the run itself is one like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from asyncrl.buffers.archive import Archive
from asyncrl.config.derived import derive
from asyncrl.config.recipe import Recipe
from asyncrl.runtime.tail import JsonLines
from asyncrl.telemetry.text import duration

STEPS = 2
"""The second is the first one that can train what changed weights have sampled."""

PROMPTS = 8
"""Of an evaluation: whether it works is asked, not how good the model is."""

NAME = 64 - len("-smoke")
"""Characters of a run's name, which has 64 at most, that are kept of it."""

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """Something that has to work. seconds: that it took; None: it has not come to its end. what: it consists of."""

    name: str
    seconds: float | None
    what: str


def overrides(recipe: Recipe) -> list[str]:
    """As of `--set`: what makes a run of this recipe a short one. Its parts stay what they are: model, engines, task,
    transports, ranks, objective, batches and lengths. Every step is published and saved."""
    return [
        f"run.name={recipe.run.name[:NAME]}-smoke",
        "run.output_dir=null",
        f"run.max_steps={STEPS}",
        "weights.publish_every=1",
        "learner.max_restarts=0",  # a learner that dies is the part that failed
        "learner.checkpoint={every_steps: 1, keep_best: 0, keep_every: null}",
        "eval={at_start: true, at_end: true, every_steps: null}",
        f"eval.prompts={min(recipe.eval.prompts, PROMPTS)}",
    ]


@dataclass(frozen=True, slots=True)
class Short:
    """The short run, as far as it came. records: of its metrics.jsonl. Unix seconds: began, and generating, when the
    first of the trained tickets was issued; None: nothing was trained."""

    records: Sequence[Record]
    began: float
    generating: float | None

    @classmethod
    def of(cls, folder: Path, *, began: float) -> Short:
        """What the run in `folder` has left."""
        archive = Archive(folder / "archive")
        issued = pc.min(archive.table(columns=["issued"])["issued"]).as_py() if archive.parts() else None
        return cls(JsonLines(folder / "metrics.jsonl").read(), began, issued)

    @property
    def parts(self) -> list[Part]:
        """What it had to do, in this order."""
        start, before, last = self._event("start"), self._event("eval", version=0), self._step(STEPS)
        served = "collector, engines, weights to them, answers and their scores"
        found = [
            Part("learner", _from(self.began, start), "its processes, the store, the model"),
            Part("first evaluation", _from(_time(start), before), served),
        ]
        since = self.generating
        for number in range(1, STEPS + 1):
            step = self._step(number)
            found.append(_of_step(number, step, since))
            found.append(_of_checkpoint(number, self._event("checkpoint", version=number)))
            since = _time(step)
        after = _from(_time(last), self._event("eval", version=STEPS))
        return [*found, Part("last evaluation", after, "weights to the engines, answers and their scores")]

    @property
    def failed(self) -> str:
        """The name of the first part that has not come to its end; "": all have."""
        return next((part.name for part in self.parts if part.seconds is None), "")

    def projected(self, recipe: Recipe) -> str:
        """How long the whole run of `recipe` takes, judged by this one, which has ended well."""
        took = {part.name: part.seconds or 0.0 for part in self.parts}
        each = sum(took[f"step {number}"] for number in range(1, STEPS + 1)) / STEPS
        saves = [record["checkpoint/stall_s"] for record in self.records if record.get("event") == "checkpoint"]
        stalls = max(saves) * recipe.run.max_steps / recipe.learner.checkpoint.every_steps
        # Prompts that have slots at once take as long as one of them.
        together = max(derive(recipe).engine_slots * recipe.collector.engines, PROMPTS)
        evaluation = took["last evaluation"] * max(1.0, recipe.eval.prompts / together)
        evaluations = evaluation * (recipe.eval.at_start + recipe.eval.at_end)
        whole = took["learner"] + took["first evaluation"] + recipe.run.max_steps * each + stalls + evaluations
        steps = [record for record in self.records if "event" not in record]
        busy = max(step["train_s"] + step["publish_s"] for step in steps)
        return (
            f"{recipe.run.max_steps} steps will take about {duration(whole)}: {each:.1f} s a step, as these took on "
            f"average, of which the learner itself has work for {busy:.1f} s"
        )

    def _step(self, number: int) -> Record | None:
        return next((one for one in self.records if "event" not in one and one["step"] == number), None)

    def _event(self, name: str, **fields: int) -> Record | None:
        wanted = {"event": name, **fields}
        return next((one for one in self.records if all(one.get(key) == wanted[key] for key in wanted)), None)


def table(found: Sequence[Part]) -> list[str]:
    """A line for each part, up to the first that has not come to its end."""
    lines = []
    for part in found:
        took = "failed" if part.seconds is None else f"{part.seconds:.1f} s"
        lines.append(f"{'ok' if part.seconds is not None else '':<3} {part.name:<17} {took:>9}  {part.what}".rstrip())
        if part.seconds is None:
            break
    return lines


def _of_step(number: int, step: Record | None, since: float | None) -> Part:
    name = f"step {number}"
    if step is None:
        return Part(name, None, "groups answered and scored, trained, published")
    if step["skipped"]:
        return Part(name, None, "its gradients were not finite")
    what = (
        f"trained {step['tokens']:,} tokens of {step['groups']} groups in {step['train_s']:.1f} s, published "
        f"{step['weights/bytes'] / 1e6:,.1f} MB in {step['weights/publish_s']:.1f} s"
    )
    return Part(name, _from(since, step), what)


def _of_checkpoint(number: int, saved: Record | None) -> Part:
    name = f"checkpoint {number}"
    if saved is None:
        return Part(name, None, "written and synced")
    return Part(
        name, float(saved["checkpoint/save_s"]), f"training stood for {saved['checkpoint/stall_s']:.1f} s of it"
    )


def _time(record: Record | None) -> float | None:
    return None if record is None else float(record["time"])


def _from(began: float | None, end: Record | None) -> float | None:
    return None if began is None or end is None else float(end["time"]) - began
