"""One run of `bench staleness`: the policy that samples is the one `lag` updates ago, exactly, in one process.

The parts are those of a run: the engine's decoder samples, the task scores, answers become records, and the learner's
trainer makes a batch, advantages and a step of them, its own check of the bound included. What is missing is what makes
ages differ from machine to machine: processes, queues, clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from asyncrl.benchmarks.runs import WINDOW
from asyncrl.benchmarks.vs_trl import REWARD, seconds_to
from asyncrl.collectors.engines.base import Completion, Request
from asyncrl.collectors.engines.decode import Decoder, Generation
from asyncrl.collectors.engines.live import load_model
from asyncrl.collectors.engines.spans import Served
from asyncrl.collectors.episode import Played, Turn, episodes
from asyncrl.collectors.rollout import Prompt, TaskPrompts, run_of, sampling_of
from asyncrl.collectors.segments import trajectories
from asyncrl.config.recipe import Recipe
from asyncrl.learners.diagnostics import step_metrics
from asyncrl.learners.trainer import Trainer
from asyncrl.rewards.parts import judge, weighted_sum
from asyncrl.rewards.scoring import Score
from asyncrl.schema import Group, Trajectory, to_batch
from asyncrl.staleness import Weights
from asyncrl.tasks.base import Answer
from asyncrl.tasks.build import build_task

NAME = "staleness"


@dataclass(frozen=True, slots=True)
class Trace:
    """One entry per step. rewards: mean over the step's answers. ess, ess_sequence: the metrics `ess` and
    `ess/sequence`, the effective sample size of tokens and of whole answers; 0 where masks took all."""

    rewards: Sequence[float]
    ess: Sequence[float]
    ess_sequence: Sequence[float]

    @property
    def reward_end(self) -> float:
        """Mean over the last WINDOW steps."""
        return fmean(self.rewards[-WINDOW:])

    @property
    def steps_to_reward(self) -> int | None:
        """The first step, from 1, at which the moving average of the rewards is at REWARD; None if none is.

        >>> Trace([0.0, 1.0, 1.0], [], []).steps_to_reward, Trace([0.7, *[1.0] * 9], [], []).steps_to_reward
        (None, 3)
        """
        steps = range(1, len(self.rewards) + 1)
        found = seconds_to(REWARD, steps, self.rewards)
        return None if found is None else int(found)


def train(recipe: Recipe, model_path: Path) -> Trace:
    """`run.max_steps` steps, each by answers of the version `buffer.max_trajectory_age` updates before its own; the
    first ones, which have no such version, by those of version 0. The same trace each time, on one machine."""
    lag = recipe.buffer.max_trajectory_age
    trainer, sampler = Trainer.load(recipe, model_path, None), Sampler(recipe, model_path)
    versions = deque([_copied(trainer)], maxlen=lag + 1)
    trace: tuple[list[float], ...] = ([], [], [])
    for version in range(recipe.run.max_steps):
        groups = sampler.sample(versions[0], version=max(0, version - lag), step=version)
        step = trainer.prepare([to_batch(group) for group in groups], version=version)
        seen, _ = trainer.train(step)
        versions.append(_copied(trainer))
        found = step_metrics(step.packed, step.batch, step.worth, seen, first=step.first, update=recipe.weights.update)
        for values, name in zip(trace, ("reward/mean", "ess", "ess/sequence"), strict=True):
            values.append(found[name] or 0.0)
    return Trace(*trace)


def _copied(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.whole.state_dict().items()}


class Sampler:
    """A collector without a loop: the groups of one step after the other, by whatever weights it is given."""

    def __init__(self, recipe: Recipe, model_path: Path) -> None:
        self._groups_per_step = recipe.learner.groups_per_step
        self._group_size = recipe.collector.group_size
        self._run = run_of(NAME, recipe.run.seed)
        self._task = build_task(recipe.task, seed=recipe.run.seed)
        self._prompts = TaskPrompts.load(recipe, model_path)
        self._sampling = sampling_of(recipe, self._prompts.stop_token_ids)
        self._model = load_model(model_path, dtype=recipe.model.dtype, attn="auto", trust_remote_code=False)
        self._decoder = Decoder(self._model, slots=self._groups_per_step * self._group_size)

    def sample(self, weights: dict[str, Tensor], *, version: int, step: int) -> list[Group]:
        """The groups of `step`, by `weights`, which are those of `version`. Prompts and the seeds of draws are a
        function of run.seed and the step: the same whatever the objective and the lag."""
        self._model.load_state_dict(weights)
        asked = [
            (ordinal, prompt, self._requests(ordinal, prompt))
            for ordinal in range(step * self._groups_per_step, (step + 1) * self._groups_per_step)
            for prompt in [self._prompts.train(ordinal)]
        ]
        answers = self._answers([request for _, _, requests in asked for request in requests], version)
        return [
            self._group(ordinal, prompt, [self._scored(prompt, request, answers[request.id]) for request in requests])
            for ordinal, prompt, requests in asked
        ]

    def _requests(self, ordinal: int, prompt: Prompt) -> tuple[Request, ...]:
        members = episodes(
            prompt, self._sampling, run=self._run, ordinal=ordinal, attempt=0, group_size=self._group_size
        )
        return tuple(episode.request() for episode in members)

    def _answers(self, requests: Sequence[Request], version: int) -> dict[str, Completion]:
        served = Served(Weights(0, version), checksum="")
        generations = [Generation(request, self._sampling.max_tokens) for request in requests]
        with torch.inference_mode():
            self._decoder.join(generations, served)
            while self._decoder.running:
                self._decoder.step(served)
        return {generation.request.id: generation.completion() for generation in generations}

    def _scored(self, prompt: Prompt, request: Request, completion: Completion) -> Trajectory:
        token_ids = completion.token_ids.tolist()
        answer = Answer(self._prompts.read(token_ids), tuple(token_ids), completion.finish_reason)
        parts = judge(self._task.score(prompt.row, answer)).parts
        score = Score(parts, weighted_sum(parts, self._task.part_weights()), failure="")
        (row,) = trajectories(Played((Turn(request, completion),), score, completion.done, completion.finish_reason))
        return row

    def _group(self, ordinal: int, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Group:
        return Group(
            ticket=ordinal,
            attempt=0,
            lineage=0,
            task=prompt.task,
            row_id=prompt.row.id,
            collector=NAME,
            engine="transformers",
            sampling={"temperature": self._sampling.temperature},
            issued=0.0,
            put=0.0,
            trajectories=trajectories,
        )
