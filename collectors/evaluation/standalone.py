"""A model evaluated by itself: the collector's engines, prompts and verifiers around fixed weights, without a store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.buffers.concurrency import end_all
from asyncrl.collectors.engines.base import Sampling
from asyncrl.collectors.evaluation.heldout import Evaluation, evaluate
from asyncrl.collectors.fleet import CollectorError, Fleet, engine_makers
from asyncrl.collectors.playing import start_all, task_parts
from asyncrl.collectors.rollout import PromptError, Prompts, run_of, sampling_of
from asyncrl.collectors.seats import Seats
from asyncrl.config.curricula import with_curricula
from asyncrl.config.recipe import Recipe
from asyncrl.staleness import Weights
from asyncrl.tasks.base import Split, TaskError
from asyncrl.weights.base import StagedWeights

LOOK_S = 2.0
"""How often the engines are looked at; the end of the work does not wait for it."""


async def evaluate_folder(
    recipe: Recipe,
    model_path: Path,
    *,
    prompts: int,
    samples: int,
    seed: int,
    adjust: Callable[[Sampling], Sampling],
    on_answer: Callable[[int, int], None],
    split: Split = "heldout",
    weights: Weights,
    difficulty: str | None = None,
) -> list[dict[str, Any]]:
    """Answer the first `prompts` rows of a split of the recipe's task `samples` times each with the model in
    `model_path`, and score the answers: the `answers` of `heldout.evaluate`.

    Same prompts, engine and verifier processes as in a run of the recipe, and with `seed` = `run.seed` the same seeds,
    so that a run's last checkpoint gives the run's last evaluation. `adjust` changes the recipe's sampling; `on_answer`
    hears how many answers there are, of how many: first 0, when the engines are ready. weights: what the model is
    called in the answers. difficulty: a key of `Row.info` that they have.

    Raises what building the task raises and TaskError, then EngineError, CollectorError, VerifierError, WeightsError.
    Takes as long as it takes: an engine that makes no token for `collector.group_timeout_s` ends it.
    """
    if split == "heldout":  # which a curriculum does not order: its pass rates may have gone, or be others by now
        tasks = with_curricula(recipe.task, lambda _: None)
        recipe = msgspec.structs.replace(recipe, task=tasks)
    task, player = await asyncio.to_thread(task_parts, recipe, model_path)
    # What is evaluated is whole: no engine has to keep a base for adapters.
    whole = msgspec.structs.replace(recipe, weights=msgspec.structs.replace(recipe.weights, lora="merged"))
    fleet = Fleet(engine_makers(whole, "eval", model_path))
    prompts = min(prompts, task.heldout_rows) if split == "heldout" else prompts
    if difficulty is not None:
        await asyncio.to_thread(_check_column, task, difficulty, prompts, split)
    try:
        await start_all(player, fleet)
        await _serve(fleet, await asyncio.to_thread(partial(own_weights, recipe, model_path, weights)))
        on_answer(0, prompts * samples)
        work = asyncio.ensure_future(
            evaluate(
                Evaluation("eval", weights, prompts, samples, split, difficulty=difficulty),
                prompts=task,
                player=player,
                sampler=Seats(fleet, may=partial(eq, weights), wait_s=0.0),
                on_played=lambda played: on_answer(played, prompts * samples),
                sampling=adjust(sampling_of(recipe, task.stop_token_ids)),
                run=run_of(recipe.run.name, seed),
                at_once=fleet.slots,  # as many as are decoded: what an answer takes is then not its place in a queue
            )
        )
        result = await _while_moving(fleet, work, limit_s=recipe.collector.group_timeout_s)
        answers: list[dict[str, Any]] = result["answers"]
        return answers
    finally:
        await asyncio.gather(fleet.close(), player.close())


def own_weights(recipe: Recipe, model_path: Path, weights: Weights) -> StagedWeights:
    """The weights that a folder written by save_pretrained holds, as they are served: in the recipe's dtype, on the
    CPU, named and hashed by the one rule that learner and engines share."""
    import torch
    from transformers import AutoModelForCausalLM

    from asyncrl.weights.manifest import combined_checksum, model_tensors

    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=getattr(torch, recipe.model.dtype), trust_remote_code=recipe.model.trust_remote_code
    )
    tensors, tied = model_tensors(model)
    return StagedWeights(weights, dict(tensors), tied, combined_checksum(tensors))


def _check_column(task: Prompts, column: str, rows: int, split: Split) -> None:
    """Raise TaskError unless one of these rows has the column: results by a misspelled one would be one group."""
    known: set[str] = set()
    for index in range(rows):
        try:
            known |= (task.heldout(index) if split == "heldout" else task.train(index)).row.info.keys()
        except PromptError:
            continue
        if column in known:
            return
    there = f"they have {', '.join(map(repr, sorted(known)))}" if known else "they have none"
    raise TaskError(f"eval.difficulty (--by) is {column!r}, a key that the info of no {split} row has; {there}")


async def _serve(fleet: Fleet, staged: StagedWeights) -> None:
    for host in fleet.hosts:
        await host.engine.stage(staged)
        await host.engine.activate()


async def _while_moving(fleet: Fleet, work: asyncio.Future[dict[str, Any]], *, limit_s: float) -> dict[str, Any]:
    """The result of `work`. Raises CollectorError when an engine with work stands still for `limit_s` seconds; nothing
    else in an evaluation waits without a limit of its own."""
    try:
        while not work.done():
            await asyncio.wait({work}, timeout=LOOK_S)
            fleet.fail_still(limit_s)
            if still := [host for host in fleet.hosts if host.failed]:
                raise CollectorError(f"engine {still[0].engine.name} failed: {still[0].failed}")
        return work.result()
    finally:
        await end_all([work])
