"""Groups whose rewards are all equal: seen like all others, in the denominator, but never computed with a gradient."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.config.recipe import Learner, Objective
from asyncrl.learners.advantages import advantages
from asyncrl.learners.batch import Batch, make_batch
from asyncrl.learners.forward import token_logprobs
from asyncrl.learners.model import load_model
from asyncrl.learners.objectives.ppo_clip import ppo_clip
from asyncrl.learners.optimize import Optimizer
from asyncrl.learners.step import Seen, accumulate, train_step
from asyncrl.schema import pack, to_batch

FLAT = {"equal": [1.0, 1.0, 1.0], "equal zeros": [0.0, 0.0, 0.0], "alone": [0.0, math.nan, math.nan]}
OPTIONS = {"objective": Objective(preset="grpo"), "temperature": 0.9, "max_tokens": 10**6}


@pytest.fixture
def model(model_path: Path):
    return load_model(model_path, "float32", "auto")


@pytest.fixture
def batch_of(make_row, make_group):
    """A batch of groups with these rewards; lengths and log-probs differ from row to row."""

    def build(rewards: list[list[float]]) -> tuple[Batch, np.ndarray]:
        generator = np.random.default_rng(0)
        groups = []
        for ticket, members in enumerate(rewards):
            rows = []
            for member, reward in enumerate(members):
                n = int(generator.integers(1, 9))
                completion, logprobs = generator.integers(0, 24, n).tolist(), generator.normal(-3, 0.5, n).tolist()
                rows.append(make_row([1, 2, 3], completion, logprobs, reward=reward, member=member))
            groups.append(to_batch(make_group(rows, ticket=ticket)))
        batch = make_batch(pack(groups), version=1, max_age=1)
        return batch, advantages(batch.rewards, batch.groups, "group-mean-std").values

    return build


def everything_with_a_gradient(model, batch: Batch, worth: np.ndarray) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Gradients of the token losses' sum, and the log-probs: one graph of all rows, one row a sequence."""
    cu = torch.from_numpy(np.concatenate([[0], np.cumsum(batch.lengths)]))
    logprobs = token_logprobs(model, batch.token_ids, cu, temperature=0.9)
    per_token = torch.from_numpy(np.repeat(worth, batch.lengths).astype(np.float32))
    terms = ppo_clip(logprobs, batch.behaviour, per_token, epsilon=0.2, epsilon_high=0.28)
    gradients = torch.autograd.grad(terms.loss[batch.trained].sum(), list(model.parameters()))
    return list(gradients), logprobs.detach()


def passed(model, batch: Batch, worth: np.ndarray) -> tuple[Seen, dict[bool, int]]:
    """What `accumulate` saw, and the tokens that went through the model by whether a gradient was wanted."""
    tokens = {True: 0, False: 0}

    def count(_module, _args, kwargs) -> None:
        tokens[torch.is_grad_enabled()] += kwargs["input_ids"].numel()

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    model.zero_grad()
    seen = accumulate(model, batch, worth, **OPTIONS)
    hook.remove()
    return seen, tokens


@pytest.mark.parametrize("flat", FLAT.values(), ids=list(FLAT))
def test_their_gradient_is_left_out_and_the_steps_is_the_same(model, batch_of, flat: list[float]) -> None:
    batch, worth = batch_of([[0.0, 1.0, 0.5], flat, flat, [1.0, 0.0, 0.0]])
    wanted, logprobs = everything_with_a_gradient(model, batch, worth)
    seen, tokens = passed(model, batch, worth)
    assert tokens[False] > 0
    assert max(float(gradient.abs().max()) for gradient in wanted) > 1e-2
    for p, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, gradient, atol=1e-5, rtol=1e-5)
    trained = batch.trained.numpy()
    np.testing.assert_array_equal(seen.included, trained)
    np.testing.assert_allclose(seen.logprobs[trained], logprobs.numpy()[trained], atol=1e-5)
    ratio = np.exp(logprobs.numpy() - batch.behaviour.numpy())[trained]
    np.testing.assert_allclose(seen.ratio[trained], ratio, rtol=1e-4)


def test_a_group_that_teaches_is_computed_with_a_gradient(model, batch_of) -> None:
    """Control of the count: nothing goes through the model without one if every group teaches."""
    batch, worth = batch_of([[0.0, 1.0, 0.5], [1.0, 0.0, 0.0]])
    _, tokens = passed(model, batch, worth)
    assert tokens[False] == 0
    assert tokens[True] > 0


def test_a_step_of_nothing_else_is_an_update_by_zeros(model, batch_of) -> None:
    """Momentum of the step before moves the weights, as it does after any batch that says nothing new."""
    optimizer = Optimizer(model, Learner(learning_rate=1e-2))
    train_step(model, optimizer, *batch_of([[0.0, 1.0, 0.5]]), **OPTIONS)
    before = [p.detach().clone() for p in model.parameters()]
    result = train_step(model, optimizer, *batch_of([FLAT["equal"], FLAT["equal zeros"]]), **OPTIONS)
    assert (result.updates.skipped, result.updates.grad_norm, result.seen.loss) == ("", 0.0, 0.0)
    assert result.seen.tokens > 0
    assert (optimizer.updates, optimizer.steps) == (2, 2)
    assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_step_in_which_nothing_was_scored_is_still_skipped(model, batch_of) -> None:
    optimizer = Optimizer(model, Learner())
    result = train_step(model, optimizer, *batch_of([[math.nan, math.nan, math.nan]]), **OPTIONS)
    assert "no member of any group was scored" in result.updates.skipped
    assert optimizer.updates == 0
