"""The learner's own log-probs of a batch's tokens, each under exactly the weights that sampled it.

What the record has are the engine's, mu. Those found here are of the same weights and of the step's own forward, pi_v:
pi_v / mu is what the engine computes differently, pi / pi_v what training has changed (`objectives/compose.py`).

A sequence is asked whole, so pi_v of a token is conditioned on its prefix as v sees it. So did the engine, if it
recomputed its keys and values when weights changed (`weights.update: recompute`), or if none changed meanwhile; under
`keep` older weights have computed part of them, and pi_v is near, not equal: what is apart counts as mismatch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.learners.batch import Batch
from asyncrl.learners.frozen import frozen_logprobs
from asyncrl.learners.history import History
from asyncrl.learners.parallel import ALONE, Ranks


@torch.no_grad()
def version_logprobs(
    model: PreTrainedModel,
    history: History,
    batch: Batch,
    *,
    version: int,
    temperature: float,
    max_tokens: int,
    ranks: Ranks = ALONE,
) -> Tensor:
    """float32 [N], nats, under the version of each trained token; NaN where `history` does not hold that version, where
    it gives no finite number, and where a token is not trained. A collective.

    version: that the step starts from, `history`'s newest. Each version that is there passes the rows that have tokens
    of it through the model once; the model has its own weights again afterwards.
    """
    found = torch.full((len(batch.token_ids),), torch.nan)
    with history.loading() as load:
        for held in history.versions:
            of_version = batch.ages == version - held
            if ranks.most(int(of_version.any())):
                load(held)
                logprobs = frozen_logprobs(
                    model, batch, of_version, temperature=temperature, max_tokens=max_tokens, ranks=ranks
                )
                found = torch.where(of_version, logprobs, found)
    return found
