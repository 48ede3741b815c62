"""The learner asks the very version that sampled a token: what is left between engine and learner is then rounding,
at every age, and what training has changed stands apart from it.

A real engine decodes while a real learner trains: its weights are exchanged under running requests, so that answers
have tokens of several versions, up to three steps old when they are trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from asyncrl.collectors.engines.base import Request, Sampling
from asyncrl.collectors.engines.decode import Decoder, Generation
from asyncrl.collectors.engines.live import load_model
from asyncrl.collectors.engines.spans import Served
from asyncrl.config.recipe import Buffer, Collector, Learner, Lora, Model, Objective, Recipe, SamplingConfig
from asyncrl.learners.diagnostics import step_metrics
from asyncrl.learners.history import History
from asyncrl.learners.lora import served_weights
from asyncrl.learners.step import Seen
from asyncrl.learners.trainer import Step, Trainer
from asyncrl.schema import Group, Packed, Trajectory, VersionSpan, to_batch
from asyncrl.staleness import Weights
from asyncrl.weights.manifest import combined_checksum, model_tensors

MAX_AGE = 3
TEMPERATURE = 0.8
RECIPE = Recipe(
    buffer=Buffer(max_trajectory_age=MAX_AGE),
    collector=Collector(sampling=SamplingConfig(temperature=TEMPERATURE)),
    learner=Learner(learning_rate=3e-3, warmup_steps=0, max_tokens_per_microbatch=100),
    objective=Objective(preset="grpo", proximal="behaviour-version"),
)
PROMPTS = ((1, 2, 3), (4, 5), (6, 7, 8, 9))


class Collecting:
    """An engine whose requests are decoded four tokens per version, and groups of those that are done."""

    def __init__(self, path: Path, *, update: str) -> None:
        self.decoder = Decoder(load_model(path, dtype="float32", attn="auto", trust_remote_code=False), slots=32)
        self.update = update
        self.tickets = 0
        self.done: dict[str, list[Generation]] = {}
        self.served: Served | None = None

    @torch.inference_mode()
    def serve(self, trainer: Trainer, version: int) -> None:
        """Give the engine the learner's weights, as running requests go on."""
        tensors, _ = model_tensors(self.decoder._model)
        for (name, mine), (other, theirs) in zip(tensors, served_weights(trainer.whole), strict=True):
            assert name == other
            mine.copy_(theirs)
        first, self.served = self.served is None, Served(Weights(1, version), combined_checksum(tensors))
        if self.update == "recompute" and not first:
            self.decoder.rebuild(self.served)

    @torch.inference_mode()
    def decode(self) -> list[pa.RecordBatch]:
        """Two groups more of three members, and a few tokens for everybody. Returns the groups that are done."""
        assert self.served is not None
        newcomers = []
        for _ in range(2):
            for member in range(3):
                length = 1 + (5 * self.tickets + 3 * member) % 16
                sampling = Sampling(temperature=TEMPERATURE, max_tokens=length)
                group, prompt = f"{self.tickets}", PROMPTS[self.tickets % len(PROMPTS)]
                request = Request(f"{group}/{member}", group, group, prompt, sampling, 100 * self.tickets + member)
                newcomers.append(Generation(request, budget=length))
            self.tickets += 1
        ended = self.decoder.join(newcomers, self.served)
        for _ in range(4):
            if self.decoder.running:
                ended += self.decoder.step(self.served)
        for generation in ended:
            self.done.setdefault(generation.request.group, []).append(generation)
        whole = [group for group, members in self.done.items() if len(members) == 3]
        return [_group(int(group), self.done.pop(group)) for group in whole]


def _group(ticket: int, members: list[Generation]) -> pa.RecordBatch:
    rows = []
    for member, generation in enumerate(sorted(members, key=lambda g: g.request.id)):
        prompt, completion = generation.request.token_ids, generation.completion()
        n = len(prompt)
        rows.append(
            Trajectory(
                token_ids=np.array([*prompt, *completion.token_ids], np.int32),
                loss_mask=np.array([0] * n + [1] * len(completion.token_ids), np.uint8),
                logprobs=np.concatenate([np.zeros(n, np.float32), completion.logprobs]),
                versions=np.concatenate([np.full(n, -1, np.int32), completion.versions]),
                member=member,
                prompt_length=n,
                spans=tuple(VersionSpan(s.weights, n + s.start, n + s.end, s.checksum) for s in completion.spans),
                reward=float((ticket + member) % 2),
                reward_parts={},
                finish_reason=completion.finish_reason,
            )
        )
    group = Group(
        ticket=ticket,
        attempt=0,
        lineage=1,
        task="test",
        row_id=f"{ticket}",
        collector="c",
        engine="e",
        sampling={"temperature": TEMPERATURE},
        issued=0.0,
        put=0.0,
        trajectories=rows,
    )
    return to_batch(group)


@dataclass
class Trained:
    step: Step
    seen: Seen
    metrics: dict[str, Any]


