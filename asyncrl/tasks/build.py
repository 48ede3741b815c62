"""From the recipe's `task` section to a task: the built-in ones, or a class of the user's."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, get_args

import msgspec

from asyncrl.config import recipe
from asyncrl.config.packages import ReasoningGymTask, VerifiersTask
from asyncrl.rewards.base import Finding
from asyncrl.rewards.parts import check_weights
from asyncrl.tasks.agent import Agent
from asyncrl.tasks.base import Answer, Message, Row, Split, Task, TaskError
from asyncrl.tasks.chat import conversation
from asyncrl.tasks.errands import Errands
from asyncrl.tasks.mixture import Mixture
from asyncrl.tasks.modules import complaint, load
from asyncrl.tasks.reasoning_gym import ReasoningGym
from asyncrl.tasks.reverse import Reverse
from asyncrl.tasks.single_turn import SingleTurn
from asyncrl.tasks.tools import Tool, schemas, tools_by_name
from asyncrl.tasks.uppercase import Uppercase
from asyncrl.tasks.verifiers import Verifiers

if TYPE_CHECKING:
    from asyncrl.tasks.prompt_length import PromptLimit

BUILT_IN = ("reverse", "uppercase", "errands", "single-turn", "agent", "reasoning-gym", "verifiers", "mixture")

_OPTIONAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

LOOKED_AT = 100
"""Rows of a split whose ids are compared: a procedural task may have 2**40."""


def build_task(config: recipe.Task, *, seed: int, key: str = "task", limit: PromptLimit | None = None) -> Task:
    """The task, with the rows of both splits looked at, so that a bad task or data file fails before a run begins.

    `seed` goes to a user's class if its constructor has a parameter of that name; the built-in tasks' rows do not
    depend on it. `key`: of the recipe, that the task stands under. `limit`: of the model, by which rows of files are
    too long; None: that is not looked at. Raises TaskError or DataError, both with one to three lines for the person
    who wrote the recipe.
    """
    if isinstance(config, recipe.MixtureTask):
        keys = recipe.tasks_by_key(config)
        mixed = zip(recipe.mixed_tasks(config).items(), keys, strict=True)
        return Mixture({name: build_task(one, seed=seed, key=own, limit=limit) for (name, one), own in mixed})
    task = construct(config, seed=seed, key=key, limit=limit)
    if isinstance(task, CustomTask):
        schemas(task.tools, f"task.type {task.name}")
    for split in get_args(Split):
        _check_rows(task, split)
    return task


def construct(config: recipe.Task, *, seed: int, key: str = "task", limit: PromptLimit | None = None) -> Task:
    """The task without a look at its rows: all that a verifier process needs. Raises TaskError."""
    if isinstance(config, recipe.MixtureTask):
        return Mixture({name: construct(one, seed=seed) for name, one in recipe.mixed_tasks(config).items()})
    if isinstance(config, recipe.ReverseTask):
        return Reverse(config.digits)
    if isinstance(config, recipe.UppercaseTask):
        return Uppercase()
    if isinstance(config, recipe.ErrandsTask):
        return Errands()
    if isinstance(config, recipe.SingleTurnTask):
        return SingleTurn(config, key=key, limit=limit)
    if isinstance(config, recipe.AgentTask):
        return Agent(config, key=key, limit=limit)
    if isinstance(config, ReasoningGymTask):
        return ReasoningGym(config)
    if isinstance(config, VerifiersTask):
        return Verifiers(config)
    return CustomTask(config, seed=seed)


def shuffled(config: recipe.SingleTask) -> bool:
    """Whether train rows are taken in shuffled order: the `shuffle` argument of `row_index`."""
    return config.data.shuffle if isinstance(config, recipe.SingleTurnTask | recipe.AgentTask) else True


class CustomTask:
    """A user's object with `rows` and `score`, completed to a task: what it leaves out has the plain meaning.

    `messages` makes a string prompt one user message, after the object's `system_prompt` if it has one; all parts
    weigh 1; `name` is module:Class. `tools`, by name, and `environment`, which makes one: at most one of the two, and
    neither where an episode is one answer.
    """

    def __init__(self, config: recipe.CustomTask, *, seed: int) -> None:
        cls = _load_class(config.type)
        takes_seed = "seed" in _parameters(cls) and "seed" not in config.args
        try:
            self._task = cls(**config.args, **({"seed": seed} if takes_seed else {}))
        except (Exception, SystemExit) as error:
            raise TaskError(
                f"task.type {config.type}: the constructor raised {complaint(error)}.\n"
                f"It was called with task.args {config.args}{' and seed' if takes_seed else ''}."
            ) from error
        where = f"task.type {config.type}"
        self._rows: dict[Split, Sequence[Row]] = {}
        self.environment: Callable[[], Any] | None = getattr(self._task, "environment", None)
        tools = getattr(self._task, "tools", None)
        self.tools: dict[str, Tool] = {} if tools is None else tools_by_name(tools, where)
        if self.environment is not None:
            _check_environment(self.environment, where)
            if self.tools:
                raise TaskError(f"{where}: the class has tools and an environment: let the environment call them")
        for method in ("rows", "score"):
            if not callable(getattr(self._task, method, None)):
                judged = any(part.role == "outcome" for part in config.rewards)
                if method == "score" and (self.environment is not None or judged):
                    continue  # the environment scores by itself, or the recipe says what is right
                signature = "rows(self, split)" if method == "rows" else "score(self, row, answer)"
                raise TaskError(f"{where}: the class has no method {method}: add `def {signature}`")
        self._scores = hasattr(self._task, "score")
        if self._scores and (wrong := _score_complaint(self._task.score)):
            raise TaskError(f"{where}: {wrong}: write `def score(self, row, answer)`")
        self.name = str(getattr(self._task, "name", config.type))
        try:
            self._weights = check_weights(self._task.part_weights()) if hasattr(self._task, "part_weights") else {}
        except Exception as error:
            raise TaskError(f"task.type {config.type}: {complaint(error)}") from error

    def rows(self, split: Split) -> Sequence[Row]:
        """Asked for once: each ticket takes a row of these, and other ones would be in another order."""
        if split not in self._rows:
            self._rows[split] = self._task.rows(split)
        return self._rows[split]

    def messages(self, row: Row) -> list[Message]:
        if hasattr(self._task, "messages"):
            return list(self._task.messages(row))
        return conversation(row.prompt, getattr(self._task, "system_prompt", None))

    def score(self, row: Row, answer: Answer) -> Finding | Mapping[str, float | None] | float:
        if not self._scores:
            return {}
        return cast("Finding | Mapping[str, float | None] | float", self._task.score(row, answer))

    def part_weights(self) -> Mapping[str, float]:
        return self._weights


def _load_class(name: str) -> Any:
    """The class "module:Class" that is no built-in task."""
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        close = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"use {', '.join(BUILT_IN)}, or module:Class of your own"
        raise TaskError(f"task.type {name!r} is no built-in task: {hint}")
    return load("task.type", name, "class")


def _check_environment(environment: object, where: str) -> None:
    """Raise TaskError unless it is a method that makes one."""
    if not callable(environment) or inspect.iscoroutinefunction(environment):
        raise TaskError(
            f"{where}: environment is {environment!r:.80}: write `def environment(self)`, which returns one"
        )
    needed = [name for name, p in _parameters(environment).items() if p.default is p.empty and p.kind not in _OPTIONAL]
    if needed:
        raise TaskError(f"{where}: environment takes arguments: write `def environment(self)`; `reset` gets the row")


def _score_complaint(score: Any) -> str:
    """Why `score(row, answer)` would fail for every answer, "" if it would not."""
    if inspect.iscoroutinefunction(score):
        return "score is async, and each call has a process to itself"
    try:
        inspect.signature(score).bind(None, None)
    except TypeError as error:
        return f"score cannot be called with a row and an answer ({error})"
    except ValueError:  # some functions written in C do not tell
        pass
    return ""


def _parameters(cls: Any) -> Mapping[str, Any]:
    try:
        return inspect.signature(cls).parameters
    except (TypeError, ValueError):  # some classes written in C do not tell
        return {}


def _check_rows(task: Task, split: Split) -> None:
    """Look at a split's size, its first row and the first ids. Raises TaskError (a built-in task's DataError passes
    through)."""
    where = f"task {task.name}: rows({split!r})"
    if not isinstance(task, CustomTask):
        task.rows(split)
        return
    try:
        rows = task.rows(split)
    except Exception as error:
        raise TaskError(f"{where} raised {complaint(error)}") from error
    try:
        size = len(rows)
        first: Any = rows[0] if size else None
    except Exception as error:
        raise TaskError(f"{where} returned a {type(rows).__name__} without len() and [i]: return a list") from error
    if first is None:
        raise TaskError(f"{where} is empty: each split needs at least one row")
    if not (isinstance(first, Row) and type(first.id) is str and first.prompt):
        raise TaskError(
            f"{where}[0] is {first!r:.200}: return asyncrl.tasks.base.Row objects, "
            "as in Row(id='1', prompt='...', answer=...)"
        )
    try:
        messages = task.messages(first)
        msgspec.convert(messages, list[Message])
    except Exception as error:
        raise TaskError(
            f"task {task.name}: the first {split} row has no conversation: {complaint(error)}.\n"
            "Give a string, or a list of {'role': ..., 'content': ...}."
        ) from error
    for key, value in (("answer", first.answer), ("info", first.info)):
        _check_travels(f"{where}[0].{key}", value)
    _check_ids(where, rows)


def _check_ids(where: str, rows: Sequence[Row]) -> None:
    """Rows that share an id would be one prompt in every evaluation. The first ones show whether any were given."""
    seen: dict[object, int] = {}
    for n in range(min(len(rows), LOOKED_AT)):
        try:
            row = rows[n]
        except Exception:  # a row that cannot be read fails its own tickets, by name, and ends no run
            continue
        try:
            before = seen.setdefault(row.id, n)
        except Exception as error:
            raise TaskError(f"{where}[{n}] raised {complaint(error)}") from error
        if before != n:
            raise TaskError(
                f"{where}: rows {before} and {n} have the same id {row.id!r}: give each row of a split its own"
            )


def _check_travels(where: str, value: object) -> None:
    """A row goes to the verifier's process and must arrive as it was: a tuple would arrive as a list, a set too."""
    try:
        same = msgspec.msgpack.decode(msgspec.msgpack.encode(value)) == value
    except Exception as error:
        raise TaskError(f"{where} cannot be sent to the verifier's process: {error}: use JSON values") from error
    if not same:
        raise TaskError(
            f"{where} is {value!r:.100}, which would arrive changed in the verifier's process: use JSON values "
            "(None, bool, number, str, list, dict)"
        )
