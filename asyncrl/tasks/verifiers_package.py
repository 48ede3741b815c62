"""The package verifiers and an environment of it: found, configured, and refused where one answer is not enough.

Loaded when a recipe names it: importing it takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from asyncrl.tasks.base import NotInstalled, TaskError
from asyncrl.tasks.modules import complaint, search_working_folder


def package() -> Any:
    """`verifiers.v1`. Raises TaskError if it is not installed."""
    if importlib.util.find_spec("verifiers") is None:
        raise NotInstalled(
            "task.type is verifiers, and the package of that name is not installed: pip install 'asyncrl[verifiers]' "
            "(docs/packages.md)"
        )
    return importlib.import_module("verifiers.v1")


def part(name: str) -> Any:
    """A module of `verifiers.v1`, for what that does not export."""
    return importlib.import_module(f"verifiers.v1.{name}")


def configuration(environment: str, args: Mapping[str, Any]) -> Any:
    """The configuration of the environment's taskset. Raises TaskError: there is no such environment, its module
    fails, it has no taskset, or its configuration refuses `args`."""
    folder, vf = search_working_folder(), package()
    try:
        kind = vf.taskset_config_type(environment)
    except (Exception, SystemExit) as error:
        raise TaskError(_not_loaded(environment, folder, error)) from error
    return _validated(environment, "task.args", kind, {**args, "id": environment})


def env_configuration(environment: str, args: Mapping[str, Any], env: Mapping[str, Any]) -> Any:
    """The configuration of what plays the environment's tasks: its `Env`, with harness and limits of each agent.
    Where `env` names no runtime, programs run on this host. Raises TaskError if it is refused."""
    vf = package()
    kind = vf.env_config_type(environment, env.get("id", ""))
    agents = [name for name, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
    here = {name: {"runtime": {"type": "subprocess"}, **env.get(name, {})} for name in agents}
    return _validated(environment, "task.env", kind, {**env, **here, "taskset": {**args, "id": environment}})


def _validated(environment: str, key: str, kind: Any, document: Mapping[str, Any]) -> Any:
    validation: Any = importlib.import_module("pydantic").ValidationError
    try:
        return kind.model_validate(document)
    except validation as error:
        first = error.errors()[0]
        raise TaskError(
            f"task.environment {environment}: {'.'.join((key, *map(str, first['loc'])))} is {first['input']!r:.100}: "
            f"{first['msg']}. Its configuration has {', '.join(sorted(set(kind.model_fields) - {'id', 'taskset'}))}"
        ) from error


def _not_loaded(environment: str, folder: str, error: BaseException) -> str:
    where = f"task.environment {environment}"
    module = environment.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    cause = error.__cause__ if isinstance(error, ModuleNotFoundError) and error.__cause__ is not None else error
    if isinstance(cause, ModuleNotFoundError) and cause.name == module:
        return (
            f"{where}: there is no installed package {module}, and no {module}.py in {folder}.\n"
            f"Install it: pip install {module.replace('_', '-')}, or, from the Environments Hub, prime env install "
            "OWNER/NAME"
        )
    if hasattr(sys.modules.get(module), "load_environment"):
        return (
            f"{where}: {module} has load_environment(), as verifiers had before 0.4, whose environments are tasksets.\n"
            "Take a version of it that exports a Taskset, or let its functions be those of a task class of your own"
        )
    if (
        traceback.extract_tb(cause.__traceback__)[-1].name == "_plugin_class"
    ):  # the package looked, and says what it saw
        return f"{where}: {cause}"
    return f"{where}: importing it raised {complaint(cause)}"


def refuse_more_than_an_answer(environment: str, own: Any, hooks: Any) -> None:
    """Raise TaskError for an environment that plays more than one turn, or wants more of a turn than its text.

    own: its configuration; hooks: one of its tasks, of which only methods are used.
    """
    vf, loaders = package(), part("utils.loaders")
    task_type, where = type(hooks), f"task.environment {environment}"
    only = "without task.env each task is answered once, by the model alone (docs/packages.md)"
    env = vf.environment_class(environment)
    if env is not vf.SingleAgentEnv:
        raise TaskError(f"{where} has an Env of its own, {env.__name__}, with more than one agent or turn; {only}")
    if vf.default_harness_id(environment) == environment:
        raise TaskError(f"{where} has a harness of its own, a program that drives the model; {only}")
    servers = [*task_type.toolsets(own.task), *loaders.taskset_class(environment).toolsets(own)]
    if servers:
        raise TaskError(f"{where} has tools ({', '.join(type(server).__name__ for server in servers)}); {only}")
    if task_type.NEEDS_CONTAINER:
        raise TaskError(f"{where} wants a container for its {task_type.__name__}; {only}")
    stops = [
        hook for hook in hooks.hooks("stop") if part("session").hook_boundary(hook, allow_trace=True) is vf.Request
    ]
    if changes := [*part("utils.decorators").discover_decorated(hooks, "intercept"), *stops]:
        raise TaskError(f"{where} has {changes[0].__name__}, which looks at requests before the model does; {only}")