def pipeline(path: Path, recipe: Recipe, *, update: str = "recompute", steps: int = 8) -> Iterator[Trained]:
    """Decode and train in turns; every step trains the groups that were done by then."""
    trainer = Trainer.load(recipe, path, None)
    collecting = Collecting(path, update=update)
    collecting.serve(trainer, 0)
    ready: list[pa.RecordBatch] = []
    for version in range(steps):
        while not (ready := collecting.decode()):
            pass
        step = trainer.prepare(ready, version=version)
        seen, updates = trainer.train(step)
        assert not updates.skipped
        metrics = step_metrics(step.packed, step.batch, step.worth, seen, first=step.first, update=update)
        yield Trained(step, seen, metrics)
        collecting.serve(trainer, version + 1)


def rows_of(packed: Packed) -> list[NDArray[np.int32]]:
    """Versions of each row's tokens, -1 where they are not sampled."""
    return np.split(packed.versions, packed.cu_seqlens[1:-1])


RECIPES = {
    "one update": RECIPE,
    "two updates": replace(RECIPE, learner=replace(RECIPE.learner, updates_per_step=2)),
    "adapters": replace(
        RECIPE, model=Model(lora=Lora(r=4, alpha=16)), learner=replace(RECIPE.learner, learning_rate=3e-2)
    ),
}


@pytest.mark.parametrize("kind", RECIPES)
def test_the_version_that_sampled_a_token_gives_it_the_engines_logprob_at_every_age(
    model_path: Path, kind: str
) -> None:
    ages: dict[int, list[float]] = {}
    spans = 0
    for trained in pipeline(model_path, RECIPES[kind]):
        batch, seen, metrics = trained.step.batch, trained.seen, trained.metrics
        assert seen.included.sum() == batch.tokens > 0
        apart = np.abs(seen.proximal - batch.behaviour.numpy())[seen.included]
        assert apart.max() < 1e-5
        for age, bucket in metrics["by_age"].items():
            assert abs(bucket["mismatch_mean"] - 1) < 1e-4
            assert bucket["mismatch_max"] < 1e-5
            at = seen.included & (batch.ages.numpy() == int(age))
            moved = np.exp(seen.logprobs[at] - batch.behaviour.numpy()[at])
            np.testing.assert_allclose(seen.ratio[at], moved, rtol=1e-4)
            assert bucket["staleness_mean"] == pytest.approx(float(moved.mean()), rel=1e-4)
            ages.setdefault(int(age), []).extend(np.abs(moved - 1))
        assert metrics["proximal/behaviour_tokens"] == metrics["proximal/approximate_tokens"] == 0
        spans = max(spans, *(len(np.unique(row[row >= 0])) for row in rows_of(trained.step.packed)))
    assert sorted(ages) == list(range(MAX_AGE + 1))
    assert spans == MAX_AGE + 1
    # What the plain ratio takes for one number is rounding at age 0 (if no update came before), and is not at others.
    assert kind == "two updates" or max(ages[0]) < 1e-4
    assert min(max(ages[age]) for age in range(1, MAX_AGE + 1)) > 0.05


def test_a_history_that_is_off_by_one_is_found_out(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: an older version than the one that sampled is not within rounding of the engine."""
    whole = History._whole

    def older(self: History, version: int, index: int) -> torch.Tensor:
        return whole(self, max(version - 1, self.versions[-1]), index)

    monkeypatch.setattr(History, "_whole", older)
    found = [trained.metrics for trained in pipeline(model_path, RECIPE)]
    assert max(metrics["mismatch/max"] for metrics in found[1:]) > 0.05
    assert max(abs(metrics["mismatch/mean"] - 1) for metrics in found[1:]) > 1e-3


def test_under_keep_what_follows_a_change_of_weights_is_near_and_said_to_be(model_path: Path) -> None:
    approximate = 0
    worst = {False: 0.0, True: 0.0}
    for trained in pipeline(model_path, RECIPE, update="keep"):
        batch, seen, packed = trained.step.batch, trained.seen, trained.step.packed
        follows = np.concatenate([row > row[row >= 0].min() for row in rows_of(packed)])
        apart = np.abs(seen.proximal - batch.behaviour.numpy())
        for late in worst:
            worst[late] = max(worst[late], apart[seen.included & (follows == late)].max(initial=0.0))
        approximate += trained.metrics["proximal/approximate_tokens"]
        assert trained.metrics["proximal/approximate_tokens"] == (follows & seen.included).sum()
    assert approximate > 0
    assert worst[False] < 1e-5
    assert worst[True] > 1e-3


def test_after_a_resume_the_versions_before_it_are_not_held_and_their_tokens_are_counted(model_path: Path) -> None:
    """Their ratio is to the behaviour logprob, as it would be without the option."""
    *_, trained = pipeline(model_path, RECIPE, steps=6)
    trainer = Trainer.load(RECIPE, model_path, None)
    trainer.restart(5)
    step = trainer.prepare(trained.step.groups, version=5)
    seen, _ = trainer.train(step)
    old = step.batch.ages.numpy() > 0
    assert np.array_equal(np.isnan(seen.proximal[seen.included]), old[seen.included])
    metrics = step_metrics(step.packed, step.batch, step.worth, seen, first=step.first, update="recompute")
    assert metrics["proximal/behaviour_tokens"] == (seen.included & old).sum() > 0
    assert metrics["by_age"]["0"]["mismatch_mean"] is not None
    assert metrics["by_age"]["1"]["mismatch_mean"] is None
    assert math.isfinite(metrics["staleness/mean"])
