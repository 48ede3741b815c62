"""An environment of the package verifiers that is played: its `Env` runs, and the harnesses of its agents call the
policy through the episode's endpoint, as they would call a provider of models.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from typing import Any

from asyncrl.config.convert import convert
from asyncrl.config.packages import VerifiersTask
from asyncrl.environments.agent import API_KEY
from asyncrl.rewards.parts import judge
from asyncrl.tasks.base import Row, TaskError
from asyncrl.tasks.verifiers import Verifiers
from asyncrl.tasks.verifiers_package import env_configuration, package


def host(task: dict[str, Any]) -> VerifiersHost:
    """task: the recipe's section, as plain values, with `env`. Raises TaskError."""
    config = convert({"task": task}).task
    if not isinstance(config, VerifiersTask) or config.env is None:
        raise TaskError(f"task.type {config.type} has no env that plays it")
    # The process of each episode is forked from this one, and would load it again, in a third of a second.
    importlib.import_module("openai.resources.chat.completions")
    return VerifiersHost(Verifiers(config), env_configuration(config.environment, config.args, config.env))


class VerifiersHost:
    """What `processes.Process.call` calls."""

    def __init__(self, task: Verifiers, env: Any) -> None:
        self._task = task
        self._env = package().load_environment(env)

    def run(self, row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        """The episode's reward parts: {"parts": ..., "failure", "detail"}, as of an agent (`agent.py`)."""
        os.environ[API_KEY] = api_key  # the package takes keys from there
        verdict = judge(asyncio.run(self._play(Row(**row), base_url)))
        return {"parts": verdict.parts, "failure": verdict.failure, "detail": verdict.detail}

    async def _play(self, row: Row, base_url: str) -> dict[str, float]:
        """Raises what ended the episode, and for an episode of several agents, each of which would have rewards."""
        vf = package()
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=API_KEY)
        async with self._env.serving():
            episode = await self._env.run_episode(self._task.restored(row), vf.ModelContext("policy", client))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}")
        if len(episode.traces) != 1:
            raise ValueError(f"the episode has {len(episode.traces)} traces: only one agent can be trained")
        return self._task.parts(episode.traces[0])
