"""The computation of one step, from a batch to changed weights. No I/O, no clock, no buffer.

With several ranks each has its share of the batch; numerator and denominator are of the whole step all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from asyncrl.config.recipe import Objective
from asyncrl.learners.batch import Batch, microbatches
from asyncrl.learners.forward import PACKED, token_logprobs
from asyncrl.learners.objectives.aggregate import token_sum
from asyncrl.learners.objectives.ppo_clip import ppo_clip
from asyncrl.learners.optimize import Optimizer, Update
from asyncrl.learners.parallel import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class Seen:
    """What a step saw of its batch before the update, per token of the batch [N] (0 / False where `included` is False).

    included: trained by the batch and with a finite log-prob under the learner: what numerator and denominator hold.
    nonfinite: trained by the batch, but without a finite log-prob under the learner.
    """

    loss_sum: float  # over the included tokens
    included: NDArray[np.bool_]
    logprobs: NDArray[np.float32]  # of the weights the step started from
    ratio: NDArray[np.float32]
    clipped: NDArray[np.bool_]
    nonfinite: int

    @property
    def tokens(self) -> int:
        """Their number; over all ranks it is the denominator of the step."""
        return int(self.included.sum())

    @property
    def loss(self) -> float:
        """Mean over the included tokens."""
        return self.loss_sum / max(1, self.tokens)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step saw and did. seen: of this rank's share, but for `loss_sum`, which is of all."""

    seen: Seen
    update: Update


def accumulate(
    model: PreTrainedModel,
    batch: Batch,
    advantages: NDArray[np.float64],
    *,
    objective: Objective,
    temperature: float,
    max_tokens: int,
    ranks: Ranks = ALONE,
) -> Seen:
    """Add the gradient of the SUM of token losses to the model's, micro-batch by micro-batch of `max_tokens` tokens.

    advantages float64 [rows]. The caller divides once, by the `tokens` of the answer: the gradient is then the same for
    every `max_tokens`. A rank with fewer micro-batches than another makes passes that add exactly 0, since each pass
    gathers the weights from all ranks.

    A group in which nobody is better than anybody, each advantage 0, has the loss 0 whatever the weights: its tokens
    pass through the model to be accounted for, ratio and divergence as all others', and without a gradient, which
    is twice as much work as the rest. They are in the denominator like any other.
    """
    device = next(model.parameters()).device
    if model.config._attn_implementation != PACKED:
        max_tokens = 1  # a sequence a micro-batch: the model is called so often anyway, and ranks must agree how often
    per_token = torch.from_numpy(np.repeat(advantages, batch.lengths).astype(np.float32))
    total = len(batch.token_ids)
    logprobs, ratio = torch.zeros(total), torch.zeros(total)
    included, clipped = torch.zeros(total, dtype=torch.bool), torch.zeros(total, dtype=torch.bool)
    loss_sum = 0.0
    teaches = np.isin(batch.groups, batch.groups[advantages != 0])
    for rows, graded in ((~teaches, False), (teaches, True)):
        portions = microbatches(batch, rows, max_tokens)
        # One pass with a gradient at least, and last: a step in which no group teaches is an update by zeros (see
        # `Optimizer`), and only a backward pass makes a sharded model let go of the weights that it has gathered.
        for _ in range(ranks.most(max(len(portions), int(graded))) - len(portions)):
            _pass_along(model, device, graded=graded)
        for micro in portions:
            at = micro.positions
            behaviour, trained = batch.behaviour[at].to(device), batch.trained[at].to(device)
            with torch.set_grad_enabled(graded):
                current = token_logprobs(
                    model,
                    batch.token_ids[at].to(device),
                    micro.cu_seqlens,
                    temperature=temperature,
                    share_prefixes=True,  # the members of a group follow each other
                )
                mask = trained & torch.isfinite(current)
                # Left-out tokens are replaced before the surrogate: a NaN there would survive any mask put on it later.
                current = torch.where(mask, current, behaviour)
                terms = ppo_clip(
                    current,
                    behaviour,
                    per_token[at].to(device),
                    epsilon=objective.epsilon,
                    epsilon_high=objective.epsilon_high,
                )
                loss = token_sum(terms.loss, mask)
            if graded:
                torch.autograd.backward(loss)
                loss_sum += float(loss.detach())
            zero = torch.zeros((), device=device)
            included[at] = mask.cpu()
            logprobs[at] = torch.where(mask, current.detach(), zero).cpu()
            ratio[at] = torch.where(mask, terms.ratio, zero).cpu()
            clipped[at] = (terms.clipped & mask).cpu()
    tokens = int(included.sum())
    return Seen(
        loss_sum=loss_sum,
        included=included.numpy(),
        logprobs=logprobs.numpy(),
        ratio=ratio.numpy(),
        clipped=clipped.numpy(),
        nonfinite=batch.tokens - tokens,
    )


def _pass_along(model: PreTrainedModel, device: torch.device, *, graded: bool) -> None:
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
    ranks: Ranks = ALONE,
) -> StepResult:
    """Gradient of the mean token loss over the whole batch, then one update (or none, see `Optimizer.step`).

    batch, advantages: this rank's share of the step."""
    seen = accumulate(
        model,
        batch,
        advantages,
        objective=objective,
        temperature=temperature,
        max_tokens=max_tokens,
        ranks=ranks,
    )
    tokens, loss_sum = ranks.total([seen.tokens, seen.loss_sum])
    return StepResult(seen=replace(seen, loss_sum=loss_sum), update=optimizer.step(int(tokens)))
