"""Reward parts that cannot be meant: refused before a run, with the reason."""

from __future__ import annotations

import re

from asyncrl.config.errors import RecipeError, quoted
from asyncrl.config.judge_checks import check_remote
from asyncrl.config.recipe import (
    Collector,
    ErrandsTask,
    Recipe,
    ReverseTask,
    SingleTask,
    SingleTurnTask,
    UppercaseTask,
    tasks_by_key,
)
from asyncrl.config.rewards import (
    F1,
    Choice,
    Code,
    Exact,
    Format,
    Function,
    Length,
    Math,
    Overlong,
    Part,
    Regex,
    ToolCall,
    numbers,
)
from asyncrl.config.sizes import size_bytes, size_text

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
NEVER_BELOW_0 = (Exact, Format, Math, Choice, Regex, F1, Code, ToolCall)
"""Of a tool-call all numbers but `malformed`, which is a violation whatever the part's role."""
MODULE = re.compile(r"[A-Za-z_][\w.]*")
LEAST_CODE_MEMORY = 64 << 20  # less, and ordinary programs fail
CODE_SLACK_S = 1.0  # to end a program and clear up, before the process that does it is killed


def check_rewards(recipe: Recipe) -> None:
    """Raise RecipeError for the first reward part, scale or clip of a task that makes no sense in this recipe."""
    for key, task in tasks_by_key(recipe.task).items():
        _check_task(key, task, recipe)


