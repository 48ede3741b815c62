"""What a learner trains with, and how it trains a step: the same for a run, for each of its ranks and for a replay.

A step is a function of the weights, the optimizer's state, the recipe and the groups in their order. It asks no buffer
and no clock, so that whoever has the groups can make it again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from asyncrl.config.recipe import Recipe
from asyncrl.learners.advantages import Advantages, compared, scaled
from asyncrl.learners.batch import Batch, make_batch
from asyncrl.learners.checkpoint import Checkpoint
from asyncrl.learners.compiled import compile_layers
from asyncrl.learners.frozen import frozen_logprobs
from asyncrl.learners.history import History
from asyncrl.learners.optimize import Optimizer, Updates
from asyncrl.learners.parallel import ALONE, Ranks
from asyncrl.learners.passes import compute_device
from asyncrl.learners.proximal import version_logprobs
from asyncrl.learners.randomness import State, gathered, restore
from asyncrl.learners.recompute import recompute_layers
from asyncrl.learners.reference import Reference, Start
from asyncrl.learners.shares import (
    as_message,
    combine,
    deal,
    positions_of,
    share_groups,
    share_of,
    share_parts,
)
from asyncrl.learners.shrinking import Budget, fitted
from asyncrl.learners.snapshot import Keep, live
from asyncrl.learners.step import Seen, StepResult, taught, train_step
from asyncrl.learners.trained import load_trained
from asyncrl.learners.workload import Costs, costs_of, group_work, imbalance
from asyncrl.schema import Packed, pack

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Step:
    """The groups of a step, ready to be trained. shares[update][rank]: which of them, by their place. imbalance: work
    of the rank that has most in an update, over the ranks' mean, by plan."""

    version: int  # that the step starts from
    groups: Sequence[pa.RecordBatch]
    packed: Packed
    batch: Batch
    worth: Advantages
    shares: list[list[list[int]]]
    imbalance: float

    @property
    def first(self) -> NDArray[np.int64]:
        """Where the tokens of the first update lie in the batch: those that the weights of `version` saw."""
        return positions_of(self.batch, [group for share in self.shares[0] for group in share])


