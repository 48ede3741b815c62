"""REINFORCE: the policy gradient itself (Williams 1992; for language models arXiv 2402.14740)."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.learners.objectives.ratio import ratio_of
from asyncrl.learners.objectives.surrogate import Surrogate


def reinforce(logprobs: Tensor, behaviour: Tensor, advantages: Tensor) -> Surrogate:
    """-A logprobs. Has no ratio of its own: what other weights sampled is corrected by an importance weight.

    Arguments as of `ppo_clip`; behaviour is only looked at to tell the ratio."""
    ratio = ratio_of(logprobs - behaviour).detach()
    return Surrogate(loss=-advantages * logprobs, ratio=ratio, clipped=torch.zeros_like(ratio, dtype=torch.bool))
