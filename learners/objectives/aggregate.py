"""From per-token losses to one number.

A mean has the denominator of the whole step, not of a micro-batch: the mean of portions' means would weigh a token by
the company it is packed with. So portions give sums, each token with a coefficient, and the step divides once, by what
the *units* of all ranks and micro-batches come to:

| aggregation | coefficient of a token | units, over the step |
|---|---|---|
| token | 1 | tokens |
| sequence | 1 / tokens of its answer | answers with a token |
| prompt | 1 / tokens of its prompt's answers | prompts with a token |
| constant | 1 / longest answer that is allowed | answers with a token |

Answers and prompts are never split over ranks. The rows of an answer, its segments, may be in several micro-batches,
each of which is given all of its tokens (`batch.whole_answers`).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.learners.objectives.sequences import Sequences


def token_sum(losses: Tensor, trained: Tensor) -> Tensor:
    """Sum of `losses` [N] over the tokens in `trained` (bool [N]); what stands at the others, even NaN, is not seen.

    >>> float(token_sum(torch.tensor([4.0, float("nan"), 0.0]), torch.tensor([True, False, True])))
    4.0
    """
    return torch.where(trained, losses, torch.zeros((), dtype=losses.dtype, device=losses.device)).sum()


def coefficients(
    aggregation: str | None, sequences: Sequences, *, prompt_tokens: Tensor, longest: int, dtype: torch.dtype
) -> Tensor:
    """[N]: what each token's loss is multiplied by. sequences: with the tokens that are left after all masks.

    prompt_tokens int [N]: tokens of each token's prompt (see `tokens_of_prompts`), known before the passes. longest:
    tokens that an answer may have.
    """
    if aggregation == "sequence":
        return sequences.spread(1 / sequences.counts.clamp(min=1).to(dtype))
    if aggregation == "prompt":
        return 1 / prompt_tokens.clamp(min=1).to(dtype)
    each = 1 / longest if aggregation == "constant" else 1.0
    return torch.full((len(sequences.tokens),), each, dtype=dtype, device=sequences.tokens.device)


def units(
    aggregation: str | None, tokens: NDArray[np.bool_], answers: NDArray[np.int64], groups: NDArray[np.int64]
) -> int:
    """What the step divides by, of these tokens: bool [N], with the answer [N] and the group [N] that each is of.

    >>> tokens, answers, groups = np.array([True, True, False, True]), np.array([0, 0, 1, 2]), np.array([0, 0, 0, 1])
    >>> [units(aggregation, tokens, answers, groups) for aggregation in ("token", "sequence", "prompt")]
    [3, 2, 2]
    """
    if aggregation == "token":
        return int(tokens.sum())
    return len(np.unique((groups if aggregation == "prompt" else answers)[tokens]))


def tokens_of_prompts(tokens: NDArray[np.bool_], groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """int [N]: how many of `tokens` each one's group [N] has."""
    found: NDArray[np.int64] = np.bincount(groups[tokens], minlength=int(groups.max(initial=-1)) + 1)[groups]
    return found
