"""`asyncrl eval`: what is evaluated (a run, a checkpoint, a recipe's model), and the document that comes out of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.config.loading import is_path, load_recipe, packaged_recipes
from asyncrl.config.merge import flatten
from asyncrl.config.overrides import override_document
from asyncrl.config.recipe import Recipe, SimulatedEngine
from asyncrl.config.yaml_text import YamlTextError, parse
from asyncrl.data.errors import DataError
from asyncrl.runtime import folder as folders
from asyncrl.runtime import models
from asyncrl.runtime.processes import RunFailed, use_devices, use_threads
from asyncrl.staleness import Weights
from asyncrl.tasks.base import Split, TaskError
from asyncrl.tasks.row_check import check_rows

if TYPE_CHECKING:
    from asyncrl.collectors.engines.base import Sampling

MODEL_PATH = "model.path"

NO_VERSION = Weights(0, 0)
"""Of a model that no run published."""


class TargetError(Exception):
    """What should be evaluated cannot be found or used; names it and the fix."""


@dataclass(frozen=True, slots=True)
class Target:
    """Something to evaluate: `recipe.model` is its model. `name` is for a person. weights: which of a run's."""

    name: str
    recipe: Recipe
    weights: Weights = NO_VERSION


@dataclass(frozen=True, slots=True)
class Plan:
    """How. `temperature` and `max_tokens` None: those of `sampling`, which has what is other than
    `collector.sampling`, or of that. `ks`: of pass@k, each at most `samples`. difficulty: a column of the rows."""

    prompts: int
    samples: int
    ks: Sequence[int]
    temperature: float | None
    max_tokens: int | None
    seed: int
    pass_above: float
    sampling: Mapping[str, Any] = field(default_factory=dict)
    difficulty: str | None = None

    def adjust(self, sampling: Sampling) -> Sampling:
        """The recipe's sampling, with what this plan sets instead."""
        sampling = replace(sampling, **self.sampling)
        return replace(
            sampling,
            temperature=sampling.temperature if self.temperature is None else self.temperature,
            max_tokens=self.max_tokens or sampling.max_tokens,
        )


def find_target(given: str | None, *, recipe: str | None = None, overrides: Sequence[str] = ()) -> Target:
    """A run (folder, name; None: the newest), a checkpoint or other model folder, or a recipe (path, packaged name).

    A name that is both a run's and a packaged recipe's means the run. `recipe`: of a model folder that lies in no run's
    folder. Raises TargetError, RunFolderError, RecipeError.
    """
    if given is not None and _is_model(given):
        return _checkpoint(given, recipe, overrides)
    if recipe is not None:
        if given is None:
            raise TargetError("--recipe goes with a model folder; the newest run has a recipe of its own: leave it out")
        raise TargetError(
            f"--recipe goes with a model folder (with config.json), and {given} is none. Leave it out if that is a run "
            f"or a recipe; if it is the id of a model: asyncrl eval {recipe} --set model.path={given}"
        )
    if given is not None and is_path(given) and Path(given).expanduser().is_file():
        return _recipe(given, overrides)
    try:
        return _run(folders.find(given), overrides)
    except folders.RunFolderError:
        if given in packaged_recipes():
            return _recipe(given, overrides)
        if given is None:
            raise
        raise TargetError(
            f"{given} is no run folder (with recipe.yaml), no model folder (with config.json), no recipe file, and no "
            f"name of a run in {folders.PARENT.resolve()} or of a packaged recipe ({', '.join(packaged_recipes())})"
        ) from None


def find_against(given: str, target: Target) -> Target:
    """What `target` is compared with, in the same forms. Raises what `find_target` raises."""
    if not _is_model(given):
        return find_target(given)
    folder, weights = _intact(given)
    model = msgspec.structs.replace(target.recipe.model, path=str(folder))
    return Target(f"checkpoint {folder}", msgspec.structs.replace(target.recipe, model=model), weights)


def _recipe(name: str, overrides: Sequence[str]) -> Target:
    recipe = load_recipe(name, overrides=overrides, single_process=True).recipe
    return Target(f"recipe {name}, model {recipe.model.path} as it is", recipe)


def _run(folder: Path, overrides: Sequence[str]) -> Target:
    if is_supervised(folder):
        raise TargetError(
            f"{folder} is of `asyncrl sft`, which has no task; evaluate its model by another recipe's: "
            f"asyncrl eval {folder / 'model'} --recipe RECIPE"
        )
    from asyncrl.learners.checkpoint import find_resumable  # loads torch

    checkpoint = find_resumable(folder / "checkpoints")
    if checkpoint is None:
        raise TargetError(
            f"run {folder} has no intact checkpoint yet; {folder / 'recipe.yaml'} evaluates the model it started from"
        )
    name = f"run {folder}, version {checkpoint.weights.version}"
    recipe = _with_model(str(folder / "recipe.yaml"), checkpoint.folder, overrides)
    return Target(name, recipe, checkpoint.weights)


def _checkpoint(given: str, recipe: str | None, overrides: Sequence[str]) -> Target:
    folder, weights = _intact(given)
    if recipe is None:
        run = folder.parent.parent  # <run>/checkpoints/version-000020
        if not (run / "recipe.yaml").is_file() or is_supervised(run):
            raise TargetError(
                f"{folder} lies in no folder of `asyncrl run`; say by which recipe's task: --recipe RECIPE"
            )
        recipe = str(run / "recipe.yaml")
    return Target(f"checkpoint {folder}", _with_model(recipe, folder, overrides), weights)


