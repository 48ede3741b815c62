"""The gradient of a step, by the learner and by the formula, and the same answers recorded in other ways."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config.objective import Objective
from asyncrl.config.recipe import Recipe
from asyncrl.learners import shares
from asyncrl.learners.advantages import scaled
from asyncrl.learners.batch import Batch
from asyncrl.learners.step import accumulate
from asyncrl.schema import Group, Support, Trajectory, VersionSpan, to_batch
from asyncrl.schema.packed import support_of
from asyncrl.staleness import Weights

LONGEST = 8

CLOSE = {"atol": 1e-5, "rtol": 1e-4}
"""Of gradients in float32 whose largest elements are about 1."""


def prepared(objective: Objective, groups: list[Any]) -> tuple[Batch, NDArray[np.float64]]:
    """The batch, and the advantages of its rows."""
    batch, worth = shares.share_of(groups, version=1, recipe=Recipe(objective=objective))
    return batch, scaled(batch.rewards, batch.answers, worth, objective.advantage, total=list)


def portion(model: Any, objective: Objective, own: tuple[Batch, NDArray[np.float64]], max_tokens: int) -> Any:
    """The sum of the gradients that a rank adds up, and what it divides by."""
    model.zero_grad()
    seen = accumulate(model, *own, objective=objective, temperature=1.0, max_tokens=max_tokens, longest=LONGEST)
    return gradient_of(model), seen.units


def gradient_of(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def gradient(model: Any, objective: Objective, groups: list[Any], max_tokens: int = 10**6) -> Tensor:
    found, units = portion(model, objective, prepared(objective, groups), max_tokens)
    return found / units


def padded(model: Any, oracle: ModuleType, objective: Objective, groups: list[Any]) -> Tensor:
    """The same from the formula: sequences padded to one length, log-softmax of all logits, answer by answer."""
    batch, worth = prepared(objective, groups)
    ends = np.cumsum(batch.lengths)
    ids = torch.zeros(len(ends), int(batch.lengths.max()), dtype=torch.int64)
    there = torch.zeros_like(ids)
    for row, (n, end) in enumerate(zip(batch.lengths, ends, strict=True)):
        ids[row, :n], there[row, :n] = batch.token_ids[end - n : end], 1
    logits = oracle_model(model)(input_ids=ids, attention_mask=there).logits
    if batch.support is not None:
        logits = logits + barred(batch, logits.shape)
    logprobs = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    flat = torch.cat(
        [torch.cat([logprobs.new_zeros(1), logprobs[row, : n - 1]]) for row, n in enumerate(batch.lengths)]
    )

    rows = [row for row in range(len(ends)) if batch.trained[ends[row] - batch.lengths[row] : ends[row]].any()]
    prompt = 3
    texts = [range(int(ends[row] - batch.lengths[row]) + prompt, int(ends[row])) for row in rows]
    leaf = flat.detach().requires_grad_()
    behaviour = [batch.behaviour[text.start : text.stop] for text in texts]
    answers = SimpleNamespace(
        logits=leaf,
        texts=texts,
        behaviour=behaviour,
        proximal=behaviour,
        ages=[batch.ages[text.start : text.stop].tolist() for text in texts],
        advantages=[float(np.float32(worth[row])) for row in rows],
        groups=[int(batch.groups[row]) for row in rows],
    )
    slopes = oracle.enumerated(objective, answers, LONGEST, lambda values, text: values[text.start : text.stop])
    model.zero_grad()
    flat.backward(slopes)
    return gradient_of(model)


def barred(batch: Batch, shape: torch.Size) -> Tensor:
    """[rows, tokens, vocabulary]: -inf at what the next token could not have been, else 0."""
    assert batch.support is not None
    found = torch.zeros(shape)
    ends, starts = np.cumsum(batch.support.counts), np.cumsum(batch.lengths) - batch.lengths
    for token in np.flatnonzero(batch.support.counts):
        row = int(np.searchsorted(starts, token, side="right")) - 1
        ids = batch.support.ids[ends[token] - batch.support.counts[token] : ends[token]]
        of = found[row, token - starts[row] - 1]
        if ids[0] >= 0:
            of[~torch.isin(torch.arange(len(of)), torch.from_numpy(ids))] = -torch.inf
        else:
            of[torch.from_numpy(~ids)] = -torch.inf
    return found


def oracle_model(model: Any) -> Any:
    """The same weights, computed as transformers does without packing."""
    plain = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="eager")
    for name, p in model.named_parameters():
        owner, _, last = name.rpartition(".")
        setattr(plain.get_submodule(owner), last, p)
    plain.tie_weights()
    return plain


def in_segments(group: Any) -> Any:
    """Each answer of two tokens and more cut in the middle."""

    def middle(row: dict[str, Any]) -> int:
        return int(row["prompt_length"] + (len(row["token_ids"]) - row["prompt_length"]) // 2)

    return rewritten(group, cut=middle, restricted=False)


def restricted(group: Any) -> Any:
    """The same answers, each token but a few drawn between some of the vocabulary."""
    return rewritten(group, cut=lambda row: row["prompt_length"], restricted=True)


def rewritten(group: Any, *, cut: Callable[[dict[str, Any]], int], restricted: bool) -> Any:
    """Each answer in two rows from where it is cut, if that is inside of it."""
    generator = np.random.default_rng(group.column("ticket")[0].as_py())

    def mask_of(token: int) -> list[int]:
        others = set(generator.integers(0, 24, 6).tolist()) - {token}
        return [[], sorted(others | {token}), sorted(~id for id in others)][generator.integers(0, 3)]

    rows = []
    for row in group.to_pylist():
        length, prompt = len(row["token_ids"]), row["prompt_length"]
        middle = cut(row)
        cuts = [(prompt, middle), (middle, length)] if middle > prompt else [(prompt, length)]
        had = support_of(group)
        masks = [mask_of(id) if restricted and at >= prompt else [] for at, id in enumerate(row["token_ids"])]
        if had is not None:
            ends = np.cumsum(row["support_counts"])
            masks = [row["support_ids"][end - n : end] for n, end in zip(row["support_counts"], ends, strict=True)]
        for segment, (start, end) in enumerate(cuts):
            sampled = np.arange(end) >= start
            span = row["spans"][0]
            rows.append(
                Trajectory(
                    token_ids=np.array(row["token_ids"][:end], np.int32),
                    loss_mask=sampled.astype(np.uint8),
                    logprobs=np.where(sampled, np.array(row["logprobs"][:end], np.float32), np.float32(0)),
                    versions=np.where(sampled, np.array(row["versions"][:end], np.int32), np.int32(-1)),
                    member=row["member"],
                    segment=segment,
                    prompt_length=start,
                    spans=(VersionSpan(Weights(span["lineage"], span["version"]), start, end, span["checksum"]),),
                    reward=row["reward"],
                    reward_parts=dict(row["reward_parts"]),
                    finish_reason=row["finish_reason"],
                    support=Support.of([mask if at >= start else [] for at, mask in enumerate(masks[:end])]),
                )
            )
    first = group.slice(0, 1).to_pylist()[0]
    names = ("ticket", "attempt", "lineage", "task", "row_id", "collector", "engine", "issued", "put")
    return to_batch(Group(**{name: first[name] for name in names}, sampling={}, trajectories=rows))
