"""What a group costs, against what is really computed, and what dealing by it is worth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.config.objective import Objective
from asyncrl.learners.batch import Batch, make_batch
from asyncrl.learners.forward import pack_attention
from asyncrl.learners.model import load_model
from asyncrl.learners.shares import balance
from asyncrl.learners.step import accumulate, taught
from asyncrl.learners.workload import Costs, costs_of, group_work, imbalance
from asyncrl.schema import pack, to_batch

EVERY = Costs(token=1, prediction=0, pair=0)


def batch_of(rows: list[list[int]], groups: list[int], prompt: int) -> Batch:
    """Sequences whose first `prompt` tokens are not trained."""
    lengths = np.array([len(row) for row in rows], np.int64)
    trained = np.concatenate([np.arange(n) >= prompt for n in lengths])
    none = np.zeros(len(rows))
    return replace(
        Batch.empty(),
        token_ids=torch.tensor([token for row in rows for token in row]),
        trained=torch.from_numpy(trained),
        behaviour=torch.full((len(trained),), -3.0),
        ages=torch.zeros(len(trained), dtype=torch.int64),
        lengths=lengths,
        rewards=none,
        outcomes=none,
        groups=np.array(groups, np.int64),
        answers=np.arange(len(rows)),
        truncated=none > 0,
    )


def lognormal(generator: np.random.Generator, groups: int, members: int, mean: float) -> Batch:
    """A prompt of 200 tokens each, and answers whose lengths have as much spread as mean."""
    rows, of = [], []
    for group in range(groups):
        prompt = generator.integers(0, 9000, 200).tolist()
        sigma = np.sqrt(np.log(2.0))
        for length in generator.lognormal(np.log(mean) - sigma**2 / 2, sigma, members):
            rows.append([*prompt, *generator.integers(0, 9000, 1 + int(length)).tolist()])
            of.append(group)
    return batch_of(rows, of, 200)


def test_work_by_hand() -> None:
    """Two answers of a group share their prompt and one token; those of another group share nothing."""
    batch = batch_of([[1, 2, 3, 4], [1, 2, 3, 5, 6], [7, 8], [9, 8]], [0, 0, 1, 1], prompt=2)
    flat = np.zeros(4, np.bool_)
    assert group_work(batch, EVERY, flat) == [6, 0], "no token of it is trained"
    assert group_work(batch, Costs(token=0, prediction=1, pair=0), flat) == [5, 0]
    assert group_work(batch, Costs(token=0, prediction=0, pair=1), flat) == [4 + 3 + 2 + 1 + 4 + 5, 0]
    assert group_work(batch, Costs(token=1, prediction=0, pair=0, shares=False), flat) == [9, 0]
    assert group_work(batch, Costs(token=0, prediction=0, pair=1, shares=False), flat) == [10 + 15, 0]
    # A gradient is twice as much again.
    assert group_work(batch, EVERY, np.array([True, True, False, False])) == [18, 0], (
        "a gradient is twice as much again"
    )
    again = batch_of([[1, 2, 3]] * 2 + [[1, 2, 4]] * 2, [0, 0, 1, 1], prompt=1)
    assert group_work(again, EVERY, flat) == [3, 3], "another group may be on another rank"


def test_the_operations_of_a_pass_are_those_that_are_counted() -> None:
    """torch counts what a group's pass really computes, but for attention, whose kernel on a CPU it does not know."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2304,  # of fewer logits all are computed, asked for or not
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config)
    model.compute_dtype = torch.float32
    assert pack_attention(model) is None
    costs = costs_of(model)
    assert costs.pair == 4 * 6 * 64
    generator = np.random.default_rng(1)
    prompt = generator.integers(0, 512, 150).tolist()
    rows = [[*prompt, *generator.integers(0, 512, 90).tolist()] for _ in range(4)]
    batch = batch_of(rows, [0] * 4, prompt=150)
    options = {"objective": Objective(preset="grpo"), "temperature": 1.0, "max_tokens": 10_000}
    for worth in (np.zeros(4), np.ones(4)):
        learning = taught(batch, worth, Objective(preset="grpo"))
        with FlopCounterMode(display=False) as counter:
            accumulate(model, batch, worth, **options)
        (planned,) = group_work(batch, costs._replace(pair=0), learning)
        assert planned == pytest.approx(counter.get_total_flops(), rel=0.05)
        (unshared,) = group_work(batch, costs._replace(pair=0, shares=False), learning)
        assert unshared > 1.5 * planned, "control: this can tell what is shared"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 10**15), max_size=40), st.integers(1, 9))
def test_no_rank_has_more_than_the_mean_and_one_group(work: list[int], ranks: int) -> None:
    shares = balance(work, ranks)
    most = max(sum(work[group] for group in share) for share in shares)
    assert most * ranks <= sum(work) + (ranks - 1) * max(work, default=0)
    assert 1.0 <= imbalance(work, shares) <= ranks * (1 + 1e-12)


def test_dealing_by_work_is_more_even_than_by_tokens() -> None:
    """Answers of log-normal lengths, at Qwen2.5-7B's costs, on eight ranks; a third of the groups has nothing to learn
    from. The control is what was dealt by tokens before."""
    costs = Costs(token=2 * 6_525_288_448, prediction=2 * 3584 * 152_064, pair=4 * 28 * 28 * 128)
    by_work, by_tokens = [], []
    for seed in range(3):
        generator = np.random.default_rng(seed)
        batch = lognormal(generator, groups=64, members=8, mean=1500)
        teaches = np.repeat(generator.random(64) > 1 / 3, 8)
        work = group_work(batch, costs, teaches)
        tokens = np.bincount(batch.groups, weights=batch.lengths).astype(int).tolist()
        by_work.append(imbalance(work, balance(work, 8)))
        by_tokens.append(imbalance(work, balance(tokens, 8)))
    assert max(by_work) < 1.02
    assert min(by_tokens) > 1.05
    assert np.mean(by_tokens) > 1.1


def test_groups_of_equal_rewards_cost_a_third(model_path: Path, make_row: Any, make_group: Any) -> None:
    rows = [[make_row([1, 2], [3, 4], [-1.0] * 2, reward=float(n * flat), member=n) for n in (0, 1)] for flat in (0, 1)]
    batch = make_batch(pack([to_batch(make_group(r, ticket=n)) for n, r in enumerate(rows)]), version=1, max_age=1)
    learning = taught(batch, np.array([0.0, 0.0, -1.0, 1.0]), Objective(preset="grpo"))
    assert learning.tolist() == [False, False, True, True]
    cheap, dear = group_work(batch, costs_of(load_model(model_path, "float32", "auto")), learning)
    assert dear == 3 * cheap > 0
    assert taught(batch, np.zeros(4), Objective(preset="grpo", entropy=0.1)).all(), "a bonus teaches them too"


@pytest.mark.parametrize("groups", [0, 1])
def test_a_short_batch_has_work_too(groups: int) -> None:
    batch = batch_of([[1, 2, 3]] * groups, [0] * groups, prompt=1) if groups else Batch.empty()
    assert group_work(batch, EVERY, np.zeros(groups, np.bool_)) == [3] * groups
