"""Batches of random tokens, for benchmarks of a step: what they say does not matter, how long they are does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from asyncrl.collectors.engines.simulated import relative_length
from asyncrl.learners.forward import token_logprobs
from asyncrl.schema import Group, Trajectory, VersionSpan, decode, encode
from asyncrl.staleness import Weights

INITIAL = Weights(1, 0)
APART = 0.2
"""Deviation of the behaviour's log-probs from the learner's, nats: ratios differ from 1, and some are clipped."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One member of a group. prompt, completion int32; logprobs float32, as long as the completion."""

    prompt: NDArray[np.int32]
    completion: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    reward: float


def answer_lengths(groups: int, size: int, *, mean: float, longest: int, cv: float) -> list[list[int]]:
    """Tokens of each answer of each group: log-normal, cut at `longest` as `max_tokens` does.

    >>> answer_lengths(1, 2, mean=48, longest=192, cv=0.0)
    [[48, 48]]
    """
    return [
        [min(longest, max(1, round(mean * relative_length(0, group, member, cv)))) for member in range(size)]
        for group in range(groups)
    ]


def draw(lengths: Sequence[Sequence[int]], *, prompt: int, vocabulary: int) -> list[list[Answer]]:
    """Answers of these lengths after prompts of `prompt` tokens, one for each group; rewards are normal, so that every
    group teaches. Log-probs are 0: see `sampled_by`."""
    generator = np.random.default_rng(0)
    groups = []
    for members in lengths:
        shared = generator.integers(0, vocabulary, prompt, dtype=np.int32)
        groups.append(
            [
                Answer(
                    prompt=shared,
                    completion=generator.integers(0, vocabulary, tokens, dtype=np.int32),
                    logprobs=np.zeros(tokens, np.float32),
                    reward=float(generator.standard_normal()),
                )
                for tokens in members
            ]
        )
    return groups


@torch.no_grad()
def sampled_by(model: PreTrainedModel, groups: Sequence[Sequence[Answer]]) -> list[list[Answer]]:
    """The same, with log-probs that are the model's but for APART."""
    generator = np.random.default_rng(1)
    device = next(model.parameters()).device
    found = []
    for members in groups:
        rows = [np.concatenate([answer.prompt, answer.completion]) for answer in members]
        ends = np.cumsum([0, *map(len, rows)])
        token_ids = torch.from_numpy(np.concatenate(rows).astype(np.int64)).to(device)
        logprobs = token_logprobs(model, token_ids, torch.from_numpy(ends)).cpu().numpy()
        found.append(
            [
                replace(
                    answer,
                    logprobs=np.minimum(
                        0.0,
                        logprobs[end - len(answer.completion) : end]
                        + APART * generator.standard_normal(len(answer.completion)),
                    ).astype(np.float32),
                )
                for answer, end in zip(members, ends[1:], strict=True)
            ]
        )
    return found


def as_collected(groups: Sequence[Sequence[Answer]], *, padded_to: int = 0) -> list[pa.RecordBatch]:
    """The groups as the learner leases them, sampled by the initial weights. padded_to: tokens of a completion that a
    shorter one is filled up to, by tokens that are not trained; 0: none."""
    return [
        decode(
            encode(
                Group(
                    ticket=ticket,
                    attempt=0,
                    lineage=INITIAL.lineage,
                    task="random",
                    row_id=str(ticket),
                    collector="c",
                    engine="e",
                    sampling={"temperature": 1.0},
                    issued=0.0,
                    put=0.0,
                    trajectories=[_row(member, answer, padded_to) for member, answer in enumerate(members)],
                )
            )
        )
        for ticket, members in enumerate(groups)
    ]


def _row(member: int, answer: Answer, padded_to: int) -> Trajectory:
    before, tokens = len(answer.prompt), len(answer.completion)
    after = max(0, padded_to - tokens)

    def beside(values: NDArray[Any], filling: int) -> NDArray[Any]:
        """Of the completion, with `filling` for prompt and padding."""
        return np.pad(values, (before, after), constant_values=filling)

    return Trajectory(
        token_ids=np.concatenate([answer.prompt, np.pad(answer.completion, (0, after))]),
        loss_mask=beside(np.ones(tokens, np.uint8), 0),
        logprobs=beside(answer.logprobs, 0),
        versions=beside(np.full(tokens, INITIAL.version, np.int32), -1),
        member=member,
        prompt_length=before,
        spans=(VersionSpan(INITIAL, before, before + tokens, f"{0:016x}"),),
        reward=answer.reward,
        reward_parts={"random": answer.reward},
        finish_reason="stop",
    )
