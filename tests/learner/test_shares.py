"""How a step is split among ranks, and put together again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.objective import Objective
from asyncrl.config.recipe import Recipe
from asyncrl.learners.advantages import advantages
from asyncrl.learners.batch import make_batch
from asyncrl.learners.model import load_model
from asyncrl.learners.shares import as_message, balance, combine, positions_of, share_of
from asyncrl.learners.step import accumulate
from asyncrl.schema import pack, to_batch

LOADS = st.lists(st.integers(0, 10_000), max_size=40)


@given(LOADS, st.integers(1, 9))
def test_every_group_is_in_one_share_and_shares_differ_by_the_largest_group_at_most(
    loads: list[int], ranks: int
) -> None:
    shares = balance(loads, ranks)
    assert len(shares) == ranks
    assert sorted(group for share in shares for group in share) == list(range(len(loads)))
    assert all(share == sorted(share) for share in shares)
    carried = [sum(loads[group] for group in share) for share in shares]
    assert max(carried) - min(carried) <= max(loads, default=0)


@given(LOADS, st.integers(1, 9))
def test_with_as_many_groups_as_ranks_none_is_idle(loads: list[int], ranks: int) -> None:
    shares = balance([1 + load for load in loads], ranks)
    assert sum(not share for share in shares) == max(0, ranks - len(loads))


@pytest.fixture(scope="module")
def groups(make_row, make_group) -> list:
    """Five groups of three rows whose lengths differ; one row is unscored."""
    generator = np.random.default_rng(0)
    result = []
    for ticket in range(5):
        rows = []
        for member in range(3):
            n = int(generator.integers(1, 9))
            reward = float("nan") if (ticket, member) == (2, 1) else float(generator.integers(0, 3))
            completion, logprobs = generator.integers(0, 24, n).tolist(), generator.normal(-3, 0.5, n).tolist()
            rows.append(make_row([1, 2, 3], completion, logprobs, reward=reward, member=member))
        result.append(to_batch(make_group(rows, ticket=ticket)))
    return result


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_what_the_shares_saw_is_what_the_whole_batch_saw(groups: list, model_path: Path, ranks: int) -> None:
    recipe = Recipe(objective=Objective(preset="grpo"))
    batch = make_batch(pack(groups), version=1, max_age=1)
    worth = advantages(batch.rewards, batch.groups, recipe.objective.advantage).values
    model = load_model(model_path, "float32", "auto")
    options = {"objective": recipe.objective, "temperature": 1.0, "max_tokens": 30}
    whole = accumulate(model, batch, worth, **options)

    shares = balance(np.bincount(batch.groups, weights=batch.lengths).astype(int).tolist(), ranks)
    parts, found_worth = [], np.zeros_like(worth)
    for share in shares:
        own, own_worth = share_of([groups[n] for n in share], version=1, recipe=recipe)
        found_worth[np.isin(batch.groups, share)] = own_worth
        parts.append((as_message(seen := accumulate(model, own, own_worth, **options)), seen.loss_sum))
    found = combine(
        [part for part, _ in parts],
        [positions_of(batch, share) for share in shares],
        batch,
        loss_sum=sum(loss for _, loss in parts),
        units=whole.units,
    )
    np.testing.assert_array_equal(found_worth, worth)
    np.testing.assert_array_equal(found.included, whole.included)
    np.testing.assert_array_equal(found.clipped, whole.clipped)
    torch.testing.assert_close(torch.tensor(found.logprobs), torch.tensor(whole.logprobs), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.tensor(found.ratio), torch.tensor(whole.ratio), atol=1e-5, rtol=1e-5)
    assert (found.tokens, found.nonfinite) == (whole.tokens, whole.nonfinite)
    assert found.loss == pytest.approx(whole.loss, abs=1e-5)
