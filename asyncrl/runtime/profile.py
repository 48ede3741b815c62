"""`asyncrl profile`: some answers of a recipe's model to its train rows, what they say, and what to do next.

A profile's folder:

    profile.json      everything: settings, report, verdict, each answer with parts, seed, times and class
    profile.html      the same to look at
    judgements.csv    for a person, who says which answers are right
    agreement.json    what the filled sheet says (`judge`)
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from asyncrl.config.recipe import MixtureTask, Recipe, mixed_tasks
from asyncrl.config.rewards import Declared, declared
from asyncrl.runtime import folder as folders
from asyncrl.runtime.evaluation import Plan, Target, answers_of, sampling_used, use_engines
from asyncrl.runtime.profile_verdict import verdict
from asyncrl.tasks.build import construct
from asyncrl.tasks.mixture import BETWEEN
from asyncrl.telemetry.documents import write_document
from asyncrl.telemetry.profile_page import page
from asyncrl.telemetry.profile_sheet import marks, sheet

DOCUMENT, PAGE, SHEET, AGREEMENT = "profile.json", "profile.html", "judgements.csv", "agreement.json"

LETTERS = "bcdfghjklmnpqrst"
"""Of a profile's id: no vowels, so that no spreadsheet reads a month into it; sixteen, a letter for four bits."""


class ProfileError(Exception):
    """A profile that was written before cannot be read; one line with the file and the fix."""


async def profile(
    target: Target, *, prompts: int, samples: int, on_answer: Callable[[int, int], None]
) -> dict[str, Any]:
    """Sample `samples` answers to each of the first `prompts` train rows in the order in which a run takes them, as a
    run would, and score them. `on_answer` hears how many answers there are, of how many.

    Returns the document (JSON) that `write` writes. Raises what `runtime.evaluation.evaluate` raises.
    """
    recipe = target.recipe
    use_engines(recipe)
    from asyncrl.runtime.profile_report import Setting, report  # loads NumPy and pyarrow

    plan = Plan(
        prompts=prompts,
        samples=samples,
        ks=(),
        temperature=None,
        max_tokens=None,
        seed=recipe.run.seed,
        pass_above=recipe.eval.pass_above,
    )
    heard: list[float] = []

    def hear(_: str, done: int, total: int) -> None:
        heard.append(time.monotonic())
        on_answer(done, total)

    task = construct(recipe.task, seed=recipe.run.seed)
    own = {name: Declared(weight, "outcome") for name, weight in task.part_weights().items()}
    model, answers = await answers_of(recipe, target, plan, split="train", on_answer=hear)
    setting = Setting(
        group_size=recipe.collector.group_size,
        groups_per_step=recipe.learner.groups_per_step,
        pass_above=plan.pass_above,
        seed=plan.seed,
        parts={**own, **_declared(recipe)},
        mixed=isinstance(recipe.task, MixtureTask),
        score_workers=recipe.collector.score_workers,
        fresh_only=recipe.buffer.dynamic_sampling,
    )
    found = report(answers, setting, seconds=heard[-1] - heard[0])
    return {
        "id": _id(answers),
        "target": target.name,
        "model": model,
        "weights": list(target.weights),
        "task": task.name,
        "split": "train",
        "per_prompt": samples,
        "seed": plan.seed,
        "sampling": sampling_used(recipe, plan),
        "versions": folders.versions(),
        "report": found,
        "verdict": verdict(found),
        "answers": answers,
    }


def write(folder: Path, document: Mapping[str, Any]) -> None:
    """Write the files of a profile into its new folder."""
    write_document(folder / DOCUMENT, document)
    (folder / PAGE).write_text(page(document), encoding="utf-8")
    (folder / SHEET).write_bytes(sheet(document["id"], document["answers"]))


def judge(path: Path, folder: Path | None) -> dict[str, Any]:
    """A profile's document with what the filled sheet in `path` says: `agreement`, and the verdict by it too. Both are
    kept in the profile's folder, which is that of the sheet if `folder` is None. Needs no model.

    Raises SheetError, ProfileError.
    """
    from asyncrl.runtime.profile_agreement import agreement  # loads NumPy

    folder = path.parent if folder is None else folder
    document = _read(folder / DOCUMENT)
    answers, pass_above = document["answers"], document["report"]["pass_above"]
    judged = marks(path, document["id"], len(answers), pass_above=pass_above)
    agreed = agreement(answers, judged, pass_above=pass_above, seed=document["seed"])
    said = verdict(document["report"], agreed)
    marked = {f"{document['id']}-{number}": right for number, right in judged.items()}
    write_document(folder / AGREEMENT, {"agreement": agreed, "verdict": said, "marks": marked})
    return {**document, "agreement": agreed, "verdict": said}


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        if not {"id", "answers", "report", "seed", "verdict"} <= document.keys():
            raise ValueError
    except FileNotFoundError:
        raise ProfileError(
            f"there is no {path}; name the profile's folder: asyncrl profile FOLDER --agree SHEET"
        ) from None
    except (ValueError, AttributeError):
        raise ProfileError(f"{path} is not what `asyncrl profile` writes; name the folder of the profile") from None
    return document


def _declared(recipe: Recipe) -> dict[str, Declared]:
    """Weight and role of every number that the recipe's verifiers make; of a mixture by `task/part`."""
    if not isinstance(recipe.task, MixtureTask):
        return declared(recipe.task.rewards)
    tasks = mixed_tasks(recipe.task)
    return {f"{name}{BETWEEN}{part}": of for name, one in tasks.items() for part, of in declared(one.rewards).items()}


def _id(answers: list[dict[str, Any]]) -> str:
    """Letters that tell these answers from others, so that no sheet is read for another profile's."""
    digest = blake2b(json.dumps(answers).encode(), digest_size=3).hexdigest()
    return "".join(LETTERS[int(digit, 16)] for digit in digest)
