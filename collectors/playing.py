"""The prompts of a recipe, and who plays its episodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.buffers.concurrency import all_or_nothing
from asyncrl.collectors.episode import Player
from asyncrl.collectors.fleet import CollectorError, Fleet
from asyncrl.collectors.rollout import Prompts, SimulatedPrompts, TaskPrompts
from asyncrl.collectors.scoring import SimulatedScorer, TaskScorer
from asyncrl.collectors.single import SinglePlayer
from asyncrl.collectors.turns import Limits, TurnPlayer
from asyncrl.config.derived import derive
from asyncrl.config.packages import VerifiersTask
from asyncrl.config.recipe import AgentTask, CustomTask, Recipe, SimulatedEngine, to_builtins
from asyncrl.config.sizes import size_bytes
from asyncrl.environments.live import Live, LiveEnvironment, Tools
from asyncrl.environments.processes import Processes
from asyncrl.rewards.pool import VerifierError
from asyncrl.rewards.scoring import Scores
from asyncrl.tasks.base import TaskError
from asyncrl.tasks.verify import scoring_of


def task_parts(recipe: Recipe, model_path: Path | None) -> tuple[Prompts, Player]:
    """The recipe's prompts, and the player of its episodes, not started yet. Imports and reads for seconds. Raises
    CollectorError without a model that is needed, and what building the task raises."""
    if isinstance(recipe.collector.engine, SimulatedEngine):
        return SimulatedPrompts(), SinglePlayer(SimulatedScorer())
    if model_path is None:
        raise CollectorError(f"collector.engine.type {recipe.collector.engine.type} needs a model, and none was given")
    prompts = TaskPrompts.load(recipe, model_path)
    turns = recipe.collector.max_turns if prompts.converses else 1
    scoring = scoring_of(
        recipe.task,
        recipe.collector,
        seed=recipe.run.seed,
        max_tokens=recipe.collector.sampling.max_tokens * turns,
    )
    if isinstance(recipe.task, AgentTask):
        return prompts, _agents(recipe, recipe.task, prompts, scoring, "asyncrl.environments.agent:host")
    if isinstance(recipe.task, VerifiersTask) and recipe.task.env is not None:
        return prompts, _agents(recipe, recipe.task, prompts, scoring, "asyncrl.environments.verifiers:host")
    if not prompts.converses or not isinstance(recipe.task, CustomTask):
        return prompts, SinglePlayer(TaskScorer(scoring, prompts))
    processes = _processes(recipe.task, "asyncrl.environments.host:host", seed=recipe.run.seed)
    player = TurnPlayer(
        prompts,
        scoring,
        processes,
        _live(recipe.task, prompts, processes),
        limits=Limits(
            max_turns=turns,
            max_length=prompts.max_length,
            seconds=recipe.collector.episode_timeout_s,
            at_once=derive(recipe).most_groups * recipe.collector.group_size,
        ),
        rewards_turns=not prompts.tools,
    )
    return prompts, player


async def start_all(player: Player, fleet: Fleet) -> None:
    """Start both, or neither. Raises TaskError for verifiers that cannot be started or asked: here, before any work,
    that is a person's to mend."""
    try:
        await all_or_nothing([player.start(), fleet.start()])
    except VerifierError as error:
        raise TaskError(str(error)) from error


def _agents(
    recipe: Recipe, task: AgentTask | VerifiersTask, prompts: TaskPrompts, scoring: Scores, factory: str
) -> Player:
    # Here: the server is of an extra, which only agents need.
    from asyncrl.collectors.agents import AgentPlayer
    from asyncrl.collectors.endpoint.server import Endpoint
    from asyncrl.collectors.endpoint.session import Model

    collector = recipe.collector
    return AgentPlayer(
        Endpoint(host=collector.endpoint.host, port=collector.endpoint.port),
        _processes(task, factory),
        scoring,
        Model(
            prompts.tokenizer,
            prompts.stop_token_ids,
            prompts.max_length,
            task.tool_format,
            task.chat_template_args,
        ),
        calls=collector.max_turns,
        seconds=collector.episode_timeout_s,
        at_once=derive(recipe).most_groups * collector.group_size,
        scores=any(part.role == "outcome" for part in task.rewards),
    )


def _processes(task: AgentTask | VerifiersTask | CustomTask, factory: str, **arguments: Any) -> Processes:
    limit = task.memory_limit
    return Processes(
        factory,
        {"task": to_builtins(task), **arguments},
        memory_bytes=None if limit is None else size_bytes(limit),
    )


def _live(task: CustomTask, prompts: TaskPrompts, processes: Processes) -> Callable[[], Live]:
    """What makes that which answers the model in an episode."""
    if not prompts.tools:
        return lambda: LiveEnvironment(processes, step_s=task.step_timeout_s)
    names = [tool["function"]["name"] for tool in prompts.tools]
    return lambda: Tools(
        processes,
        names,
        form=task.tool_format,
        role=task.tool_role,
        malformed=task.malformed_call,
        step_s=task.step_timeout_s,
    )
