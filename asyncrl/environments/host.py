"""A task inside the process of an episode: its environment, or its tools."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.config.convert import convert
from asyncrl.environments.base import Environment, Step
from asyncrl.environments.child import Unusable
from asyncrl.rewards.parts import judge
from asyncrl.tasks.base import Answer, Message, Row, TaskError
from asyncrl.tasks.build import CustomTask, construct
from asyncrl.tasks.tools import call


def host(task: dict[str, Any], seed: int) -> Host:
    """task: the recipe's section, as plain values."""
    built = construct(convert({"task": task}).task, seed=seed)
    if not isinstance(built, CustomTask):
        raise TaskError(f"task.type {built.name} has neither tools nor an environment")
    return Host(built)


class Host:
    """What `processes.Process.call` calls: plain values in, plain values out."""

    def __init__(self, task: CustomTask) -> None:
        self._task = task
        self._environment: Environment | None = None

    def reset(self, row: dict[str, Any], seed: int) -> list[Message] | None:
        """A new environment, and its opening messages; None: the row's own."""
        if self._task.environment is None:
            raise Unusable("the task has no environment")
        self._environment = self._task.environment()
        opening = _plain("reset", self._environment.reset(Row(**row), seed))
        if opening is None:
            return None
        messages = _messages("reset", opening)
        if not messages:
            raise Unusable("reset returned no messages: return None for those of the row, or what the model answers")
        return messages

    def step(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The fields of a `Step`."""
        if self._environment is None:
            raise Unusable("step before reset")
        step = _plain("step", self._environment.step(Answer(**{**answer, "token_ids": tuple(answer["token_ids"])})))
        if not isinstance(step, Step):
            raise Unusable(
                f"step returned {step!r:.100}: return asyncrl.environments.base.Step, as in Step([message]) or "
                "Step(done=True)"
            )
        messages = _messages("step", step.messages)
        if not messages and not step.done:
            raise Unusable("step returned no messages and is not done: the model would be asked the same again")
        return {
            "messages": messages,
            "done": bool(step.done),
            "reward": None if step.reward is None else _reward(step.reward),
            "info": _info(step.info),
        }

    def score(self) -> dict[str, float | None] | None:
        """The environment's own reward parts, None if it has none."""
        if (score := getattr(self._environment, "score", None)) is None:
            return None
        verdict = judge(_plain("score", score()))
        if verdict.failure and not verdict.parts:
            raise Unusable(verdict.detail)
        return verdict.parts

    def close(self) -> None:
        if self._environment is not None and hasattr(self._environment, "close"):
            self._environment.close()

    def tool(self, name: str, arguments: Mapping[str, Any]) -> dict[str, str]:
        """{"text": what it returned} or {"error": what it raised, as the model reads it}."""
        try:
            return {"text": call(self._task.tools[name], arguments)}
        except BaseException as error:  # SystemExit too: the model asked for it
            return {"error": f"{type(error).__name__}: {error}".strip()}


def _plain(method: str, returned: object) -> Any:
    if inspect.isawaitable(returned):
        raise Unusable(f"{method} is async, and each episode has a process to itself: write a plain `def {method}`")
    return returned


def _messages(method: str, returned: object) -> list[Message]:
    try:
        return msgspec.convert(list(returned), list[Message])  # type: ignore[call-overload]  # asked, not known
    except (TypeError, msgspec.ValidationError) as error:
        raise Unusable(
            f"the messages of {method} are {returned!r:.100}: give a list of {{'role': ..., 'content': ...}} ({error})"
        ) from None


def _info(given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(given, allow_nan=False)
        return dict(given)
    except (TypeError, ValueError, RecursionError) as error:
        raise Unusable(f"the info of a step is {given!r:.100}: give JSON values, no NaN among them ({error})") from None


def _reward(given: Any) -> float:
    try:
        reward = float(given)
    except (TypeError, ValueError, OverflowError):
        reward = math.nan
    if not math.isfinite(reward):
        raise Unusable(f"the reward of a step is {given!r:.100}: give a finite number, or None for none of its own")
    return reward
