"""From leased groups to packed tensors: what of a batch is trained, and in which portions it goes through the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.rewards.shaping import OUTCOME
from asyncrl.schema import Packed, Support
from asyncrl.staleness import Lineages, Weights, age


class BoundBroken(RuntimeError):
    """A token that this step may not train reached the learner. A fault of asyncrl or of its store, never of the data:
    the run ends rather than train it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one step, back to back; N tokens in `rows` sequences. An answer, which is a group's member, is one
    row or several, its segments; what is said of it is the same in each.

    trained: in the loss, i.e. sampled, in a scored row, not masked for its age, with a finite behaviour logprob. The
    first token of a sequence never is: nothing predicts it.
    """

    token_ids: Tensor  # int64 [N]
    trained: Tensor  # bool [N]
    behaviour: Tensor  # float32 [N], nats; 0 where not trained
    ages: Tensor  # int64 [N], in versions; -1 where not trained
    lengths: NDArray[np.int64]  # [rows]
    rewards: NDArray[np.float64]  # [rows]; NaN = unscored
    outcomes: NDArray[np.float64]  # [rows]: what success is measured by, the rewards without shaping; NaN = unscored
    groups: NDArray[np.int64]  # [rows], ascending, from 0
    answers: NDArray[np.int64]  # [rows], ascending, from 0
    truncated: NDArray[np.bool_]  # [rows]: of an answer that was cut at max_tokens
    support: Support | None  # of N draws: what each token was drawn between; None: all of the vocabulary
    nonfinite: int  # sampled tokens of scored rows left out for their behaviour logprob
    masked: dict[int, int]  # age in versions -> sampled tokens of scored rows left out for it

    @property
    def tokens(self) -> int:
        """Tokens in the loss."""
        return int(self.trained.sum())

    @property
    def cu_seqlens(self) -> Tensor:
        """int64 [rows + 1]: where each sequence begins, and the end."""
        return torch.from_numpy(np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64))

    def support_of(self, micro: Microbatch) -> Support | None:
        """Of the tokens of a micro-batch."""
        return None if self.support is None else self.support.take(micro.positions.numpy())

    def of_tokens(self, values: NDArray[Any]) -> NDArray[Any]:
        """[rows] -> [N]: each token has what its row has."""
        return np.repeat(values, self.lengths)

    @property
    def begins(self) -> NDArray[np.bool_]:
        """[rows]: the first of an answer. One row of each answer, where answers are counted."""
        return first_of_each(self.answers)

    @property
    def count(self) -> int:
        """Groups."""
        return int(self.groups[-1]) + 1 if len(self.groups) else 0

    @classmethod
    def empty(cls) -> Batch:
        """No groups: the share of a rank for which a short batch had none."""
        none = torch.empty(0, dtype=torch.int64)
        return cls(
            token_ids=none,
            trained=none.bool(),
            behaviour=none.float(),
            ages=none,
            lengths=np.empty(0, np.int64),
            rewards=np.empty(0, np.float64),
            outcomes=np.empty(0, np.float64),
            groups=np.empty(0, np.int64),
            answers=np.empty(0, np.int64),
            truncated=np.empty(0, np.bool_),
            support=None,
            nonfinite=0,
            masked={},
        )


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Some rows of a batch, packed again. `positions` [N']: where its tokens lie in the batch."""

    positions: Tensor  # int64 [N']
    cu_seqlens: Tensor  # int64 [rows' + 1]


