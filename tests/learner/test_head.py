"""Log-probs by blocks of the vocabulary: those of log_softmax and gather, without its tensors."""

from __future__ import annotations

import copy
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    Qwen3Config,
)

from asyncrl.learners import head as heads
from asyncrl.learners.forward import pack_attention, token_logprobs, token_predictions
from asyncrl.learners.head import (
    Head,
    Predicted,
    call_with_head,
    chosen_logprobs,
    find_head,
    head_for,
    predicted,
    predicted_plainly,
)
from asyncrl.learners.model import load_model
from asyncrl.learners.parallel import ALONE

SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8),
    "gemma2": Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0),
    "gpt2": GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=4, n_positions=64, initializer_range=0.3),
    "phi": PhiConfig(**SHAPE),  # its head has a bias
}
ROWS = [[1, 2, 3, 4], [1, 2, 3, 7, 8], [1, 2], [9, 9], [3]]
IDS = torch.tensor([token for row in ROWS for token in row])
CU_SEQLENS = torch.tensor([0] + [len(row) for row in ROWS]).cumsum(0)


def build(config: Any, attn: str | None = None) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attn).eval()


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
        patch.setattr(heads, "BLOCK", data.draw(st.integers(1, rows * vocabulary + 1)))
        patch.setattr(heads, "LOGITS", data.draw(st.integers(0, rows * vocabulary)))
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
        patch.setattr(heads, "BLOCK", data.draw(st.integers(1, rows * vocabulary + 1)))
        patch.setattr(heads, "LOGITS", data.draw(st.integers(0, rows * vocabulary)))
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


@pytest.mark.parametrize("kept", [0, 40, 1 << 28])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradients_of_entropy_are_those_of_finite_differences(
    monkeypatch: pytest.MonkeyPatch, kept: int, softcap: float | None
) -> None:
    """Alone and with the log-probs beside it."""
    monkeypatch.setattr(heads, "LOGITS", kept)
    monkeypatch.setattr(heads, "BLOCK", 30)
    hidden, weight, bias, rows, targets = problem(torch.float64)

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
            patch.setattr(heads, "BLOCK", block)
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
    monkeypatch.setattr(heads, "LOGITS", kept)
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
    monkeypatch.setattr(heads, "LOGITS", kept)
    monkeypatch.setattr(heads, "BLOCK", 30)
    hidden, weight, bias, rows, targets = problem(torch.float64)

    def logprobs(*leaves: torch.Tensor) -> torch.Tensor:
        return chosen_logprobs(*leaves, rows, targets, temperature=0.7, softcap=softcap)

    # Kept or computed again, rounding is not the same.
    assert torch.autograd.gradcheck(logprobs, (hidden, weight, bias), nondet_tol=1e-12)


def test_a_second_backward_pass_computes_again_what_the_first_has_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "LOGITS", 50)
    monkeypatch.setattr(heads, "BLOCK", 20)
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
    monkeypatch.setattr(heads, "LOGITS", 0)
    monkeypatch.setattr(heads, "BLOCK", 700)
    inputs = problem(torch.float32, rows=60, width=4, vocabulary=200, asked=60, bias=False)
    found = {}
    for logprobs in (chosen_logprobs, plain):
        with Largest() as largest:
            logprobs(*inputs).sum().backward()
        found[logprobs] = largest.elements
    assert found[chosen_logprobs] <= 200 * 4  # the weight's gradient
    assert found[plain] == 60 * 200  # control: the tensor is seen where it is


def test_no_more_logits_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "BLOCK", 70)  # ten columns, and three in the last block
    inputs = problem(torch.float32)
    for room, kept in ((0, 0), (69, 0), (70, 70), (1000, 91)):
        monkeypatch.setattr(heads, "LOGITS", room)
        node: Any = chosen_logprobs(*inputs).grad_fn
        assert sum(weights.numel() for weights, _ in node.kept) == kept
    logits = heads._Blocks.logits
    made: list[bool] = []

    def spy(blocks: Any, start: int, end: int, *, new: bool = False) -> torch.Tensor:
        made.append(new)
        return logits(blocks, start, end, new=new)

    monkeypatch.setattr(heads._Blocks, "logits", spy)
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
        patch.setattr(heads, "BLOCK", 1)  # so that whole blocks are -inf
        found = chosen_logprobs(hidden, weight, bias, rows, targets)
    assert torch.equal(found, torch.where(targets == 12, 0.0, -torch.inf))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("share", [False, True])
