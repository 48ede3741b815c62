"""Log-probs of a batch's tokens by whatever weights the model has at the moment, to be looked at and not trained."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.learners.batch import Batch, microbatches
from asyncrl.learners.forward import token_logprobs
from asyncrl.learners.parallel import ALONE, Ranks
from asyncrl.learners.passes import compute_device, pass_along, portion


@torch.no_grad()
def frozen_logprobs(
    model: PreTrainedModel,
    batch: Batch,
    tokens: Tensor,
    *,
    temperature: float,
    max_tokens: int,
    ranks: Ranks = ALONE,
) -> Tensor:
    """float32 [N], nats, of `tokens` (bool [N], among the trained ones); NaN at the others, and where there is no
    finite number. Sequences that have none of them do not pass through the model. A collective."""
    found = torch.full((len(batch.token_ids),), torch.nan)
    device = compute_device(model)
    row_of = batch.of_tokens(np.arange(len(batch.lengths)))
    rows = np.bincount(row_of[tokens.numpy()], minlength=len(batch.lengths)) > 0
    portions = microbatches(batch, rows, portion(model, max_tokens))
    for _ in range(ranks.most(len(portions)) - len(portions)):
        pass_along(model, device, graded=False)
    for micro in portions:
        at = micro.positions
        found[at] = token_logprobs(
            model,
            batch.token_ids[at].to(device),
            micro.cu_seqlens,
            temperature=temperature,
            share_prefixes=True,  # the members of a group follow each other
            support=batch.support_of(micro),
            asked=tokens[at],
        ).cpu()
    return torch.where(tokens & torch.isfinite(found), found, torch.nan)