def is_supervised(run: Path) -> bool:
    """Whether the run folder is of `asyncrl sft`."""
    try:
        recipe = parse((run / "recipe.yaml").read_text(encoding="utf-8"))
    except YamlTextError:
        return False  # what is wrong with it is said where it is loaded
    return isinstance(recipe, dict) and "sft" in recipe


def _is_model(given: str) -> bool:
    return (Path(given).expanduser() / "config.json").is_file()


def _intact(given: str) -> tuple[Path, Weights]:
    """A model folder and, if it is a checkpoint of a run, its version; that is compared with its checksums. Raises
    TargetError."""
    from asyncrl.learners.checkpoint import MANIFEST, CheckpointError, load  # loads torch

    folder = Path(given).expanduser().resolve()
    if (folder / MANIFEST).is_file():
        try:
            return folder, load(folder).weights
        except CheckpointError as error:
            raise TargetError(str(error)) from None
    return folder, NO_VERSION


def _with_model(recipe: str, folder: Path, overrides: Sequence[str]) -> Recipe:
    """The recipe with the model in `folder` as its own."""
    if MODEL_PATH in flatten(override_document(overrides)):
        raise TargetError(f"--set {MODEL_PATH}: the model is {folder}; to evaluate another one give a recipe")
    path = str(folder).replace("${", "$${")  # no variable of the environment
    own = f"{MODEL_PATH}={json.dumps(path, ensure_ascii=False)}"  # JSON text in quotes is YAML, but for escaped pairs
    return load_recipe(recipe, overrides=[*overrides, own], single_process=True).recipe


async def evaluate(
    target: Target, against: Target | None, plan: Plan, *, on_answer: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """Evaluate `target`, and `against` on the very same prompts and seeds. `on_answer` hears whose answers are
    sampled, how many by now, of how many.

    Both are evaluated by the task and settings of `target`'s recipe; of `against` only the model is taken. Returns a
    JSON document: of each its `target`, `model`, `weights`, `report` and `answers`; the `sampling`; and the
    `difference` (`collectors/evaluation/`). Raises what a person can have caused before the work starts as the error of
    its part, RunFailed after.
    """
    use_engines(target.recipe)
    from asyncrl.collectors.evaluation.compared import comparison
    from asyncrl.collectors.evaluation.report import classes

    ours = await _evaluate_one(target.recipe, target, plan, on_answer)
    if against is None:
        return {**ours, "report": _report(ours, plan), "sampling": sampling_used(target.recipe, plan)}
    theirs = await _evaluate_one(target.recipe, against, plan, on_answer)
    # One that only one side has, the other has none of: which is a number, too.
    wrong = classes(ours["answers"]) | classes(theirs["answers"])
    return {
        **ours,
        "report": _report(ours, plan, wrong),
        "sampling": sampling_used(target.recipe, plan),
        "against": {**theirs, "report": _report(theirs, plan, wrong)},
        "difference": comparison(
            ours["answers"], theirs["answers"], ks=plan.ks, pass_above=plan.pass_above, seed=plan.seed
        ),
    }


def use_engines(recipe: Recipe) -> None:
    """Have this process see the GPUs of the recipe's engines; once, before anything computes. Raises TargetError if
    they have no model."""
    if isinstance(recipe.collector.engine, SimulatedEngine):
        raise TargetError("collector.engine.type is simulated: it has no model, so there is nothing to evaluate")
    use_devices("collector.devices", recipe.collector.devices)


def sampling_used(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """What answers are sampled with, by name; as a document has it."""
    from asyncrl.collectors.rollout import sampling_of

    sampling = plan.adjust(sampling_of(recipe, ()))
    return {name: value for name, value in asdict(sampling).items() if name != "stop_token_ids"}


async def _evaluate_one(
    recipe: Recipe, target: Target, plan: Plan, on_answer: Callable[[str, int, int], None]
) -> dict[str, Any]:
    model, answers = await answers_of(recipe, target, plan, split="heldout", on_answer=on_answer)
    return {"target": target.name, "model": model, "weights": list(target.weights), "answers": answers}


def _report(side: Mapping[str, Any], plan: Plan, wrong: Iterable[str] | None = None) -> dict[str, Any]:
    from asyncrl.collectors.evaluation.report import report  # loads NumPy

    return report(
        side["answers"], ks=plan.ks, samples=plan.samples, pass_above=plan.pass_above, seed=plan.seed, wrong=wrong
    )


async def answers_of(
    recipe: Recipe, target: Target, plan: Plan, *, split: Split, on_answer: Callable[[str, int, int], None]
) -> tuple[str, list[dict[str, Any]]]:
    """The folder of `target`'s model, and its scored answers to the first `plan.prompts` rows of a split of the
    recipe's task (`heldout.evaluate`). `on_answer` as in `evaluate`; it hears of 0 when the engines are ready. Raises
    what `evaluate` raises."""
    from transformers.utils import logging as transformers_logging  # loads torch, as do the next

    from asyncrl.collectors.evaluation.standalone import evaluate_folder
    from asyncrl.learners.model import ModelError

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # of loading weights: it is over before it can be read
    await check_rows(recipe.task, recipe.collector, seed=recipe.run.seed)
    path = await asyncio.to_thread(models.resolve, target.recipe)
    use_threads(path)
    try:
        answers = await evaluate_folder(
            recipe,
            path,
            prompts=plan.prompts,
            samples=plan.samples,
            seed=plan.seed,
            adjust=plan.adjust,
            on_answer=partial(on_answer, target.name),
            split=split,
            weights=target.weights,
            difficulty=plan.difficulty,
        )
    except (DataError, TaskError, ModelError):
        raise
    except Exception as error:
        raise RunFailed(f"the evaluation of {target.name} failed: {type(error).__name__}: {error}") from error
    return str(path), answers
