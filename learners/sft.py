"""Supervised training on token ids: packed, loss on the answers only.

The loss of a step is the mean negative log-likelihood over all answer tokens of the step (their number, over all its
micro-batches, is the one denominator), so that the gradient does not depend on how the examples are packed.

`train_supervised` is a whole training in memory, for what asyncrl makes itself; `sft_service.py` is the one that a
person starts, stops and resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from asyncrl.learners.forward import token_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Example(NamedTuple):
    """One conversation to imitate. `trained` (0 or 1 a token) is where the loss is: on answers, and on the tokens that
    end them."""

    token_ids: Sequence[int]
    trained: Sequence[int]

    @classmethod
    def of(cls, prompt: Sequence[int], answer: Sequence[int]) -> Example:
        """A prompt and its answer, the token that ends it included."""
        return cls([*prompt, *answer], [0] * len(prompt) + [1] * len(answer))


@dataclass(frozen=True, slots=True)
class SftConfig:
    """How to train. Optimizer: AdamW (Loshchilov & Hutter 2019), constant learning rate after a linear warm-up."""

    max_steps: int
    learning_rate: float
    examples_per_step: int = 64
    max_tokens_per_microbatch: int = 4096  # sequences are packed, never padded, up to so many tokens
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class SftStep:
    """What one step did. `step` counts from 1; `loss` in nats per answer token; `grad_norm` before clipping."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int  # answer tokens trained


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Sequences back to back. token_ids int64 [N]; cu_seqlens int64 [rows + 1]; answer bool [N]: trained."""

    token_ids: Tensor
    cu_seqlens: Tensor
    answer: Tensor


def pack_examples(examples: Iterable[Example], max_tokens: int) -> Iterator[Microbatch]:
    """Greedy packing in the given order: as many whole examples as fit into `max_tokens`.

    Raises ValueError for an example with a trained first token (nothing conditions it), with nothing to train, or
    longer than `max_tokens`.
    """
    pending: list[Example] = []
    size = 0
    for index, example in enumerate(examples):
        length = len(example.token_ids)
        if not any(example.trained) or example.trained[0]:
            raise ValueError(
                f"example {index} has an empty {'prompt' if any(example.trained) else 'answer'}; leave it out"
            )
        if length > max_tokens:
            raise ValueError(
                f"example {index} has {length} tokens, max_tokens_per_microbatch is {max_tokens}: raise it"
            )
        if size + length > max_tokens:
            yield _pack(pending)
            pending, size = [], 0
        pending.append(example)
        size += length
    if pending:
        yield _pack(pending)


def _pack(examples: Sequence[Example]) -> Microbatch:
    return Microbatch(
        token_ids=torch.tensor([token for e in examples for token in e.token_ids]),
        cu_seqlens=torch.tensor([0] + [len(e.token_ids) for e in examples]).cumsum(0),
        answer=torch.tensor([flag for e in examples for flag in e.trained], dtype=torch.bool),
    )


def accumulate(
    model: PreTrainedModel, examples: Iterable[Example], *, max_tokens: int, denominator: float = 1.0
) -> float:
    """Sum of the answers' negative log-likelihoods (nats) / `denominator`; its gradient is added to the parameters'
    where gradients are enabled."""
    total = 0.0
    for batch in pack_examples(examples, max_tokens):
        logprobs = token_logprobs(model, batch.token_ids.to(model.device), batch.cu_seqlens, asked=batch.answer)
        part = -logprobs.sum() / denominator  # all that is not asked for is 0
        if torch.is_grad_enabled():
            part.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        total += part.item()
    return total


def answer_tokens(examples: Iterable[Example]) -> int:
    """How many tokens the loss is on."""
    return sum(sum(example.trained) for example in examples)


def train_supervised(
    model: PreTrainedModel,
    examples: Iterator[Example],
    config: SftConfig,
    *,
    after_step: Callable[[SftStep], bool] | None = None,
) -> SftStep:
    """Train `model` in place with a fresh optimizer and return the last step.

    Each step takes the next `examples_per_step` from `examples`. Ends after `max_steps`, when `examples` runs out (a
    smaller last step is trained too), or when `after_step` returns True. `model` as `load_model` gives it: packed where
    it can be, and in the mode (dropout or not) that it shall have. Raises ValueError if there is no example at all;
    FloatingPointError on a non-finite loss or gradient, before it is applied.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
    )
    report: SftStep | None = None
    for step in range(1, config.max_steps + 1):
        chosen = list(islice(examples, config.examples_per_step))
        if not chosen:
            break
        learning_rate = config.learning_rate * min(1.0, step / max(1, config.warmup_steps))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        tokens = answer_tokens(chosen)
        optimizer.zero_grad(set_to_none=True)
        loss = accumulate(model, chosen, max_tokens=config.max_tokens_per_microbatch, denominator=tokens)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm))
        if not torch.tensor([loss, grad_norm]).isfinite().all():
            raise FloatingPointError(
                f"step {step}: loss {loss}, gradient norm {grad_norm}: lower the learning rate "
                f"({config.learning_rate}) or look for broken examples"
            )
        optimizer.step()
        report = SftStep(step=step, loss=loss, grad_norm=grad_norm, learning_rate=learning_rate, tokens=tokens)
        if after_step is not None and after_step(report):
            break
    if report is None:
        raise ValueError("there is no example to train on: the data is empty")
    return report
