"""Log-probs by blocks of the vocabulary: those of log_softmax and gather, without its tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.learners import predictions
from asyncrl.learners.predictions import Predicted, predicted, predicted_plainly


def distribution(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """Logits / temperature."""
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def plain(*inputs: Any, **how: Any) -> torch.Tensor:
    """Log-probs of the chosen tokens."""
    return torch.log_softmax(distribution(*inputs[:3], **how), dim=-1)[inputs[3:]]


def chosen_logprobs(*inputs: Any, **how: Any) -> torch.Tensor:
    return predicted(*inputs, **how).logprobs


def spread_plain(*inputs: Any, **how: Any) -> Predicted:
    logs = torch.log_softmax(distribution(*inputs[:3], **how), dim=-1)
    p = logs.exp()
    entropy, collision = -(p * logs).sum(dim=-1), (p * p).sum(dim=-1)
    return Predicted(logs[inputs[3:]], entropy[inputs[3]], collision[inputs[3]])


def problem(
    dtype: torch.dtype, *, rows: int = 7, width: int = 5, vocabulary: int = 13, asked: int = 9, bias: bool = True
) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(rows + vocabulary)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    return (
        leaf(rows, width),
        leaf(vocabulary, width),
        leaf(vocabulary) if bias else None,
        torch.randint(0, rows, (asked,), generator=generator),
        torch.randint(0, vocabulary, (asked,), generator=generator),
    )


def differences(inputs: tuple[Any, ...], **how: Any) -> list[float]:
    """Largest of the values, and of the gradient to hidden states, weight and bias, of a sum with weights."""
    leaves = [leaf for leaf in inputs[:3] if leaf is not None]
    found, expected = chosen_logprobs(*inputs, **how), plain(*inputs, **how)
    weights = torch.linspace(-1, 1, len(found), dtype=found.dtype)
    mine, theirs = (torch.autograd.grad((values * weights).sum(), leaves) for values in (found, expected))
    pairs = [(found.detach(), expected.detach()), *zip(mine, theirs, strict=True)]
    return [float((a - b).abs().max()) if a.numel() else 0.0 for a, b in pairs]


@given(data=st.data())
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_values_and_gradients_are_those_of_log_softmax_however_the_vocabulary_is_cut(
    dtype: torch.dtype, bound: float, data: st.DataObject
) -> None:
    rows, vocabulary = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 20))
    inputs = problem(
        dtype, rows=rows, vocabulary=vocabulary, asked=data.draw(st.integers(0, 12)), bias=data.draw(st.booleans())
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictions, "BLOCK", data.draw(st.integers(1, rows * vocabulary + 1)))
        patch.setattr(predictions, "LOGITS", data.draw(st.integers(0, rows * vocabulary)))
        worst = differences(
            inputs,
            temperature=data.draw(st.sampled_from([1.0, 0.7])),
            softcap=data.draw(st.sampled_from([None, 1.5])),
        )
    assert max(worst) < bound, worst


def weighed(found: Predicted) -> torch.Tensor:
    """A sum in which each number of log-probs and entropies counts, differently."""
    assert found.entropy is not None
    weights = torch.linspace(-1, 1, len(found.logprobs), dtype=found.logprobs.dtype)
    return (weights * found.logprobs).sum() + (weights.flip(0) ** 2 * found.entropy).sum()


@given(data=st.data())
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_entropy_and_collision_are_those_of_the_distribution_and_their_gradients_too(
    dtype: torch.dtype, bound: float, data: st.DataObject
) -> None:
    """By blocks however the vocabulary is cut, and from all logits at once."""
    rows, vocabulary = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 20))
    inputs = problem(
        dtype, rows=rows, vocabulary=vocabulary, asked=data.draw(st.integers(0, 12)), bias=data.draw(st.booleans())
    )
    leaves = [leaf for leaf in inputs[:3] if leaf is not None]
    how: dict[str, Any] = {
        "temperature": data.draw(st.sampled_from([1.0, 0.7])),
        "softcap": data.draw(st.sampled_from([None, 1.5])),
    }
    expected = spread_plain(*inputs, **how)
    gradients = torch.autograd.grad(weighed(expected), leaves)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictions, "BLOCK", data.draw(st.integers(1, rows * vocabulary + 1)))
        patch.setattr(predictions, "LOGITS", data.draw(st.integers(0, rows * vocabulary)))
        for found in (
            predicted(*inputs, **how, spread=True),
            predicted_plainly(distribution(*inputs[:3], **how), *inputs[3:], spread=True),
        ):
            assert found.collision is not None
            assert not found.collision.requires_grad
            for mine, true in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, true, atol=bound, rtol=0)
            for mine, true in zip(torch.autograd.grad(weighed(found), leaves), gradients, strict=True):
                torch.testing.assert_close(mine, true, atol=bound, rtol=0)


@pytest.mark.parametrize(("kept", "softcap"), [(0, None), (15, None), (1 << 28, None), (0, 1.5)])
def test_gradients_of_entropy_are_those_of_finite_differences(
    monkeypatch: pytest.MonkeyPatch, kept: int, softcap: float | None
) -> None:
    """Alone and with the log-probs beside it."""
    monkeypatch.setattr(predictions, "LOGITS", kept)
    monkeypatch.setattr(predictions, "BLOCK", 12)
    hidden, weight, bias, rows, targets = problem(torch.float64, rows=4, width=3, vocabulary=8, asked=5)

    def both(*leaves: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return predicted(*leaves, rows, targets, temperature=0.7, softcap=softcap, spread=True)[:2]

    assert torch.autograd.gradcheck(lambda *leaves: both(*leaves)[1], (hidden, weight, bias), nondet_tol=1e-12)
    assert torch.autograd.gradcheck(both, (hidden, weight, bias), nondet_tol=1e-12)


def test_impossible_tokens_add_nothing_to_an_entropy() -> None:
    hidden, weight, bias, rows, targets = problem(torch.float32)
    inputs = (hidden, weight[2:4], bias[2:4], rows, targets % 2)
    expected, gradients = spread_plain(*inputs), torch.autograd.grad(weighed(spread_plain(*inputs)), [hidden, weight])
    with torch.no_grad():
        bias[:2], bias[4:] = -torch.inf, -torch.inf
    with pytest.MonkeyPatch.context() as patch:
        for block in (1, 1 << 22):
            patch.setattr(predictions, "BLOCK", block)
            for found in (
                predicted(hidden, weight, bias, rows, targets % 2 + 2, spread=True),
                predicted_plainly(distribution(hidden, weight, bias), rows, targets % 2 + 2, spread=True),
            ):
                for mine, true in zip(found, expected, strict=True):
                    torch.testing.assert_close(mine, true, atol=1e-5, rtol=0)
                for mine, true in zip(torch.autograd.grad(weighed(found), [hidden, weight]), gradients, strict=True):
                    torch.testing.assert_close(mine, true, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kept", [0, 1 << 28])
def test_who_only_looks_at_the_entropy_has_the_gradients_of_log_probs_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    monkeypatch.setattr(predictions, "LOGITS", kept)
    inputs = problem(torch.float32)
    with_spread = predicted(*inputs, spread=True)
    assert torch.equal(with_spread.logprobs, chosen_logprobs(*inputs))
    for mine, true in zip(
        torch.autograd.grad(with_spread.logprobs.sum(), inputs[:3]),
        torch.autograd.grad(chosen_logprobs(*inputs).sum(), inputs[:3]),
        strict=True,
    ):
        assert torch.equal(mine, true)


def test_the_norm_of_a_tokens_gradient_at_the_logits_follows_from_its_collision() -> None:
    hidden, weight, bias, rows, targets = problem(torch.float64)
    logits = distribution(hidden, weight, bias).detach().requires_grad_()
    found = predicted(hidden, weight, bias, rows, targets, spread=True)
    for p in range(len(rows)):
        (gradient,) = torch.autograd.grad(torch.log_softmax(logits, dim=-1)[rows[p], targets[p]], logits)
        assert found.collision is not None
        expected = 1 - 2 * found.logprobs[p].exp() + found.collision[p]
        torch.testing.assert_close(gradient.square().sum(), expected)


@pytest.mark.parametrize("kept", [0, 40, 1 << 28])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradients_are_those_of_finite_differences(
    monkeypatch: pytest.MonkeyPatch, kept: int, softcap: float | None
) -> None:
    monkeypatch.setattr(predictions, "LOGITS", kept)
    monkeypatch.setattr(predictions, "BLOCK", 30)
    hidden, weight, bias, rows, targets = problem(torch.float64)

    def logprobs(*leaves: torch.Tensor) -> torch.Tensor:
        return chosen_logprobs(*leaves, rows, targets, temperature=0.7, softcap=softcap)

    # Kept or computed again, rounding is not the same.
    assert torch.autograd.gradcheck(logprobs, (hidden, weight, bias), nondet_tol=1e-12)


def test_a_second_backward_pass_computes_again_what_the_first_has_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "LOGITS", 50)
    monkeypatch.setattr(predictions, "BLOCK", 20)
    hidden, weight, bias, rows, targets = problem(torch.float32)
    total = chosen_logprobs(hidden, weight, bias, rows, targets).sum()
    once, twice = (torch.autograd.grad(total, [hidden, weight], retain_graph=True) for _ in range(2))
    for a, b in zip(once, twice, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_there_is_never_a_tensor_of_tokens_times_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "LOGITS", 0)
    monkeypatch.setattr(predictions, "BLOCK", 700)
    inputs = problem(torch.float32, rows=60, width=4, vocabulary=200, asked=60, bias=False)
    found = {}
    for logprobs in (chosen_logprobs, plain):
        with Largest() as largest:
            logprobs(*inputs).sum().backward()
        found[logprobs] = largest.elements
    assert found[chosen_logprobs] <= 200 * 4  # the weight's gradient
    assert found[plain] == 60 * 200  # control: the tensor is seen where it is


def test_no_more_logits_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "BLOCK", 70)  # ten columns, and three in the last block
    inputs = problem(torch.float32)
    for room, kept in ((0, 0), (69, 0), (70, 70), (1000, 91)):
        monkeypatch.setattr(predictions, "LOGITS", room)
        node: Any = chosen_logprobs(*inputs).grad_fn
        assert sum(weights.numel() for weights, _ in node.kept) == kept
    logits = predictions._Blocks.logits
    made: list[bool] = []

    def spy(blocks: Any, start: int, end: int, *, new: bool = False) -> torch.Tensor:
        made.append(new)
        return logits(blocks, start, end, new=new)

    monkeypatch.setattr(predictions._Blocks, "logits", spy)
    with torch.no_grad():
        chosen_logprobs(*inputs)
    assert made == [False, False]  # nothing is kept for a backward pass that will not be


def test_a_broken_row_breaks_no_other_and_impossible_tokens_are_only_impossible() -> None:
    hidden, weight, bias, rows, targets = problem(torch.float32)
    expected = chosen_logprobs(hidden, weight, bias, rows, targets)
    with torch.no_grad():
        hidden[rows[0]] = torch.nan
    found = chosen_logprobs(hidden, weight, bias, rows, targets)
    assert found[rows == rows[0]].isnan().all()
    torch.testing.assert_close(found[rows != rows[0]], expected[rows != rows[0]])

    hidden, weight, bias, rows, targets = problem(torch.float32)
    with torch.no_grad():
        bias[:-1] = -torch.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictions, "BLOCK", 1)  # so that whole blocks are -inf
        found = chosen_logprobs(hidden, weight, bias, rows, targets)
    assert torch.equal(found, torch.where(targets == 12, 0.0, -torch.inf))