def make_batch(packed: Packed, *, version: int, max_age: int, mask_older: bool = False) -> Batch:
    """What of `packed` the step that starts from `version` trains.

    mask_older: tokens beyond the bound are left out (the policy `mask`); otherwise there must be none. The group they
    belong to stays whole: what the others are compared with does not depend on when it is trained.

    Raises BoundBroken (see `check_ages`), ValueError for a row that is empty or whose first token counts as sampled.
    """
    lengths = np.diff(packed.cu_seqlens)
    if len(lengths) and lengths.min() < 1:
        raise ValueError(f"row {int(lengths.argmin())} of the batch has no tokens")
    sampled = packed.loss_mask != 0
    first = packed.cu_seqlens[:-1]
    if sampled[first].any():
        raise ValueError(
            f"row {int(sampled[first].argmax())} of the batch has no prompt: nothing predicts its first token"
        )
    scored = np.repeat(~np.isnan(packed.rewards), lengths)
    masked = sampled & beyond(packed.versions, version=version, max_age=max_age, mask_older=mask_older)
    check_ages(packed.versions[sampled & ~masked], version=version, max_age=max_age)
    wanted = sampled & scored & ~masked
    finite = np.isfinite(packed.logprobs)
    trained = wanted & finite
    return Batch(
        token_ids=torch.from_numpy(packed.token_ids.astype(np.int64)),
        trained=torch.from_numpy(trained),
        behaviour=torch.from_numpy(np.where(trained, packed.logprobs, np.float32(0))),
        ages=torch.from_numpy(np.where(trained, version - packed.versions.astype(np.int64), -1)),
        lengths=lengths,
        rewards=packed.rewards,
        outcomes=outcomes_of(packed),
        groups=packed.groups,
        answers=packed.answers,
        truncated=cut_answers(packed)[packed.answers],
        support=packed.support,
        nonfinite=int((wanted & ~finite).sum()),
        masked=tokens_by_age(packed.versions[masked & scored], version=version),
    )


