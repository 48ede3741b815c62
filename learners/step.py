"""The computation of one step, from a batch to changed weights. No I/O, no clock, no buffer.

With several ranks each has its share of the batch, and with several updates each trains a part of it; the denominator
is of the whole step all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.config.objective import NoAnchor, Objective
from asyncrl.learners.batch import Batch, microbatches
from asyncrl.learners.ess import Weighed, answer_log_ratios, from_slots, slots
from asyncrl.learners.forward import PACKED, token_logprobs, token_predictions
from asyncrl.learners.objectives.aggregate import coefficients, token_sum, tokens_of_prompts, units
from asyncrl.learners.objectives.compose import known_masks, terms_of
from asyncrl.learners.objectives.sequences import Sequences
from asyncrl.learners.optimize import Optimizer, Updates
from asyncrl.learners.parallel import ALONE, Ranks
from asyncrl.learners.pull import pull_of


@dataclass(frozen=True, slots=True)
class Seen:
    """What a step saw of its batch, per token of the batch [N] (0 / False where `included` is False), by the weights
    that the token's update started from.

    included: trained by the batch, not masked and with a finite log-prob under the learner: what numerator and
    denominator hold. nonfinite: trained by the batch, but without a finite log-prob under the learner.
    masked: 0, or 1 + the place in `objectives.masks.NAMES` of the mask that took the token. measured: included, or
    taken by a mask that had to know the log-prob. logprobs: of these. cut: its importance weight is not the ratio.
    pulls: norm of the token's gradient of `loss_sum` at the logits (`pull.py`). entropy: of what it was chosen from, by
    these weights, nats. proximal: log-prob that the ratio was clipped against, NaN where it is the behaviour's;
    reference: log-prob of the reference, NaN where it was not asked (see `train_step`). loss_sum: over the included
    tokens. units: what it is divided by (`objectives/aggregate.py`).
    """

    loss_sum: float
    units: float
    included: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    ratio: NDArray[np.float32]
    clipped: NDArray[np.bool_]
    masked: NDArray[np.uint8]
    measured: NDArray[np.bool_]
    cut: NDArray[np.bool_]
    pulls: NDArray[np.float32]
    entropy: NDArray[np.float32]
    proximal: NDArray[np.float32]
    reference: NDArray[np.float32]
    nonfinite: int

    @property
    def tokens(self) -> int:
        """Their number; over all ranks it is the denominator of the step, if that is a mean over tokens."""
        return int(self.included.sum())

    @property
    def loss(self) -> float:
        """Mean over tokens, answers or prompts, as the objective has it."""
        return self.loss_sum / max(1, self.units)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step saw and did. seen: of this rank's share, but for `loss_sum` and `units`, which are of all."""

    seen: Seen
    updates: Updates


