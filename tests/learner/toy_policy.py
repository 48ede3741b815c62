"""A policy whose answers can all be written down: three tokens, at most three of them, the first of which ends one.

Every prefix has logits of its own, so that the gradient of anything is a tensor [7, 3] that can be compared in float64.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.objective import Objective
from asyncrl.learners.objectives.aggregate import coefficients, token_sum, tokens_of_prompts, units
from asyncrl.learners.objectives.compose import known_masks, terms_of
from asyncrl.learners.objectives.sequences import Sequences

LONGEST = 3
ANSWERS = [
    answer
    for n in range(1, LONGEST + 1)
    for answer in itertools.product(range(3), repeat=n)
    if 0 not in answer[:-1] and (answer[-1] == 0 or n == LONGEST)
]
PREFIXES = {
    prefix: n for n, prefix in enumerate(p for size in range(LONGEST) for p in itertools.product((1, 2), repeat=size))
}


def policy(seed: int, lag: float = 0.0, drift: float = 0.15) -> Tensor:
    """Logits [7, 3], float64: what training has left behind `lag` versions ago."""
    generator = torch.Generator().manual_seed(seed)
    current = torch.randn(len(PREFIXES), 3, dtype=torch.float64, generator=generator)
    direction = torch.randn(len(PREFIXES), 3, dtype=torch.float64, generator=generator)
    return current + lag * drift * direction


def logprobs_of(logits: Tensor, answer: tuple[int, ...]) -> Tensor:
    """[len(answer)], nats."""
    rows = torch.log_softmax(logits, 1)
    return torch.stack([rows[PREFIXES[answer[:t]], token] for t, token in enumerate(answer)])


def entropies_of(logits: Tensor, answer: tuple[int, ...]) -> Tensor:
    """[len(answer)], nats: of what each token was chosen from."""
    rows = torch.log_softmax(logits, 1)
    return torch.stack(
        [-(rows[PREFIXES[answer[:t]]].exp() * rows[PREFIXES[answer[:t]]]).sum() for t in range(len(answer))]
    )


def chances(logits: Tensor) -> Tensor:
    """[15]: of each answer."""
    return torch.stack([logprobs_of(logits, answer).sum().exp() for answer in ANSWERS])


@dataclass
class Answers:
    """Answers that were sampled, with all that an objective asks of them; one value a token, but for what comes last:
    of each answer, and `reference`, the logits of another policy."""

    logits: Tensor
    texts: list[tuple[int, ...]]
    behaviour: list[Tensor]
    proximal: list[Tensor]
    ages: list[list[int]]
    advantages: list[float]
    groups: list[int]
    truncated: list[bool]
    order: list[int] = field(default_factory=list)
    reference: Tensor | None = None

    def __post_init__(self) -> None:
        self.order = self.order or list(range(len(self.texts)))


def every_answer(seed: int, lag: float) -> Answers:
    """All fifteen, in five groups of three, sampled `lag` versions ago by an engine that rounds a little."""
    generator = torch.Generator().manual_seed(seed + 100)
    logits, old = policy(seed).requires_grad_(), policy(seed, lag)
    proximal = [logprobs_of(old, text) for text in ANSWERS]
    noise = 0.0 if lag == 0 else 0.05
    behaviour = [p + noise * torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in proximal]
    worth = torch.randn(len(ANSWERS), dtype=torch.float64, generator=generator).tolist()
    return Answers(
        logits=logits,
        texts=list(ANSWERS),
        behaviour=behaviour,
        proximal=proximal,
        ages=[[max(0, int(lag) - t) for t in range(len(text))] for text in ANSWERS],
        advantages=worth,
        groups=[n // 3 for n in range(len(ANSWERS))],
        truncated=[text[-1] != 0 for text in ANSWERS],
        reference=policy(seed, 12),
    )


def gradient(objective: Objective, answers: Answers, *, portions: int = 1, local: bool = False) -> Tensor:
    """Of the implementation, divided as a step divides it. portions: micro-batches that the answers are dealt to, in
    `order`. local: a control, in which each has a denominator of its own."""
    rows = answers.order
    parts = [part.tolist() for part in np.array_split(np.array(rows), portions)]
    of_prompts = _prompt_tokens(objective, answers)
    total, counted = torch.zeros_like(answers.logits), 0
    for part in parts:
        found, own = _portion(objective, answers, part, of_prompts)
        total += found / max(1, own) / len(parts) if local else found
        counted += own
    prompts = len({answers.groups[row] for row, tokens in of_prompts.items() if tokens.any()})
    counted = prompts if objective.aggregation == "prompt" else counted
    return total if local else total / max(1, counted)


def _known(objective: Objective, answers: Answers, part: list[int]) -> tuple[Sequences, Tensor]:
    lengths = np.array([len(answers.texts[row]) for row in part])
    cu = torch.tensor([0, *np.cumsum(lengths)])
    every = Sequences(cu, torch.ones(int(cu[-1]), dtype=torch.bool))
    ages = torch.tensor([age for row in part for age in answers.ages[row]])
    masked = known_masks(objective, ages, torch.tensor([answers.truncated[row] for row in part]), every)
    return Sequences(cu, masked == 0), torch.from_numpy(lengths)


def _prompt_tokens(objective: Objective, answers: Answers) -> dict[int, np.ndarray[Any, Any]]:
    """Row -> for each of its tokens, how many its group has; before any pass."""
    rows = sorted(range(len(answers.texts)), key=lambda row: answers.groups[row])
    sequences, lengths = _known(objective, answers, rows)
    groups = np.unique([answers.groups[row] for row in rows], return_inverse=True)[1]
    counts = tokens_of_prompts(sequences.tokens.numpy(), np.repeat(groups, lengths))
    return dict(zip(rows, np.split(counts, np.cumsum(lengths.numpy())[:-1]), strict=True))


def _portion(
    objective: Objective, answers: Answers, part: list[int], of_prompts: dict[int, np.ndarray[Any, Any]]
) -> tuple[Tensor, int]:
    """The gradient of the portion's sum, and its units."""
    sequences, lengths = _known(objective, answers, part)
    current = torch.cat([logprobs_of(answers.logits, answers.texts[row]) for row in part])
    behaviour = torch.cat([answers.behaviour[row] for row in part])
    asked = answers.proximal if objective.proximal == "behaviour-version" else answers.behaviour
    worth = torch.tensor([answers.advantages[row] for row in part], dtype=torch.float64)
    texts, kl_to = [answers.texts[row] for row in part], answers.reference
    terms = terms_of(
        objective,
        current,
        behaviour,
        torch.cat([asked[row] for row in part]),
        sequences.spread(worth),
        sequences,
        reference=None if kl_to is None else torch.cat([logprobs_of(kl_to, text) for text in texts]),
        entropy=torch.cat([entropies_of(answers.logits, text) for text in texts]),
    )
    kept = sequences.tokens & (terms.masked == 0)
    each = coefficients(
        objective.aggregation,
        Sequences(sequences.cu, kept),
        prompt_tokens=torch.from_numpy(np.concatenate([of_prompts[row] for row in part])),
        longest=LONGEST,
        dtype=torch.float64,
    )
    loss = token_sum(each * terms.loss, kept)
    (found,) = torch.autograd.grad(loss, answers.logits)
    return found, units(
        objective.aggregation,
        kept.numpy(),
        np.repeat(np.arange(len(part)), lengths),
        np.repeat([answers.groups[row] for row in part], lengths),
    )