def first_of_each(answers: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[rows]: whether a row is the first of its answer. answers [rows], ascending.

    >>> first_of_each(np.array([0, 0, 1])).tolist()
    [True, False, True]
    """
    begins: NDArray[np.bool_] = np.diff(answers, prepend=-1) != 0
    return begins


def cut_answers(packed: Packed) -> NDArray[np.bool_]:
    """[answers]: whether a row of it ends because max_tokens were reached."""
    cut = np.array([reason == "length" for reason in packed.table.column("finish_reason").to_pylist()], np.bool_)
    return np.bincount(packed.answers, weights=cut) > 0


def outcomes_of(packed: Packed) -> NDArray[np.float64]:
    """[rows]: rewards without shaping (`asyncrl/rewards/shaping.py`), which a row that has any keeps in its `info`."""
    told = (json.loads(info) if info != "{}" else {} for info in packed.table.column("info").to_pylist())
    return np.array([info.get(OUTCOME, reward) for info, reward in zip(told, packed.rewards, strict=True)], np.float64)


def beyond(versions: NDArray[np.int32], *, version: int, max_age: int, mask_older: bool) -> NDArray[np.bool_]:
    """Which tokens the policy `mask` leaves out of the step that starts from `version`; none without it.

    >>> beyond(np.array([2, 3], np.int32), version=5, max_age=2, mask_older=True).tolist()
    [True, False]
    """
    return versions < version - max_age if mask_older else np.zeros(len(versions), np.bool_)


def tokens_by_age(versions: NDArray[np.int32], *, version: int) -> dict[int, int]:
    """Age in versions -> tokens.

    >>> tokens_by_age(np.array([2, 4, 2], np.int32), version=5)
    {1: 1, 3: 2}
    """
    ages, tokens = np.unique(version - versions.astype(np.int64), return_counts=True)
    return dict(zip(ages.tolist(), tokens.tolist(), strict=True))


def check_ages(versions: NDArray[np.int32], *, version: int, max_age: int) -> None:
    """The learner's own check of the bound, whatever the buffer promised. versions [n]: of sampled tokens.

    >>> check_ages(np.array([4, 5], np.int32), version=5, max_age=1)
    """
    if not len(versions):
        return
    oldest, newest = int(versions.min()), int(versions.max())
    if age(version, oldest) > max_age or oldest < 0:
        raise BoundBroken(
            f"step {version} was given a token of version {oldest}: age {age(version, oldest)}, "
            f"max_trajectory_age is {max_age}"
        )
    if newest > version:
        raise BoundBroken(f"step {version} was given a token of version {newest}, which does not exist yet")


def check_once(ordinals: Sequence[int]) -> None:
    """A step trains a group once at most: a second use belongs to another step, where the ratio corrects for it."""
    if len(set(ordinals)) != len(ordinals):
        raise BoundBroken(f"a step was given a ticket twice: {sorted(ordinals)}")


def check_lineages(spans: Sequence[Weights], *, lineages: Lineages, current: int) -> None:
    """Every span's weights must lie on the path to the current lineage: a rewound branch's tokens are not trained."""
    for weights in spans:
        if not lineages.is_ancestor(weights, current):
            raise BoundBroken(
                f"lineage {current} was given tokens of weights ({weights.lineage}, {weights.version}), "
                "which were rewound and are no ancestor of it"
            )


def split_rows(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Rows in order, as many to a micro-batch as fit `budget` tokens. A row longer than that goes alone.

    In order and not best-fit: rows of a group stay together, and the same batch is always split in the same way.

    >>> split_rows([3, 4, 9, 1], budget=8)
    [[0, 1], [2], [3]]
    """
    portions: list[list[int]] = []
    room = 0
    for row, length in enumerate(lengths):
        if not portions or length > room:
            portions.append([])
            room = budget
        portions[-1].append(row)
        room -= length
    return portions


def microbatches(batch: Batch, among: NDArray[np.bool_], budget: int) -> list[Microbatch]:
    """Rows that have a trained token, split by `budget` tokens; together they hold every trained token once.

    among bool [rows]: which rows are asked for. The rows of a group are sorted by their tokens, so that neighbours have
    as much of their beginning in common as there is: what they share is computed once."""
    ends = np.cumsum(batch.lengths)
    tokens = [batch.token_ids.numpy()[end - n : end].tobytes() for n, end in zip(batch.lengths, ends, strict=True)]
    row_of = batch.of_tokens(np.arange(len(batch.lengths)))
    trained = np.bincount(row_of[batch.trained.numpy()], minlength=len(batch.lengths)) > 0
    rows = np.array(sorted(np.flatnonzero(trained & among), key=lambda row: (batch.groups[row], tokens[row])), np.int64)
    result = []
    for portion in split_rows(batch.lengths[rows].tolist(), budget):
        chosen = rows[portion]
        positions = np.concatenate([np.arange(ends[row] - batch.lengths[row], ends[row]) for row in chosen])
        lengths = np.concatenate([[0], np.cumsum(batch.lengths[chosen])])
        result.append(Microbatch(positions=torch.from_numpy(positions), cu_seqlens=torch.from_numpy(lengths)))
    return result


@dataclass(frozen=True, slots=True)
class Whole:
    """The answers that a micro-batch has rows of, with all of their rows, as an objective must look at them: M tokens.

    positions int64 [M]: where they lie in the batch. cu_seqlens int64 [answers + 1]: where each answer begins. places
    int64 [M]: where each token lies in the micro-batch, -1 for those in another one; None: it is the micro-batch.
    """

    positions: Tensor
    cu_seqlens: Tensor
    places: Tensor | None

    @property
    def own(self) -> Tensor | slice:
        """An index of those of the M that are in the micro-batch."""
        return slice(None) if self.places is None else self.places >= 0

    def of_all(self, values: Tensor, others: Tensor) -> Tensor:
        """[M]: `values` [N'] of the micro-batch's tokens, differentiable, and for the others what `others` [N] has."""
        if self.places is None:
            return values
        places = self.places.to(values.device)
        return torch.where(places < 0, others[self.positions].to(values), values[places.clamp(min=0)])


def whole_answers(batch: Batch, micro: Microbatch) -> Whole:
    """Of one of the batch's `microbatches`. It may have a part of an answer: segments need not fit into one."""
    if batch.begins.all():
        return Whole(micro.positions, micro.cu_seqlens, None)
    row_of = batch.of_tokens(np.arange(len(batch.lengths)))
    answers = np.unique(batch.answers[row_of[micro.positions[micro.cu_seqlens[:-1]].numpy()]])
    rows = np.isin(batch.answers, answers)
    if rows.sum() == len(answers):
        return Whole(micro.positions, micro.cu_seqlens, None)
    positions = torch.from_numpy(np.flatnonzero(rows[row_of]))
    places = torch.full((len(batch.token_ids),), -1)
    places[micro.positions] = torch.arange(len(micro.positions))
    tokens = np.bincount(batch.answers[rows], weights=batch.lengths[rows])[answers].astype(np.int64)
    return Whole(positions, torch.from_numpy(np.concatenate([[0], np.cumsum(tokens)])), places[positions])
