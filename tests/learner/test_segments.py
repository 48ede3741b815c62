"""An answer in several segments is one answer wherever answers are counted."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.objective import AdvantageKind, Objective, TruncatedMask
from asyncrl.config.recipe import Recipe
from asyncrl.learners.advantages import compared, scaled
from asyncrl.learners.batch import Batch, make_batch, microbatches, whole_answers
from asyncrl.learners.diagnostics import group_metrics, length_metrics, reward_metrics
from asyncrl.learners.step import planned_units
from asyncrl.schema import Packed, pack, to_batch


@pytest.fixture(scope="module")
def packed(make_row: Any, make_group: Any) -> tuple[Packed, Packed]:
    """Two groups whose members have several rows, and the same members with their first rows alone."""
    rows = [
        make_row([1], [2, 3], [-1.0, -1.0], reward=1.0),
        make_row([1, 2, 3], [4], [-1.0], reward=1.0, finish="length"),
        make_row([1, 9], [4, 5, 6], [-1.0] * 3, reward=1.0),
        make_row([1], [2], [-1.0], reward=0.0, member=1),
        make_row([1], [2], [-1.0], reward=math.nan, member=2, failure="verifier_timeout"),
        make_row([1], [3], [-1.0], reward=math.nan, member=2, failure="verifier_timeout"),
        make_row([1], [7], [-1.0], reward=0.25, member=3),
    ]
    rows = [
        dataclasses.replace(row, segment=n, turn_offsets=(row.prompt_length,) * turns)
        for row, n, turns in zip(rows, (0, 1, 2, 0, 0, 1, 0), (2, 1, 1, 1, 1, 1, 1), strict=True)
    ]
    firsts = [row for row in rows if row.segment == 0]
    found = [pack([to_batch(make_group(part, ticket=n)) for n in range(2)]) for part in (rows, firsts)]
    return found[0], found[1]


@pytest.mark.parametrize("kind", get_args(AdvantageKind))
def test_every_row_has_the_advantage_of_its_member(packed: tuple[Packed, Packed], kind: Any) -> None:
    cut, whole = packed
    recipe = Recipe(objective=Objective(preset="grpo", advantage=kind))
    found, expected = compared(cut, recipe), compared(whole, recipe)
    assert (found.alone, found.unscored, found.equal) == (expected.alone, expected.unscored, expected.equal)
    values = scaled(cut.rewards, cut.answers, found.values, kind, total=list)
    members = scaled(whole.rewards, whole.answers, expected.values, kind, total=list)
    np.testing.assert_array_equal(values, members[cut.answers])
    assert np.abs(values).max() > 0.1


def test_metrics_are_over_members(packed: tuple[Packed, Packed]) -> None:
    cut, whole = packed
    assert reward_metrics(cut) == reward_metrics(whole)
    assert reward_metrics(cut)["failures"] == {"verifier_timeout": 2}
    lengths = length_metrics(cut)
    assert (lengths["length/mean"], lengths["length/max"], lengths["truncated"]) == (2.5, 6, 0.25)
    assert (lengths["turns/mean"], lengths["segments/mean"]) == (2.0, 1.75)
    assert (length_metrics(whole)["turns/mean"], length_metrics(whole)["segments/mean"]) == (1.25, 1.0)
    worth = compared(cut, Recipe(objective=Objective(preset="grpo")))
    batches = [make_batch(one, version=0, max_age=0) for one in packed]
    assert group_metrics(batches[0], worth) == group_metrics(batches[1], worth)


def test_an_answer_is_cut_if_a_segment_is_and_counts_once_in_the_denominator(packed: tuple[Packed, Packed]) -> None:
    cut = make_batch(packed[0], version=0, max_age=0)
    assert cut.truncated.tolist() == [True] * 3 + [False] * 4 + [True] * 3 + [False] * 4
    masks: Any = ([], [TruncatedMask()])
    aggregations: Any = ("token", "sequence", "constant", "prompt")
    units = {
        aggregation: [
            planned_units(cut, Objective(preset="grpo", mask=mask, aggregation=aggregation), [0]) for mask in masks
        ]
        for aggregation in aggregations
    }
    assert units == {"token": [8, 2], "sequence": [3, 2], "constant": [3, 2], "prompt": [1, 1]}


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=6), st.integers(1, 12))
def test_each_micro_batch_is_given_all_tokens_of_its_answers(answers: list[tuple[int, int]], budget: int) -> None:
    """Each of an answer's tokens in the order of the batch, and each token of the batch is one micro-batch's own."""
    lengths = np.concatenate([[tokens + 1] * rows for rows, tokens in answers])
    of = np.repeat(np.arange(len(answers)), [rows for rows, _ in answers])
    batch = dataclasses.replace(
        Batch.empty(), **_plain(lengths), lengths=lengths, answers=of, groups=of // 2, rewards=np.zeros(len(of))
    )
    seen = []
    for micro in microbatches(batch, np.ones(len(of), np.bool_), budget):
        whole = whole_answers(batch, micro)
        cuts = np.split(whole.positions.numpy(), whole.cu_seqlens[1:-1].numpy())
        answer = [np.unique(batch.of_tokens(of)[cut]) for cut in cuts]
        assert all(len(one) == 1 for one in answer)
        assert [len(cut) for cut in cuts] == [lengths[of == one[0]].sum() for one in answer]
        own = whole.positions[whole.own]
        assert sorted(own.tolist()) == sorted(micro.positions.tolist())
        if whole.places is not None:
            assert (micro.positions[whole.places[whole.own]] == own).all()
        seen += own.tolist()
    assert sorted(seen) == list(range(int(lengths.sum())))


def _plain(lengths: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Tokens of a batch, of which all are trained."""
    n = int(lengths.sum())
    return {"token_ids": torch.arange(n), "trained": torch.ones(n, dtype=torch.bool)}