@dataclass(slots=True)
class Trainer:
    """A model and its optimizer, between two steps. `whole`: `model` itself, or where that is sharded a copy on rank 0
    that `Ranks.gather` brings up to date. `budget`: tokens of a micro-batch. `history`: with `objective.proximal:
    behaviour-version`; `reference`: with an `objective.beta` above 0."""

    recipe: Recipe
    ranks: Ranks
    model: PreTrainedModel
    whole: PreTrainedModel
    optimizer: Optimizer
    costs: Costs
    budget: Budget
    history: History | None
    reference: Reference | None

    @classmethod
    def load(
        cls,
        recipe: Recipe,
        model_path: Path,
        checkpoint: Checkpoint | None,
        ranks: Ranks = ALONE,
        *,
        run_dir: Path | None = None,
    ) -> Self:
        """The initial weights of `model_path`, or where `checkpoint` left them, moments and random numbers included.
        run_dir: of the run, if there is one: what its memory does not hold is kept there.

        Raises ModelError."""
        model = load_trained(recipe.model, model_path, checkpoint, seed=recipe.run.seed)
        start = Start.of(model, recipe.model, model_path, checkpoint) if recipe.objective.beta else None
        whole = ranks.shard(model, offload=recipe.learner.cpu_offload)
        if recipe.learner.cpu_offload and compute_device(model).type == "cpu":
            log.warning("learner.cpu_offload changes nothing: the learner computes on the CPU, where its weights are")
        if recipe.learner.compile:
            compile_layers(model)
        if recipe.learner.gradient_checkpointing:
            recompute_layers(model)
        optimizer = Optimizer(model, recipe.learner, ranks)
        torch.manual_seed(recipe.run.seed + ranks.rank)  # each process is seeded anew by torch
        if checkpoint is not None:
            state = checkpoint.training_state()
            optimizer.load_state_dict(state["optimizer"])
            restore(state["rng"], ranks.rank, compute_device(model))
        history = None
        if recipe.objective.proximal == "behaviour-version":
            history = History(
                model,
                version=0 if checkpoint is None else checkpoint.weights.version,
                keep=recipe.buffer.max_trajectory_age,
                dtype=getattr(torch, recipe.model.dtype) if recipe.model.lora is None else None,
                ranks=ranks,
            )
        return cls(
            recipe=recipe,
            ranks=ranks,
            model=model,
            whole=whole,
            optimizer=optimizer,
            costs=costs_of(model),
            budget=Budget.of(recipe.learner.max_tokens_per_microbatch, run_dir),
            history=history,
            reference=None if start is None else Reference(model, start, ranks),
        )

    @property
    def start(self) -> str:
        """Checksum of the weights that the run started from, if they are the reference; else empty."""
        return "" if self.reference is None else self.reference.checksum

    def resumable(self, keep: Keep = live) -> tuple[dict[str, Any], list[State]]:
        """What of a checkpoint is not weights: the optimizer's state, of which `keep` says what is given, and every
        rank's random numbers. A collective; of use on rank 0."""
        return self.optimizer.state_dict(keep), gathered(self.ranks, compute_device(self.model))

    def restart(self, version: int) -> None:
        """Forget the versions before this one, as a learner that starts from its checkpoint has."""
        if self.history is not None:
            self.history.restart(version)

    def prepare(self, groups: Sequence[pa.RecordBatch], *, version: int) -> Step:
        """Pack the groups of the step that starts from `version` and deal them out. Raises what `make_batch` raises."""
        packed = pack(groups)
        bound = self.recipe.buffer
        batch = make_batch(
            packed, version=version, max_age=bound.max_trajectory_age, mask_older=bound.over_age == "mask"
        )
        worth = compared(packed, self.recipe)
        work = [0] * batch.count  # one rank has it all
        if self.ranks.size > 1:
            work = group_work(batch, self.costs, taught(batch, worth.values, self.recipe.objective))
        shares = deal(
            [group.column("ticket")[0].as_py() for group in groups],
            work,
            updates=self.recipe.learner.updates_per_step,
            ranks=self.ranks.size,
        )
        uneven = max(imbalance(work, update) for update in shares)
        return Step(
            version=version, groups=groups, packed=packed, batch=batch, worth=worth, shares=shares, imbalance=uneven
        )

    def train(self, step: Step) -> tuple[Seen, Updates]:
        """As rank 0, once the other ranks were told to train their shares: the step's updates, and what all ranks saw
        of the whole batch."""
        shares = [share_groups(step.shares, rank) for rank in range(self.ranks.size)]
        if self.ranks.size == 1:
            result = self._train(step.batch, step.worth.values, share_parts(step.shares, 0), step.version)
        else:
            result = self.train_share([step.groups[n] for n in shares[0]], shares=step.shares, version=step.version)
        positions = [positions_of(step.batch, share) for share in shares]
        parts = self.ranks.collect(as_message(result.seen), [len(at) for at in positions])
        all_ranks = {name: getattr(result.seen, name) for name in ("loss_sum", "units", "idle_passes")}
        seen = combine(parts, positions, step.batch, **all_ranks)
        return seen, result.updates

    def train_share(
        self, groups: Sequence[pa.RecordBatch], *, shares: Sequence[Sequence[Sequence[int]]], version: int
    ) -> StepResult:
        """As any rank of several: the same updates, from `groups`, which are its own of `shares`, and those of the
        others."""
        batch, worth = share_of(groups, version=version, recipe=self.recipe)
        return self._train(batch, worth, share_parts(shares, self.ranks.rank), version)

    def _train(
        self, batch: Batch, worth: NDArray[np.float64], parts: Sequence[Sequence[int]], version: int
    ) -> StepResult:
        temperature = self.recipe.collector.sampling.temperature
        asked = partial(fitted, self.budget, model=self.model, batch=batch, ranks=self.ranks)
        proximal = None
        if self.history is not None:
            proximal = asked(
                partial(
                    version_logprobs,
                    self.model,
                    self.history,
                    batch,
                    version=version,
                    temperature=temperature,
                    ranks=self.ranks,
                )
            )
        reference = None
        if self.reference is not None:
            with self.reference.in_place():
                reference = asked(
                    partial(
                        frozen_logprobs,
                        self.model,
                        batch,
                        batch.trained,
                        temperature=temperature,
                        ranks=self.ranks,
                    )
                )
        result = train_step(
            self.model,
            self.optimizer,
            batch,
            scaled(batch.rewards, batch.answers, worth, self.recipe.objective.advantage, total=self.ranks.total),
            objective=self.recipe.objective,
            temperature=temperature,
            max_tokens=self.budget,
            longest=self.recipe.collector.sampling.max_tokens,
            proximal=proximal,
            reference=reference,
            parts=parts,
            ranks=self.ranks,
        )
        if self.history is not None:
            self.history.remember(version + 1)
        return result
