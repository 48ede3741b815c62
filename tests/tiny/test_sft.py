from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel, Qwen3ForCausalLM

from asyncrl.learners.forward import pack_attention
from asyncrl.learners.sft import Example, SftConfig, SftStep, pack_examples, train_supervised
from asyncrl.learners.tiny import tiny_config
from asyncrl.learners.tiny_tokenizer import build_tokenizer

tokens = st.lists(st.integers(0, 263), min_size=1, max_size=9)


def new_model(*, packed: bool = True) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = Qwen3ForCausalLM(tiny_config(build_tokenizer(512))).eval()
    if packed:
        assert pack_attention(model) is None
    return model


def examples(count: int, seed: int = 0) -> list[Example]:
    rng = random.Random(seed)

    def some(most: int) -> list[int]:
        return [rng.randrange(264) for _ in range(rng.randint(1, most))]

    return [Example.of(some(12), some(7)) for _ in range(count)]


def one_step(model: PreTrainedModel, data: list[Example], **changes: int) -> SftStep:
    config = SftConfig(max_steps=1, learning_rate=1e-2, examples_per_step=len(data), **changes)
    return train_supervised(model, iter(data), config)


@given(st.lists(st.builds(Example.of, tokens, tokens), max_size=30), st.integers(18, 60))
def test_packing_keeps_every_token_in_order_and_within_the_budget(data: list[Example], budget: int) -> None:
    batches = list(pack_examples(data, budget))
    rows = []
    for batch in batches:
        assert batch.token_ids.numel() <= budget
        for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False):
            rows.append(Example(batch.token_ids[start:end].tolist(), batch.answer[start:end].int().tolist()))
    assert rows == data


def test_a_step_does_not_depend_on_how_its_examples_are_packed() -> None:
    data = examples(24)
    whole, small = new_model(), new_model()
    first = one_step(whole, data, max_tokens_per_microbatch=4096)
    second = one_step(small, data, max_tokens_per_microbatch=20)
    assert second.loss == pytest.approx(first.loss, rel=1e-5)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-4)


def test_loss_and_gradient_are_those_of_the_mean_over_answer_tokens_alone() -> None:
    data = examples(6)
    model, reference = new_model(), new_model(packed=False)
    report = one_step(model, data)
    nll, count = torch.zeros(()), 0
    for token_ids, trained in data:  # one sequence at a time, with transformers' own labels
        ids = torch.tensor([token_ids])
        labels = ids.where(torch.tensor([trained]).bool(), -100)
        nll = nll + reference(input_ids=ids, labels=labels).loss * sum(trained)
        count += sum(trained)
    (nll / count).backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None]).norm()
    assert report.tokens == count
    assert report.loss == pytest.approx((nll / count).item(), rel=1e-5)
    assert report.grad_norm == pytest.approx(norm.item(), rel=1e-4)


def test_it_learns_what_it_is_shown() -> None:
    data = examples(4)
    losses: list[float] = []
    config = SftConfig(max_steps=60, learning_rate=3e-3, examples_per_step=4, warmup_steps=5)

    def forever() -> Iterator[Example]:
        while True:
            yield from data

    train_supervised(new_model(), forever(), config, after_step=lambda step: losses.append(step.loss) or False)
    assert losses[0] > 4
    assert losses[-1] < 0.1


def test_the_learning_rate_warms_up_linearly_and_the_callback_ends_the_training() -> None:
    seen: list[SftStep] = []

    def third(step: SftStep) -> bool:
        seen.append(step)
        return step.step == 6

    config = SftConfig(max_steps=100, learning_rate=4e-3, examples_per_step=2, warmup_steps=4)
    last = train_supervised(new_model(), iter(examples(100)), config, after_step=third)
    assert [step.learning_rate for step in seen] == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3, 4e-3, 4e-3])
    assert last == seen[-1]


def test_data_that_ends_is_trained_to_its_last_example() -> None:
    seen: list[SftStep] = []
    data = examples(5)
    config = SftConfig(max_steps=100, learning_rate=1e-3, examples_per_step=2)
    train_supervised(new_model(), iter(data), config, after_step=lambda step: seen.append(step) or False)
    assert sum(step.tokens for step in seen) == sum(sum(example.trained) for example in data)
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "no example"),
        ([Example.of([], [1])], "example 0 has an empty prompt"),
        ([Example.of([1], [2]), Example.of([1], [])], "example 1 has an empty answer"),
        ([Example.of([1] * 30, [2] * 3)], "example 0 has 33 tokens, max_tokens_per_microbatch is 32"),
    ],
)
def test_data_that_cannot_be_trained_is_refused_by_name(data: list[Example], message: str) -> None:
    config = SftConfig(max_steps=1, learning_rate=1e-3, max_tokens_per_microbatch=32)
    with pytest.raises(ValueError, match=message):
        train_supervised(new_model(), iter(data), config)


def test_a_non_finite_gradient_stops_before_it_is_applied() -> None:
    model = new_model()
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FloatingPointError, match="step 1: loss nan"):
        one_step(model, examples(4))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], equal_nan=True, rtol=0, atol=0)
