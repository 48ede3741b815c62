"""Whether this machine has what a recipe points at: data files, a model's folder, a network interface."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from asyncrl.config.errors import RecipeError, quoted
from asyncrl.config.recipe import AgentTask, Model, Recipe, SingleTurnTask, tasks_by_key
from asyncrl.config.weights import WeightsConfig


def check_files(recipe: Recipe) -> None:
    """Raise RecipeError where the recipe names a data file, model folder or interface that is not on this machine."""
    for missing in missing_files(recipe):
        raise missing


def missing_files(recipe: Recipe) -> Iterator[RecipeError]:
    """What `check_files` raises, one after the other."""
    checks: list[Callable[[], None]] = []
    for key, task in tasks_by_key(recipe.task).items():
        if isinstance(task, SingleTurnTask | AgentTask):
            named = ((name, getattr(task.data, name)) for name in ("train", "heldout"))
            checks += [partial(check_data_file, f"{key}.data.{name}", path) for name, path in named if path is not None]
        if task.curriculum is not None:
            checks.append(partial(_check_pass_rates, f"{key}.curriculum.pass_rates", task.curriculum.pass_rates))
    checks += [partial(check_model_folder, recipe.model), partial(_check_interface, recipe.weights)]
    for check_one in checks:
        try:
            check_one()
        except RecipeError as error:
            yield error


def check_data_file(key: str, given: str | Sequence[str]) -> None:
    """Raise RecipeError if this machine does not have a file, or one that fits the pattern, or a folder that `key`
    names."""
    for path in [given] if isinstance(given, str) else given:
        own = Path(path).expanduser()
        if not (path and (own.exists() or next(glob.iglob(str(own), recursive=True), None))):
            raise RecipeError(
                f"{key} is {quoted(path)}; there is no such file. Paths are taken from the working folder, {Path.cwd()}"
            )


def _check_pass_rates(key: str, path: str) -> None:
    """The folder of a run will do too."""
    if not Path(path).expanduser().is_dir():
        check_data_file(key, path)


def check_model_folder(model: Model) -> None:
    """Raise RecipeError if model.path is a folder's, and there is no such folder."""
    path = model.path
    if path.startswith((".", "/", "~")) and not Path(path).expanduser().is_dir():
        raise RecipeError(
            f"model.path is {quoted(path)}; there is no such folder. Write builtin:tiny, a folder, or a Hugging Face "
            "id such as Qwen/Qwen3-0.6B"
        )


def _check_interface(weights: WeightsConfig) -> None:
    if weights.interface is None:
        return
    import psutil  # here: nobody else needs it to read a recipe

    found = sorted(psutil.net_if_addrs())  # type: ignore[no-untyped-call]
    if weights.interface not in found:
        raise RecipeError(
            f"weights.interface is {quoted(weights.interface)}; the learner's host has no such network interface. It "
            f"has {', '.join(found)}"
        )