def _check_task(key: str, task: SingleTask, recipe: Recipe) -> None:
    names = [name for part in task.rewards for name in numbers(part)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RecipeError(
            f"{key}.rewards has {twice} twice; parts are told apart by their names. Keep one of them, or give one a "
            "`name` of its own"
        )
    given = [part.name for part in task.rewards if part.name is not None]
    if odd := next((name for name in given if not NAME.fullmatch(name)), None):
        raise RecipeError(
            f"{key}.rewards has a part called {quoted(odd)}, which is part of a metric's name. Use letters, digits, _, "
            ". and -"
        )
    if isinstance(task, ReverseTask | UppercaseTask) and "exact" in names:
        raise RecipeError(
            f"{key}.rewards has a part exact, which {key}.type {task.type} makes itself. Leave it out, or give it a "
            "`name` of its own"
        )
    if isinstance(task, SingleTurnTask | ErrandsTask) and not any(part.role == "outcome" for part in task.rewards):
        said = f"has {', '.join(names)} only: nothing says whether an answer is right" if names else "is []"
        raise RecipeError(f"{key}.rewards {said}; add {{type: exact}}, or another part of docs/rewards.md")
    for n, part in enumerate(task.rewards):
        _check_part(f"{key}.rewards[{n}]", part, recipe.collector)
        check_remote(f"{key}.rewards[{n}]", part, recipe)
    clip = task.reward_clip
    if clip is not None and clip[0] >= clip[1]:
        raise RecipeError(f"{key}.reward_clip is {quoted(clip)}; write the lower bound first, such as [-1.0, 1.0]")
    if clip is not None and recipe.objective.advantage == "gdpo":
        raise RecipeError(
            f"{key}.reward_clip is {quoted(clip)}, but objective.advantage gdpo compares each part by itself and never "
            "looks at their sum, which is what is clipped. Leave it out, or take another advantage"
        )


def _check_role(key: str, part: Part) -> None:
    """A violation that is never below 0 would be a reward, and so would one with a weight below 0."""
    if part.role == "violation" and isinstance(part, NEVER_BELOW_0):
        raise RecipeError(
            f"{key}.role is violation, which a part is when it is below 0, and {part.type} never is: it would be a "
            "reward for what must not happen. Use a function that returns -1.0 then, or another role"
        )
    for name, number in numbers(part).items():
        if number.weight < 0 and (number.role == "violation" or isinstance(part, Overlong)):
            raise RecipeError(
                f"{key} gives {name} the weight {number.weight:g}; its number is below 0 already where something is "
                f"wrong, and would be a reward for that. Use {-number.weight:g}"
            )


def _check_part(key: str, part: Part, collector: Collector) -> None:
    _check_role(key, part)
    max_tokens = collector.sampling.max_tokens
    if part.timeout_s is not None and part.timeout_s >= collector.group_timeout_s:
        raise RecipeError(
            f"{key}.timeout_s is {part.timeout_s:g}, but a group without progress for collector.group_timeout_s "
            f"{collector.group_timeout_s:g} is given back. Use less, or raise collector.group_timeout_s"
        )
    if isinstance(part, Function) and not FUNCTION.fullmatch(part.function):
        raise RecipeError(f"{key}.function is {quoted(part.function)}; write module:function, as in my_rewards:brevity")
    if isinstance(part, Format | Regex):
        try:
            re.compile(part.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise RecipeError(
                f"{key}.pattern is {quoted(part.pattern)}; it is no regular expression of Python: {error}"
            ) from None
    if isinstance(part, ToolCall):
        _check_tool_call(key, part, collector)
    if isinstance(part, Code):
        _check_code(key, part, collector)
    if isinstance(part, Overlong) and part.buffer_tokens >= max_tokens:
        raise RecipeError(
            f"{key}.buffer_tokens is {part.buffer_tokens} with collector.sampling.max_tokens {max_tokens}: every "
            "answer would be penalised. Use less, such as a quarter of max_tokens"
        )
    if isinstance(part, Length) and part.target_tokens > max_tokens:
        raise RecipeError(
            f"{key}.target_tokens is {part.target_tokens}, but no answer is longer than collector.sampling.max_tokens "
            f"{max_tokens}. Use {max_tokens} or less"
        )


def _check_tool_call(key: str, part: ToolCall, collector: Collector) -> None:
    names = [tool.name for tool in part.tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RecipeError(f"{key}.tools has {quoted(twice)} twice. Keep one of them")
    for n, tool in enumerate(part.tools):
        for kind, function in (("function", tool.function), ("safe", tool.safe)):
            if function is not None and not FUNCTION.fullmatch(function):
                raise RecipeError(
                    f"{key}.tools[{n}].{kind} is {quoted(function)}; write module:function, as in my_tools:{tool.name}"
                )
    limit, of = _limit(key, part, collector)
    if part.call_timeout_s >= limit:
        raise RecipeError(
            f"{key}.call_timeout_s is {part.call_timeout_s:g}, but the process is killed after {of} {limit:g}, which "
            "leaves the answer unscored. Use less"
        )


def _check_code(key: str, part: Code, collector: Collector) -> None:
    limit, of = _limit(key, part, collector)
    if part.total_timeout_s > limit - CODE_SLACK_S:
        raise RecipeError(
            f"{key}.total_timeout_s is {part.total_timeout_s:g}, but the process is killed after {of} {limit:g}, which "
            f"leaves the answer unscored. Use {CODE_SLACK_S:g} s less than that, or raise it"
        )
    if part.test_timeout_s > part.total_timeout_s:
        raise RecipeError(
            f"{key}.test_timeout_s is {part.test_timeout_s:g}, more than total_timeout_s {part.total_timeout_s:g}, "
            "which is of all tests. Use less"
        )
    try:
        memory = size_bytes(part.memory_limit)
    except ValueError as error:
        raise RecipeError(f"{key}.memory_limit is {quoted(part.memory_limit)}; {error}") from None
    if memory < LEAST_CODE_MEMORY:
        raise RecipeError(
            f"{key}.memory_limit is {part.memory_limit}: hardly a program runs in that. Use "
            f"{size_text(LEAST_CODE_MEMORY)} or more"
        )
    if odd := next((name for name in part.modules if not MODULE.fullmatch(name)), None):
        raise RecipeError(f"{key}.modules has {quoted(odd)}; write names as import takes them, such as numpy")


def _limit(key: str, part: Part, collector: Collector) -> tuple[float, str]:
    """When the process that computes a part is killed, and the key that says so."""
    if part.timeout_s is not None:
        return part.timeout_s, f"{key}.timeout_s"
    return collector.score_timeout_s, "collector.score_timeout_s"
