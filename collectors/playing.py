"""The prompts of a recipe, and who plays its episodes."""

from __future__ import annotations

from pathlib import Path

from asyncrl.collectors.episode import Player
from asyncrl.collectors.fleet import CollectorError
from asyncrl.collectors.rollout import Prompts, SimulatedPrompts, TaskPrompts
from asyncrl.collectors.scoring import SimulatedScorer, TaskScorer
from asyncrl.collectors.single import SinglePlayer
from asyncrl.config.recipe import Recipe, SimulatedEngine
from asyncrl.tasks.verify import verifier_pool


def task_parts(recipe: Recipe, model_path: Path | None) -> tuple[Prompts, Player]:
    """The recipe's prompts, and the player of its episodes, not started yet. Imports and reads for seconds. Raises
    CollectorError without a model that is needed, and what building the task raises."""
    if isinstance(recipe.collector.engine, SimulatedEngine):
        return SimulatedPrompts(), SinglePlayer(SimulatedScorer())
    if model_path is None:
        raise CollectorError(f"collector.engine.type {recipe.collector.engine.type} needs a model, and none was given")
    prompts = TaskPrompts.load(recipe, model_path)
    pool = verifier_pool(
        recipe.task,
        seed=recipe.run.seed,
        max_tokens=recipe.collector.sampling.max_tokens,
        workers=recipe.collector.score_workers,
        timeout_s=recipe.collector.score_timeout_s,
    )
    return prompts, SinglePlayer(TaskScorer(pool, prompts))
