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
from asyncrl.learners.batch import Batch, Whole, microbatches, whole_answers
from asyncrl.learners.ess import Weighed, answer_log_ratios, from_slots, slots
from asyncrl.learners.forward import token_predictions
from asyncrl.learners.frozen import frozen_logprobs
from asyncrl.learners.objectives.aggregate import coefficients, token_sum, tokens_of_prompts, units
from asyncrl.learners.objectives.compose import known_masks, terms_of
from asyncrl.learners.objectives.sequences import Sequences
from asyncrl.learners.optimize import Optimizer, Updates
from asyncrl.learners.parallel import ALONE, Ranks
from asyncrl.learners.passes import compute_device, pass_along, portion
from asyncrl.learners.pull import pull_of
from asyncrl.learners.shrinking import Budget, fitted, forget_gradients


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
    tokens. units: what it is divided by (`objectives/aggregate.py`). idle_passes: that a rank made without tokens,
    because another one had more.
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
    idle_passes: int = 0

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
    """What a step saw and did. seen: of this rank's share, but for `loss_sum`, `units` and `idle_passes`, which are of
    all."""

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

    The segments of an answer may lie in several micro-batches. What an objective asks of a whole answer then needs
    log-probs of tokens that do not pass by: they are asked for in a pass before. In each micro-batch the loss is that
    of all tokens of its answers, of which only its own have a gradient; added up, that is the gradient of the sum.
    """
    device = compute_device(model)
    masked = _masked_by_data(batch, objective)
    wanted = batch.trained
    batch = replace(batch, trained=wanted & (masked == 0))
    prompt_tokens = torch.from_numpy(tokens_of_prompts(batch.trained.numpy(), batch.of_tokens(batch.groups)))
    per_token = torch.from_numpy(batch.of_tokens(advantages).astype(np.float32))
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
    teaches = taught(batch, advantages, objective)
    masked[torch.from_numpy(~batch.of_tokens(asked))] = 0
    room = portion(model, max_tokens)
    kinds = [
        ([(micro, whole_answers(batch, micro)) for micro in microbatches(batch, rows, room)], graded)
        for rows, graded in ((asked & ~teaches, False), (asked & teaches, True))
    ]
    away = _away(batch, [whole for portions, _ in kinds for _, whole in portions])
    others = torch.full((total,), torch.nan)
    if ranks.most(int(away.any())):
        others = frozen_logprobs(model, batch, away, temperature=temperature, max_tokens=max_tokens, ranks=ranks)
    idle = 0
    for portions, graded in kinds:
        # One pass with a gradient at least, and last: a step in which no group teaches is an update by zeros (see
        # `Optimizer`), and only a backward pass makes a sharded model let go of the weights that it has gathered.
        missing = ranks.most(max(len(portions), int(graded))) - len(portions)
        for _ in range(missing):
            pass_along(model, device, graded=graded)
        idle += missing
        for micro, whole in portions:
            at, of = micro.positions, whole.positions
            behaviour, trained = batch.behaviour[of].to(device), batch.trained[of].to(device)
            anchor, frozen = anchors[of].to(device), reference[of].to(device)
            with torch.set_grad_enabled(graded):
                predicted = token_predictions(
                    model,
                    batch.token_ids[at].to(device),
                    micro.cu_seqlens,
                    temperature=temperature,
                    share_prefixes=True,  # the members of a group follow each other
                    spread=True,
                    support=batch.support_of(micro),
                    asked=batch.trained[at],
                )
                assert predicted.entropy is not None
                found = whole.of_all(predicted.logprobs, others)
                finite = trained & torch.isfinite(found)
                if objective.beta:
                    finite = finite & torch.isfinite(frozen)
                # Left-out tokens are replaced before the surrogate: a NaN there would survive any mask put on it later.
                current = torch.where(finite, found, anchor)
                cu_seqlens = whole.cu_seqlens.to(device)
                terms = terms_of(
                    objective,
                    current,
                    behaviour,
                    anchor,
                    per_token[of].to(device),
                    Sequences(cu_seqlens, finite),
                    reference=torch.where(finite, frozen, anchor),
                    # Those of others are numbers that are taken off and have no gradient here: any will do.
                    entropy=torch.where(finite, whole.of_all(predicted.entropy, torch.zeros(total)), 0.0),
                )
                mask = finite & (terms.masked == 0)
                each = coefficients(
                    objective.aggregation,
                    Sequences(cu_seqlens, mask),
                    prompt_tokens=prompt_tokens[of].to(device),
                    longest=longest,
                    dtype=current.dtype,
                )
                losses = each * terms.loss
                loss = token_sum(losses, mask)
            own = whole.own
            if graded:
                predicted.logprobs.retain_grad()
                torch.autograd.backward(loss)
                loss_sum += float(token_sum(losses.detach()[own], mask[own]))
                slope, collision = predicted.logprobs.grad, predicted.collision
                assert slope is not None
                assert collision is not None
                pulls[at] = pull_of(slope, predicted.logprobs, collision).cpu()
            zero = torch.zeros((), device=device)
            here = of[own]
            included[here], measured[here] = mask[own].cpu(), finite[own].cpu()
            logprobs[here] = torch.where(finite, current.detach(), zero)[own].cpu()
            ratio[here] = torch.where(mask, terms.ratio, zero)[own].cpu()
            clipped[here] = (terms.clipped & mask)[own].cpu()
            cut[here] = (terms.cut & mask)[own].cpu()
            masked[here] = torch.where(terms.masked > 0, terms.masked.cpu(), masked[of])[own]
            entropy[at] = predicted.entropy.detach().cpu()
    zero = torch.zeros(())
    pulls, entropy = (torch.where(included, values, zero) for values in (pulls, entropy))
    asked_for = int((wanted.numpy() & batch.of_tokens(asked)).sum())
    return Seen(
        loss_sum=loss_sum,
        units=units(
            objective.aggregation, included.numpy(), batch.of_tokens(batch.answers), batch.of_tokens(batch.groups)
        ),
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
        idle_passes=idle,
    )


def _away(batch: Batch, wholes: Sequence[Whole]) -> Tensor:
    """bool [N]: trained tokens that do not pass by with all other rows of their answer."""
    away = torch.zeros(len(batch.token_ids), dtype=torch.bool)
    for whole in wholes:
        if whole.places is not None:
            away[whole.positions[whole.places < 0]] = True
    return away & batch.trained


def taught(batch: Batch, advantages: NDArray[np.float64], objective: Objective) -> NDArray[np.bool_]:
    """bool [rows]: whether there is something to learn from the row's group."""
    return np.isin(batch.groups, batch.groups[advantages != 0]) | teaches_all(objective)