def accumulate(
    model: PreTrainedModel,
    batch: Batch,
    advantages: NDArray[np.float64],
    *,
    objective: Objective,
    temperature: float,
    max_tokens: int,
    longest: int = 1,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
    among: Sequence[int] | None = None,
    ranks: Ranks = ALONE,
) -> Seen:
    """Add the gradient of the SUM of token losses to the model's, micro-batch by micro-batch of `max_tokens` tokens.

    advantages float64 [rows]. longest, proximal, reference: see `train_step`. among: the groups of the batch that are
    asked for, None for all; the others are neither trained nor seen. Each loss has the coefficient of the objective's
    aggregation, and the caller divides once, by the units of the whole step: the gradient is then the same for every
    `max_tokens`. A rank with fewer micro-batches than another makes passes that add exactly 0, since each pass gathers
    the weights from all ranks.

    A group in which nobody is better than anybody, each advantage 0, has the loss 0 whatever the weights: its tokens
    pass through the model to be accounted for, ratio and divergence as all others', and without a gradient, which
    is twice as much work as the rest. They are in the denominator like any other. With an anchor, a reference or a
    bonus they have a loss.
    """
    device = next(model.parameters()).device
    masked = _masked_by_data(batch, objective)
    wanted = batch.trained
    batch = replace(batch, trained=wanted & (masked == 0))
    prompt_tokens = torch.from_numpy(tokens_of_prompts(batch.trained.numpy(), batch.lengths, batch.groups))
    per_token = torch.from_numpy(np.repeat(advantages, batch.lengths).astype(np.float32))
    total = len(batch.token_ids)
    if proximal is None:
        proximal = torch.full((total,), torch.nan)
    anchors = torch.where(torch.isnan(proximal), batch.behaviour, proximal)
    if reference is None:
        reference = torch.full((total,), torch.nan)
    logprobs, ratio, pulls, entropy = (torch.zeros(total) for _ in range(4))
    included, measured, clipped, cut = (torch.zeros(total, dtype=torch.bool) for _ in range(4))
    loss_sum = 0.0
    asked = np.ones(len(batch.groups), np.bool_) if among is None else np.isin(batch.groups, among)
    teaches = np.isin(batch.groups, batch.groups[advantages != 0]) | teaches_all(objective)
    masked[torch.from_numpy(~np.repeat(asked, batch.lengths))] = 0
    for rows, graded in ((asked & ~teaches, False), (asked & teaches, True)):
        portions = microbatches(batch, rows, portion(model, max_tokens))
        # One pass with a gradient at least, and last: a step in which no group teaches is an update by zeros (see
        # `Optimizer`), and only a backward pass makes a sharded model let go of the weights that it has gathered.
        for _ in range(ranks.most(max(len(portions), int(graded))) - len(portions)):
            pass_along(model, device, graded=graded)
        for micro in portions:
            at = micro.positions
            behaviour, trained = batch.behaviour[at].to(device), batch.trained[at].to(device)
            anchor, frozen = anchors[at].to(device), reference[at].to(device)
            with torch.set_grad_enabled(graded):
                predicted = token_predictions(
                    model,
                    batch.token_ids[at].to(device),
                    micro.cu_seqlens,
                    temperature=temperature,
                    share_prefixes=True,  # the members of a group follow each other
                    spread=True,
                )
                assert predicted.entropy is not None
                finite = trained & torch.isfinite(predicted.logprobs)
                if objective.beta:
                    finite = finite & torch.isfinite(frozen)
                # Left-out tokens are replaced before the surrogate: a NaN there would survive any mask put on it later.
                current = torch.where(finite, predicted.logprobs, anchor)
                cu_seqlens = micro.cu_seqlens.to(device)
                terms = terms_of(
                    objective,
                    current,
                    behaviour,
                    anchor,
                    per_token[at].to(device),
                    Sequences(cu_seqlens, finite),
                    reference=torch.where(finite, frozen, anchor),
                    entropy=torch.where(finite, predicted.entropy, 0.0),
                )
                mask = finite & (terms.masked == 0)
                each = coefficients(
                    objective.aggregation,
                    Sequences(cu_seqlens, mask),
                    prompt_tokens=prompt_tokens[at].to(device),
                    longest=longest,
                    dtype=current.dtype,
                )
                loss = token_sum(each * terms.loss, mask)
            if graded:
                predicted.logprobs.retain_grad()
                torch.autograd.backward(loss)
                loss_sum += float(loss.detach())
                slope, collision = predicted.logprobs.grad, predicted.collision
                assert slope is not None
                assert collision is not None
                pulls[at] = torch.where(mask, pull_of(slope, predicted.logprobs, collision), 0.0).cpu()
            zero = torch.zeros((), device=device)
            included[at], measured[at] = mask.cpu(), finite.cpu()
            logprobs[at] = torch.where(finite, current.detach(), zero).cpu()
            ratio[at] = torch.where(mask, terms.ratio, zero).cpu()
            entropy[at] = torch.where(mask, predicted.entropy.detach(), zero).cpu()
            clipped[at] = (terms.clipped & mask).cpu()
            cut[at] = (terms.cut & mask).cpu()
            masked[at] = torch.where(terms.masked > 0, terms.masked.cpu(), masked[at])
    asked_for = int((wanted.numpy() & np.repeat(asked, batch.lengths)).sum())
    return Seen(
        loss_sum=loss_sum,
        units=units(objective.aggregation, included.numpy(), batch.lengths, batch.groups),
        included=included.numpy(),
        logprobs=logprobs.numpy(),
        ratio=ratio.numpy(),
        clipped=clipped.numpy(),
        masked=masked.numpy(),
        measured=measured.numpy(),
        cut=cut.numpy(),
        pulls=pulls.numpy(),
        entropy=entropy.numpy(),
        proximal=proximal.numpy(),
        reference=reference.numpy(),
        nonfinite=asked_for - int(included.sum()) - int((masked > 0).sum()),
    )


def teaches_all(objective: Objective) -> bool:
    """Whether there is something to learn from a group in which nobody is better than anybody."""
    return not isinstance(objective.anchor, NoAnchor) or objective.beta > 0 or objective.entropy > 0


def planned_units(batch: Batch, objective: Objective, among: Sequence[int]) -> int:
    """What these groups add to the denominator as far as data tell: before any pass, and if no log-prob is broken."""
    known = _masked_by_data(batch, objective)
    tokens = (batch.trained & (known == 0)).numpy() & np.repeat(np.isin(batch.groups, among), batch.lengths)
    return units(objective.aggregation, tokens, batch.lengths, batch.groups)


def _masked_by_data(batch: Batch, objective: Objective) -> Tensor:
    """uint8 [N], as `Seen.masked`: what is known before any pass."""
    sequences = Sequences(batch.cu_seqlens, batch.trained)
    return known_masks(objective, batch.ages, torch.from_numpy(batch.truncated), sequences)


def portion(model: PreTrainedModel, max_tokens: int) -> int:
    """Tokens of a micro-batch. Of a model that does not pack a sequence is one: it is called so often anyway, and ranks
    must agree how often."""
    return max_tokens if model.config._attn_implementation == PACKED else 1


