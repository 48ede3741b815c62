"""The prompts of a recipe, and who plays its episodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.buffers.concurrency import all_or_nothing
from asyncrl.collectors.episode import Player
from asyncrl.collectors.fleet import CollectorError, Fleet
from asyncrl.collectors.mixed import MixedPlayer
from asyncrl.collectors.rollout import SIMULATED, Prompts, SimulatedPrompts, TaskPrompts
from asyncrl.collectors.scoring import SimulatedScorer, TaskScorer
from asyncrl.collectors.single import SinglePlayer
from asyncrl.collectors.turns import Limits, TurnPlayer
from asyncrl.config.derived import derive
from asyncrl.config.packages import VerifiersTask
from asyncrl.config.recipe import (
    AgentTask,
    CustomTask,
    MixtureTask,
    Recipe,
    SimulatedEngine,
    SingleTask,
    Task,
    mixed_name,
    mixed_tasks,
    to_builtins,
)
from asyncrl.config.sizes import size_bytes
from asyncrl.environments.live import Live, LiveEnvironment, Tools
from asyncrl.environments.processes import Processes
from asyncrl.rewards.pool import VerifierError
from asyncrl.rewards.scoring import Scores
from asyncrl.tasks.base import TaskError
from asyncrl.tasks.conversing import converses
from asyncrl.tasks.verify import scoring_of, scorings_of

if TYPE_CHECKING:
    from asyncrl.collectors.endpoint.server import Endpoint


def task_parts(recipe: Recipe, model_path: Path | None) -> tuple[Prompts, Player]:
    """The recipe's prompts, and the player of its episodes, not started yet. Imports and reads for seconds. Raises
    CollectorError without a model that is needed, and what building the task raises."""
    collector = recipe.collector
    if isinstance(collector.engine, SimulatedEngine):
        return _simulated(recipe.task)
    if model_path is None:
        raise CollectorError(f"collector.engine.type {collector.engine.type} needs a model, and none was given")
    prompts = TaskPrompts.load(recipe, model_path)
    players = _Players(recipe, prompts)
    seed, max_tokens = recipe.run.seed, collector.sampling.max_tokens
    if not isinstance(recipe.task, MixtureTask):
        (name,) = prompts.tasks
        scoring = scoring_of(recipe.task, collector, seed=seed, max_tokens=max_tokens)
        return prompts, players.of(name, recipe.task, scoring)
    scorings = scorings_of(recipe.task, collector, seed=seed, max_tokens=max_tokens)
    mixed = mixed_tasks(recipe.task).items()
    return prompts, MixedPlayer({name: players.of(name, task, scorings[name]) for name, task in mixed})


async def start_all(player: Player, fleet: Fleet) -> None:
    """Start both, or neither. Raises TaskError for verifiers that cannot be started or asked: here, before any work,
    that is a person's to mend."""
    try:
        await all_or_nothing([player.start(), fleet.start()])
    except VerifierError as error:
        raise TaskError(str(error)) from error


def _simulated(task: Task) -> tuple[Prompts, Player]:
    """Without a model nothing is asked and nothing is right: what is left of a task is its name, share and scale."""
    if not isinstance(task, MixtureTask):
        return SimulatedPrompts(), SinglePlayer(SimulatedScorer({SIMULATED: task.reward_scale}))
    scales = {name: one.reward_scale for name, one in mixed_tasks(task).items()}
    weights = {mixed_name(mixed): mixed.weight for mixed in task.tasks}
    return SimulatedPrompts(weights), SinglePlayer(SimulatedScorer(scales))


class _Players:
    """Makes the players of a recipe's tasks. Agents of several tasks call one endpoint."""

    def __init__(self, recipe: Recipe, prompts: TaskPrompts) -> None:
        self._recipe, self._prompts, self._collector = recipe, prompts, recipe.collector
        self._at_once = derive(recipe).most_groups * recipe.collector.group_size

    def of(self, name: str, task: SingleTask, scoring: Scores) -> Player:
        """The player of one task. `name`: in the prompts."""
        if isinstance(task, AgentTask):
            return self._agents(task, scoring, "asyncrl.environments.agent:host")
        if isinstance(task, VerifiersTask) and task.env is not None:
            return self._agents(task, scoring, "asyncrl.environments.verifiers:host")
        if not isinstance(task, CustomTask) or not converses(self._prompts.tasks[name]):
            return SinglePlayer(TaskScorer(scoring, self._prompts))
        processes = _processes(task, "asyncrl.environments.host:host", seed=self._recipe.run.seed)
        tools = [tool["function"]["name"] for tool in self._prompts.tools(name)]
        return TurnPlayer(
            self._prompts,
            scoring,
            processes,
            _live(task, tools, processes),
            limits=Limits(
                max_turns=self._collector.max_turns,
                max_length=self._prompts.max_length,
                seconds=self._collector.episode_timeout_s,
                at_once=self._at_once,
            ),
            rewards_turns=not tools,
        )

    def _agents(self, task: AgentTask | VerifiersTask, scoring: Scores, factory: str) -> Player:
        # Here: the server is of an extra, which only agents need.
        from asyncrl.collectors.agents import AgentPlayer
        from asyncrl.collectors.endpoint.session import Model

        return AgentPlayer(
            self._endpoint,
            _processes(task, factory),
            scoring,
            Model(
                self._prompts.tokenizer,
                self._prompts.stop_token_ids,
                self._prompts.max_length,
                task.tool_format,
                task.chat_template_args,
            ),
            calls=self._collector.max_turns,
            seconds=self._collector.episode_timeout_s,
            at_once=self._at_once,
            scores=any(part.role == "outcome" for part in task.rewards),
        )

    @cached_property
    def _endpoint(self) -> Endpoint:
        from asyncrl.collectors.endpoint.server import Endpoint

        return Endpoint(host=self._collector.endpoint.host, port=self._collector.endpoint.port)


def _processes(task: AgentTask | VerifiersTask | CustomTask, factory: str, **arguments: Any) -> Processes:
    limit = task.memory_limit
    return Processes(
        factory,
        {"task": to_builtins(task), **arguments},
        memory_bytes=None if limit is None else size_bytes(limit),
    )


def _live(task: CustomTask, tools: list[str], processes: Processes) -> Callable[[], Live]:
    """What makes that which answers the model in an episode: the tools of these names, or without any an
    environment."""
    if not tools:
        return lambda: LiveEnvironment(processes, step_s=task.step_timeout_s)
    return lambda: Tools(
        processes,
        tools,
        form=task.tool_format,
        role=task.tool_role,
        malformed=task.malformed_call,
        step_s=task.step_timeout_s,
    )
