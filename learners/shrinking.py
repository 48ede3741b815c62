"""The token budget of a micro-batch, and what happens to it when one does not fit into memory: it is halved, once.

A gradient is the same whatever the budget (`step.py`). So the passes that did not fit are made again, from the
beginning and in micro-batches of half as many tokens, as are those of every step from then on, and the run goes on as
if it had had that budget from the start. What still does not fit ends the run.

Only a learner without a process group can go on like that. Of several ranks, the others wait in a gather of weights for
the one that failed, and what FSDP2 has begun cannot be taken back: that rank is lost, as if it had been killed, and the
learner is started again from its last checkpoint. The smaller budget is kept in the run folder, and the next start has
it.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrl.learners.batch import Batch, microbatches
from asyncrl.learners.lost import RankLost
from asyncrl.learners.parallel import ALONE, Ranks, Sharded
from asyncrl.learners.passes import portion
from asyncrl.telemetry.documents import write_document

log = logging.getLogger(__name__)

FILE = "microbatch.json"
KEY = "learner.max_tokens_per_microbatch"
ADVICE = f"Lower {KEY}, set learner.gradient_checkpointing: true, or train an adapter (model.lora)."

T = TypeVar("T")


class OutOfMemory(RuntimeError):
    """A micro-batch does not fit into memory and will not be made smaller; names the keys by which it fits."""


class Kept(msgspec.Struct, frozen=True):
    """FILE: the budget that a run has had since `configured`, the recipe's, did not fit."""

    configured: int
    tokens: int


@dataclass(slots=True)
class Budget:
    """Tokens of a micro-batch of one rank. configured: the recipe's; tokens: it, or half of it. folder: the run's, if
    what is learned is to outlast this process."""

    configured: int
    tokens: int
    folder: Path | None = None

    @classmethod
    def of(cls, configured: int, folder: Path | None = None) -> Budget:
        """As an earlier process of the run has left it, unless the recipe says another one now."""
        if folder is not None:
            with suppress(FileNotFoundError):
                kept = msgspec.json.decode((folder / FILE).read_bytes(), type=Kept)
                if kept.configured == configured:
                    return cls(configured, kept.tokens, folder)
        return cls(configured, configured, folder)

    def fitting(self, passes: Callable[..., T], model: PreTrainedModel, batch: Batch, ranks: Ranks) -> T:
        """See `fitted`."""
        try:
            return passes(max_tokens=self.tokens)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            said = str(error).strip().splitlines()[0]
        # Not in the clause above: the error holds the frames of the passes, and they hold what filled the memory.
        self._halve(said, model, batch, ranks)
        forget_gradients(model)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return self.fitting(passes, model, batch, ranks)

    def _halve(self, said: str, model: PreTrainedModel, batch: Batch, ranks: Ranks) -> None:
        before, after = self.tokens, self.tokens // 2
        tokens, smaller = (_largest(model, batch, budget) for budget in (before, after))
        failed = f"a micro-batch of up to {tokens} tokens does not fit into memory: {said}"
        if why := hopeless(self.configured, before, tokens, smaller):
            raise OutOfMemory(f"{failed}\n{why}.\n{ADVICE}")
        self.tokens = after
        if self.folder is not None:
            with suppress(FileNotFoundError):  # another rank has just written the same
                write_document(self.folder / FILE, {"configured": self.configured, "tokens": after})
        if isinstance(ranks, Sharded):
            raise RankLost(
                f"{failed}\nWhen the learner is started again {KEY} is {after}, not {before} ({FILE}). {ADVICE}"
            )
        log.warning("%s\n%s is %d for the rest of the run, not %d", failed, KEY, after, before)


def fitted(
    budget: Budget | int,
    passes: Callable[..., T],
    *,
    model: PreTrainedModel,
    batch: Batch,
    ranks: Ranks = ALONE,
) -> T:
    """What `passes` over rows of `batch` return, which are given their budget as `max_tokens`; with a `Budget` they are
    made once more if a micro-batch did not fit.

    passes: leave nothing behind but gradients of `model`, which has none before. Raises OutOfMemory, in a process group
    RankLost, and what they raise.
    """
    return passes(max_tokens=budget) if isinstance(budget, int) else budget.fitting(passes, model, batch, ranks)


def _largest(model: PreTrainedModel, batch: Batch, budget: int) -> int:
    """Tokens of the largest micro-batch there can be."""
    portions = microbatches(batch, np.ones(len(batch.lengths), np.bool_), portion(model, budget))
    return max((len(micro.positions) for micro in portions), default=0)


def hopeless(configured: int, budget: int, largest: int, smaller: int) -> str:
    """Why half of `budget` is not tried; "" if it is. largest, smaller: tokens of the largest micro-batch under it, and
    under half of it.

    >>> hopeless(4096, 4096, 4000, 2048)
    ''
    >>> hopeless(4096, 2048, 2000, 1024)
    'learner.max_tokens_per_microbatch is halved once, and was: 2048 instead of 4096'
    >>> hopeless(4096, 4096, 3000, 3000)
    'Half of learner.max_tokens_per_microbatch, 2048, would leave it as large: a row is never split'
    """
    if budget < configured:
        return f"{KEY} is halved once, and was: {budget} instead of {configured}"
    if smaller >= largest:
        return f"Half of {KEY}, {budget // 2}, would leave it as large: a row is never split"
    return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU torch has a class of errors, of the CPU only words."""
    words = ("DefaultCPUAllocator: can't allocate memory", "std::bad_alloc")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in words)


def forget_gradients(model: nn.Module) -> None:
    """As if no backward pass had been made."""
    for parameter in model.parameters():
        parameter.grad = None
