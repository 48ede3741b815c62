"""GSPO: one clipped ratio per answer, the geometric mean of its tokens' (arXiv 2507.18071)."""

from __future__ import annotations

from torch import Tensor

from asyncrl.learners.objectives.ppo_clip import ppo_clip
from asyncrl.learners.objectives.ratio import ratio_of
from asyncrl.learners.objectives.sequences import Sequences
from asyncrl.learners.objectives.surrogate import Surrogate


def gspo(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    sequences: Sequences,
    *,
    epsilon: float,
    epsilon_high: float,
) -> Surrogate:
    """-min(s A, clip(s, 1 - epsilon, 1 + epsilon_high) A) at each token, s = exp(mean of an answer's log ratios).

    An answer's mean over its tokens is then its loss. ratio: of each token, as of other surrogates, not s. Arguments as
    of `ppo_clip`; advantages are the same at all tokens of an answer.
    """
    log_ratio = logprobs - behaviour
    mean = sequences.spread(sequences.mean(log_ratio))
    of_answer = ppo_clip(mean, mean.new_zeros(()), advantages, epsilon=epsilon, epsilon_high=epsilon_high)
    return Surrogate(loss=of_answer.loss, ratio=ratio_of(log_ratio.detach()), clipped=of_answer.clipped)