def teaches_all(objective: Objective) -> bool:
    """Whether there is something to learn from a group in which nobody is better than anybody."""
    return not isinstance(objective.anchor, NoAnchor) or objective.beta > 0 or objective.entropy > 0


def planned_units(batch: Batch, objective: Objective, among: Sequence[int]) -> int:
    """What these groups add to the denominator as far as data tell: before any pass, and if no log-prob is broken."""
    known = _masked_by_data(batch, objective)
    tokens = (batch.trained & (known == 0)).numpy() & batch.of_tokens(np.isin(batch.groups, among))
    return units(objective.aggregation, tokens, batch.of_tokens(batch.answers), batch.of_tokens(batch.groups))


def _masked_by_data(batch: Batch, objective: Objective) -> Tensor:
    """uint8 [N], as `Seen.masked`: what is known before any pass."""
    sequences = Sequences(batch.cu_seqlens, batch.trained)
    return known_masks(objective, batch.ages, torch.from_numpy(batch.truncated), sequences)


def train_step(
    model: PreTrainedModel,
    optimizer: Optimizer,
    batch: Batch,
    advantages: NDArray[np.float64],
    *,
    objective: Objective,
    temperature: float,
    max_tokens: int | Budget,
    longest: int = 1,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
    parts: Sequence[Sequence[int]] | None = None,
    ranks: Ranks = ALONE,
) -> StepResult:
    """An update by each part of the batch, one after the other (see `Optimizer.update` for those it skips).

    batch, advantages: this rank's share of the step. max_tokens: of a micro-batch; a `Budget` is halved where one does
    not fit into memory, and the passes of its update are made again. parts: its groups in each update, as many parts on
    every rank; None for one update by all. longest: tokens that an answer may have, for the aggregation `constant`.
    proximal: float32 [N], the learner's log-probs under the versions that sampled (see `version_logprobs`), against
    which the ratio is clipped, the engine's mismatch being a weight; NaN where the behaviour's serve, None for
    everywhere. reference: float32 [N], the log-probs of the reference, where the objective has one; a token without a
    finite one is left out like any that is not finite.

    Each of U updates has the gradient of U x (sum over its part) / (units of the step): a token weighs the same in
    whichever part it is, and at equal weights the mean of the updates' gradients is that of one update by all. Tokens
    without a finite log-prob, and those that a mask takes for the weights of the moment, leave the denominator once
    they are seen, which is too late for the updates before. With the aggregation `prompt` the first of them also change
    what the others of their prompt weigh, so the update's passes are made again.
    """
    parts = [range(batch.count)] if parts is None else parts
    (denominator,) = ranks.total([planned_units(batch, objective, range(batch.count))])
    seen, updates, measured = [], [], []

    def passes(batch: Batch, among: Sequence[int]) -> Seen:
        return fitted(
            max_tokens,
            partial(
                accumulate,
                model,
                batch,
                advantages,
                objective=objective,
                temperature=temperature,
                longest=longest,
                proximal=proximal,
                reference=reference,
                among=among,
                ranks=ranks,
            ),
            model=model,
            batch=batch,
            ranks=ranks,
        )

    for part in parts:
        own = passes(batch, among=part)
        if objective.aggregation == "prompt" and ranks.most(own.nonfinite):
            # What a token weighs follows from how many its prompt has, and these counted: once more without them.
            forget_gradients(model)
            there = torch.from_numpy(own.included | (own.masked > 0))
            again = passes(replace(batch, trained=batch.trained & there), among=part)
            own = replace(
                again,
                nonfinite=own.nonfinite + again.nonfinite,
                idle_passes=own.idle_passes + again.idle_passes,
            )
        lost = planned_units(batch, objective, part) - own.units
        answers = slots(weighed(own, batch), rank=ranks.rank, size=ranks.size)
        counts = [own.tokens, own.units, own.loss_sum, lost, own.idle_passes]
        tokens, counted, loss_sum, lost, idle, *answers = ranks.total([*counts, *answers])
        denominator -= lost
        measured.append(from_slots(answers))
        updates.append(optimizer.update(int(tokens), denominator=denominator / len(parts), ess=measured[-1].ess))
        seen.append(replace(own, loss_sum=loss_sum, units=counted, idle_passes=int(idle)))
    done = Updates(tuple(updates), ess=Weighed.together(measured).ess)
    optimizer.ended(done)
    return StepResult(seen=_together(seen), updates=done)


def weighed(seen: Seen, batch: Batch) -> Weighed:
    """The whole answers that were measured, by the weights of the moment over those that sampled."""
    log_ratios, some = answer_log_ratios(
        seen.logprobs, batch.behaviour.numpy(), seen.measured, batch.of_tokens(batch.answers)
    )
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
        idle_passes=sum(part.idle_passes for part in parts),
    )