def test_models_give_the_same_logprobs_and_gradients_by_blocks(
    monkeypatch: pytest.MonkeyPatch, name: str, share: bool
) -> None:
    model = build(CONFIGS[name])
    head = find_head(model)
    assert head == Head(softcap=2.0 if name == "gemma2" else None)
    for packed in (False, True):
        if packed:
            assert pack_attention(model) is None
        found = []
        for by_blocks in (False, True):
            model.logprob_head = head if by_blocks else None
            monkeypatch.setattr(heads, "LOGITS", 100)
            monkeypatch.setattr(heads, "BLOCK", 90)
            logprobs = token_logprobs(model, IDS, CU_SEQLENS, temperature=0.7, share_prefixes=share)
            total = (logprobs * torch.linspace(-1, 1, len(IDS))).sum()
            found.append([logprobs, *torch.autograd.grad(total, list(model.parameters()), allow_unused=True)])
        for expected, mine in zip(*found, strict=True):
            assert (expected is None) == (mine is None)
            if expected is not None:
                torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_models_give_the_same_entropy_by_blocks_packed_or_not(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The first token of a sequence, which nothing predicts, counts as certain."""
    model = build(CONFIGS[name])
    expected = [torch.log_softmax(model(torch.tensor([row])).logits[0] / 0.7, -1).exp() for row in ROWS]
    entropy = torch.cat([torch.cat([torch.zeros(1), torch.special.entr(p).sum(-1)[:-1]]) for p in expected])
    collision = torch.cat([torch.cat([torch.ones(1), (p * p).sum(-1)[:-1]]) for p in expected])
    monkeypatch.setattr(heads, "LOGITS", 100)
    monkeypatch.setattr(heads, "BLOCK", 90)
    head = find_head(model)
    for packed in (False, True):
        if packed:
            assert pack_attention(model) is None
        for model.logprob_head in (None, head):
            found = token_predictions(model, IDS, CU_SEQLENS, temperature=0.7, share_prefixes=True, spread=True)
            torch.testing.assert_close(found.entropy, entropy, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(found.collision, collision, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", [CohereConfig(**SHAPE, logit_scale=0.1), GraniteConfig(**SHAPE, logits_scaling=8.0)])
def test_a_model_that_does_more_with_its_logits_is_told_by_them(config: Any) -> None:
    reason = find_head(build(config))
    assert isinstance(reason, str)
    assert "log-probs differ by" in reason


def test_a_softcap_that_is_not_applied_would_be_told() -> None:
    """Negative control of the comparison that `find_head` makes."""
    model = build(CONFIGS["gemma2"])
    rows, targets, ids = torch.arange(4), torch.tensor([3, 1, 4, 1]), torch.tensor([[5, 9, 2, 6]])
    with torch.no_grad():
        right, wrong = (call_with_head(model, Head(cap), rows, targets, 1.0, input_ids=ids) for cap in (2.0, None))
    assert float((right.logprobs - wrong.logprobs).abs().max()) > 0.1


def test_the_model_is_its_own_again_afterwards_also_when_it_fails() -> None:
    model = build(CONFIGS["llama"])
    with pytest.raises(IndexError):
        call_with_head(model, Head(None), torch.arange(2), torch.arange(2), 1.0, input_ids=torch.tensor([[1, 99]]))
    assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, 50)


def test_in_bfloat16_logprobs_are_those_of_a_float32_head_and_equal_in_any_company(model_path: Path) -> None:
    model = load_model(model_path, "bfloat16", "eager")
    ids = torch.tensor([1, 5, 9, 3, 20, 11])
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            rounded = torch.log_softmax(model(input_ids=ids[None]).logits[0].float() / 0.7, dim=-1)
        exact = torch.log_softmax(hidden.double() @ model.lm_head.weight.double().T / 0.7, dim=-1)
        found = token_logprobs(model, ids, torch.tensor([0, 6]), temperature=0.7)
    expected = exact[:-1].gather(1, ids[1:, None])[:, 0].float()
    torch.testing.assert_close(found[1:], expected, atol=1e-5, rtol=0)
    # Control: the head in bfloat16, as the model itself has it, is told from it.
    assert float((rounded[:-1].gather(1, ids[1:, None])[:, 0] - expected).abs().max()) > 1e-3


def test_it_is_used_in_float32_only_where_logits_would_be_many(model_path: Path) -> None:
    model = load_model(model_path, "float32", "auto")
    head = model.logprob_head
    assert isinstance(head, Head)
    most = heads.LOGITS // 24
    assert head_for(model, torch.float32, tokens=4096) is None  # of a small vocabulary, whatever the micro-batch
    assert head_for(model, torch.float32, tokens=most) is None
    assert head_for(model, torch.float32, tokens=most + 1) is head
    assert head_for(model, torch.bfloat16, tokens=2) is head


@pytest.mark.timeout(200)
def test_two_ranks_that_share_a_heads_weights_have_the_gradients_of_one(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Path(__file__).with_name("sharded_head.py")
    shutil.copytree(model_path, tmp_path / "model")
    (tmp_path / "meeting").mkdir()
    processes = [subprocess.Popen([sys.executable, script, str(rank), "2", tmp_path]) for rank in range(2)]
    try:
        spec = importlib.util.spec_from_file_location("sharded_head", script)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        expected = module.gradients(ALONE, tmp_path)  # the plain way
        assert [process.wait(150) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    found = torch.load(tmp_path / "gradients.pt", weights_only=True)
    assert found.keys() == expected.keys()
    assert float(expected["model.embed_tokens.weight"].abs().max()) > 0.1  # tied: embedding and head in one
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-5)
