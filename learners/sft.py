"""Supervised training on (prompt, answer) token ids: packed, loss on the answers only.

The loss of a step is the mean negative log-likelihood over all answer tokens of the step (their number, over all its
micro-batches, is the one denominator), so that the gradient does not depend on how the examples are packed.
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
    """One conversation to imitate. `answer` is what the loss is on; it includes the token that ends an answer."""

    prompt: Sequence[int]
    answer: Sequence[int]


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

    Raises ValueError for an example that is empty on either side (nothing would condition or be trained) or longer
    than `max_tokens`.
    """
    pending: list[Example] = []
    size = 0
    for index, example in enumerate(examples):
        length = len(example.prompt) + len(example.answer)
        if not example.prompt or not example.answer:
            raise ValueError(f"example {index} has an empty {'answer' if example.prompt else 'prompt'}; leave it out")
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
    lengths = torch.tensor([0] + [len(e.prompt) + len(e.answer) for e in examples])
    return Microbatch(
        token_ids=torch.tensor([token for e in examples for part in e for token in part]),
        cu_seqlens=lengths.cumsum(0),
        answer=torch.tensor([flag for e in examples for flag in [False] * len(e.prompt) + [True] * len(e.answer)]),
    )


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
    device = next(model.parameters()).device
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
        tokens = sum(len(example.answer) for example in chosen)
        loss = 0.0
        optimizer.zero_grad(set_to_none=True)
        for batch in pack_examples(chosen, config.max_tokens_per_microbatch):
            logprobs = token_logprobs(model, batch.token_ids.to(device), batch.cu_seqlens.to(device))
            part = -logprobs[batch.answer.to(device)].sum() / tokens
            part.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            loss += part.item()
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