def pass_along(model: PreTrainedModel, device: torch.device, *, graded: bool) -> None:
    """A pass that trains nothing, over the shortest sequence that has a prediction."""
    with torch.set_grad_enabled(graded):
        logprobs = token_logprobs(model, torch.zeros(2, dtype=torch.int64, device=device), torch.tensor([0, 2]))
        loss = token_sum(logprobs, torch.zeros(2, dtype=torch.bool, device=device))
    if graded:
        torch.autograd.backward(loss)


def train_step(
    model: PreTrainedModel,
    optimizer: Optimizer,
    batch: Batch,
    advantages: NDArray[np.float64],
    *,
    objective: Objective,
    temperature: float,
    max_tokens: int,
    longest: int = 1,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
    parts: Sequence[Sequence[int]] | None = None,
    ranks: Ranks = ALONE,
) -> StepResult:
    """An update by each part of the batch, one after the other (see `Optimizer.update` for those it skips).

    batch, advantages: this rank's share of the step. parts: its groups in each update, as many parts on every rank;
    None for one update by all. longest: tokens that an answer may have, for the aggregation `constant`. proximal:
    float32 [N], the learner's log-probs under the versions that sampled (see `version_logprobs`), against which the
    ratio is clipped, the engine's mismatch being a weight; NaN where the behaviour's serve, None for everywhere.
    reference: float32 [N], the log-probs of the reference, where the objective has one; a token without a finite one is
    left out like any that is not finite.

    Each of U updates has the gradient of U x (sum over its part) / (units of the step): a token weighs the same in
    whichever part it is, and at equal weights the mean of the updates' gradients is that of one update by all. Tokens
    without a finite log-prob, and those that a mask takes for the weights of the moment, leave the denominator once
    they are seen, which is too late for the updates before. With the aggregation `prompt` the first of them also change
    what the others of their prompt weigh, so the update's passes are made again.
    """
    parts = [range(batch.count)] if parts is None else parts
    (denominator,) = ranks.total([planned_units(batch, objective, range(batch.count))])
    seen, updates, measured = [], [], []
    passes = partial(
        accumulate,
        model,
        advantages=advantages,
        objective=objective,
        temperature=temperature,
        max_tokens=max_tokens,
        longest=longest,
        proximal=proximal,
        reference=reference,
        ranks=ranks,
    )
    for part in parts:
        own = passes(batch, among=part)
        if objective.aggregation == "prompt" and ranks.most(own.nonfinite):
            # What a token weighs follows from how many its prompt has, and these counted: once more without them.
            for parameter in model.parameters():
                parameter.grad = None
            there = torch.from_numpy(own.included | (own.masked > 0))
            again = passes(replace(batch, trained=batch.trained & there), among=part)
            own = replace(again, nonfinite=own.nonfinite + again.nonfinite)
        lost = planned_units(batch, objective, part) - own.units
        answers = slots(weighed(own, batch), rank=ranks.rank, size=ranks.size)
        tokens, counted, loss_sum, lost, *answers = ranks.total([own.tokens, own.units, own.loss_sum, lost, *answers])
        denominator -= lost
        measured.append(from_slots(answers))
        updates.append(optimizer.update(int(tokens), denominator=denominator / len(parts), ess=measured[-1].ess))
        seen.append(replace(own, loss_sum=loss_sum, units=counted))
    done = Updates(tuple(updates), ess=Weighed.together(measured).ess)
    optimizer.ended(done)
    return StepResult(seen=_together(seen), updates=done)


def weighed(seen: Seen, batch: Batch) -> Weighed:
    """The whole answers that were measured, by the weights of the moment over those that sampled."""
    log_ratios, some = answer_log_ratios(seen.logprobs, batch.behaviour.numpy(), seen.measured, batch.lengths)
    return Weighed.of(log_ratios[some])


def _together(parts: Sequence[Seen]) -> Seen:
    """What was seen of disjoint parts of one batch: each has 0 where another has a token."""
    return Seen(
        loss_sum=sum(part.loss_sum for part in parts),
        units=sum(part.units for part in parts),
        included=np.logical_or.reduce([part.included for part in parts]),
        logprobs=np.add.reduce([part.logprobs for part in parts]),
        ratio=np.add.reduce([part.ratio for part in parts]),
        clipped=np.logical_or.reduce([part.clipped for part in parts]),
        masked=np.add.reduce([part.masked for part in parts]),
        measured=np.logical_or.reduce([part.measured for part in parts]),
        cut=np.logical_or.reduce([part.cut for part in parts]),
        pulls=np.add.reduce([part.pulls for part in parts]),
        entropy=np.add.reduce([part.entropy for part in parts]),
        proximal=parts[0].proximal,  # of the whole batch
        reference=parts[0].reference,
        nonfinite=sum(part.nonfinite for part in parts),
    )
