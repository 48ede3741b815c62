"""Log-probs of tokens that were drawn between some of the vocabulary: those of the distribution over these."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.collectors.engines.base import Sampling
from asyncrl.collectors.engines.sampling import draw, left_in, may_draw, support_of
from asyncrl.learners import predictions
from asyncrl.learners.attention import PACKED
from asyncrl.learners.forward import token_predictions
from asyncrl.learners.model import load_model
from asyncrl.learners.predictions import Predicted, predicted, predicted_plainly
from asyncrl.learners.restriction import Restriction
from asyncrl.schema import Support

VOCABULARY = 24


def restricted(logits: Tensor, targets: Tensor, support: Support) -> Predicted:
    """By a mask of the whole matrix. logits [P, vocabulary]: of each token's own row."""
    allowed = torch.ones_like(logits, dtype=torch.bool)
    ends = np.cumsum(support.counts)
    for p, (count, end) in enumerate(zip(support.counts.tolist(), ends.tolist(), strict=True)):
        ids = support.ids[end - count : end].tolist()
        if ids and ids[0] >= 0:
            allowed[p] = torch.isin(torch.arange(logits.shape[1]), torch.tensor(ids))
        else:
            allowed[p, [~id for id in ids]] = False
    logs = torch.log_softmax(logits.masked_fill(~allowed, -torch.inf), dim=-1)
    sound = logs.masked_fill(~allowed, 0.0)
    p = logs.exp()
    return Predicted(logs[torch.arange(len(targets)), targets], -(p * sound).sum(dim=-1), (p * p).sum(dim=-1))


@st.composite
def supports(draw: Any, targets: list[int], vocabulary: int) -> Support:
    """Each token free, kept with others, or the only one that others are barred beside."""
    draws = []
    for token in targets:
        others = draw(st.sets(st.integers(0, vocabulary - 1), max_size=vocabulary)) - {token}
        kind = draw(st.sampled_from(["free", "kept", "barred"]))
        kept = sorted(others | {token})
        draws.append({"free": [], "kept": kept, "barred": sorted(~id for id in others)}[kind])
    return Support.of(draws)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_values_and_gradients_are_those_of_the_masked_softmax_however_the_vocabulary_is_cut(
    dtype: torch.dtype, bound: float, data: st.DataObject
) -> None:
    """By blocks and from all logits at once; entropy and collision, too."""
    rows, vocabulary = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 16))
    asked = data.draw(st.lists(st.tuples(st.integers(0, rows - 1), st.integers(0, vocabulary - 1)), max_size=9))
    at, targets = (torch.tensor([pair[n] for pair in asked], dtype=torch.int64) for n in (0, 1))
    support = data.draw(supports(targets.tolist(), vocabulary))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    leaves = [
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
        for shape in ((rows, 4), (vocabulary, 4), (vocabulary,))
    ]
    temperature, softcap = data.draw(st.sampled_from([1.0, 0.7])), data.draw(st.sampled_from([None, 1.5]))

    def logits() -> Tensor:
        z = leaves[0] @ leaves[1].T + leaves[2]
        return z if softcap is None else softcap * torch.tanh(z / softcap)

    def with_gradients(found: Predicted) -> list[Tensor]:
        assert found.entropy is not None
        assert found.collision is not None
        weights = torch.linspace(-1, 1, len(targets), dtype=dtype)
        summed = (weights * found.logprobs).sum() + (weights.flip(0) ** 2 * found.entropy).sum()
        return [*(values.detach() for values in found), *torch.autograd.grad(summed, leaves)]

    expected = with_gradients(restricted(logits()[at] / temperature, targets, support))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictions, "BLOCK", data.draw(st.integers(1, rows * vocabulary + 1)))
        patch.setattr(predictions, "LOGITS", data.draw(st.integers(0, rows * vocabulary)))
        by_blocks = predicted(
            *leaves, at, targets, temperature=temperature, softcap=softcap, spread=True, support=support
        )
        at_once = predicted_plainly(logits(), at, targets, temperature=temperature, spread=True, support=support)
        for found in (by_blocks, at_once):
            for one, other in zip(with_gradients(found), expected, strict=True):
                torch.testing.assert_close(one, other, atol=bound, rtol=0)


def test_a_mask_of_another_model_is_refused() -> None:
    hidden, weight = torch.randn(1, 4), torch.randn(8, 4)
    for ids in ((3, 8), (~8,)):
        with pytest.raises(ValueError, match="has the token 8, the model has 8"):
            predicted(hidden, weight, None, torch.tensor([0]), torch.tensor([3]), support=Support.of([ids]))
        with pytest.raises(ValueError, match="has the token 8, the model has 8"):
            predicted_plainly(hidden @ weight.T, torch.tensor([0]), torch.tensor([3]), support=Support.of([ids]))


# --- what an engine reports -------------------------------------------------------------------------------------------

SAMPLINGS = {
    "top_k": Sampling(top_k=5),
    "top_p": Sampling(top_k=20, top_p=0.8, temperature=0.7),
    "min_p": Sampling(top_k=20, min_p=0.2),
    "min_tokens": Sampling(min_tokens=4, stop_token_ids=(0, 3)),
    "all": Sampling(top_k=9, top_p=0.9, min_p=0.02, temperature=1.3, min_tokens=3, stop_token_ids=(0, 3)),
}


@torch.no_grad()
def sampled(model: Any, prompt: list[int], sampling: Sampling, tokens: int, seed: int) -> Any:
    """Token ids after the prompt, their log-probs and supports, as an engine draws them."""
    generator = np.random.default_rng(seed)
    ids, logprobs, draws = list(prompt), [], []
    for position in range(tokens):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1]
        barred = sampling.stop_token_ids if position < sampling.min_tokens else ()
        kept = may_draw(logits, [sampling], [barred])
        draws.append(support_of(kept)[0])
        token, logprob = draw(left_in(logits, torch.tensor([0]), kept), [sampling.temperature], [generator.random()])
        ids.append(int(token))
        logprobs.append(float(logprob))
    return ids, logprobs, draws


@pytest.fixture(scope="module")
def plain_model(model_path: Any) -> Any:
    return load_model(model_path, "float32", "eager")


@pytest.mark.parametrize("packs", [True, False], ids=["packed", "one by one"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_learner_gives_what_the_sampler_reported(
    model_path: Any, plain_model: Any, name: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To float32 rounding, also where tokens after the same prefix were drawn between others, by the head's blocks and
    from all logits. Control: without the mask they are far apart."""
    model = load_model(model_path, "float32", "auto" if packs else "eager")
    assert (model.config._attn_implementation == PACKED) == packs
    sampling, prompt = SAMPLINGS[name], [5, 6, 7]
    rows = [sampled(plain_model, prompt, sampling, 6, seed) for seed in range(4)]
    free = Sampling(temperature=sampling.temperature)  # another mask after the same prefix: older weights, say
    rows += [sampled(plain_model, prompt, free, 6, seed) for seed in range(4)]
    support = Support.of([one for _, _, draws in rows for one in ([], [], [], *draws)])
    token_ids = torch.tensor([id for ids, _, _ in rows for id in ids])
    cu = torch.arange(len(rows) + 1) * 9
    expected = torch.tensor([value for _, logprobs, _ in rows for value in (0.0, 0.0, 0.0, *logprobs)])
    trained = (torch.arange(9) > 2).repeat(len(rows))
    options: dict[str, Any] = {"temperature": sampling.temperature, "share_prefixes": True}
    for room in (predictions.LOGITS, 0):
        monkeypatch.setattr(predictions, "LOGITS", room)
        with torch.no_grad():
            found = token_predictions(model, token_ids, cu, support=support, **options).logprobs
            without = token_predictions(model, token_ids, cu, **options).logprobs
        torch.testing.assert_close(found[trained], expected[trained], atol=2e-6, rtol=0)
        assert (without[trained] - expected[trained]).abs().max() > 0.01


# --- against all answers ----------------------------------------------------------------------------------------------


def of_answer(toy: ModuleType, logits: Tensor, masks: list[list[int]], answer: tuple[int, ...]) -> Tensor:
    """[len(answer)], by the implementation: logits [7, 3] are hidden states whose head is the identity."""
    rows = torch.tensor([toy.PREFIXES[answer[:t]] for t in range(len(answer))])
    support = Support.of([masks[row] for row in rows.tolist()])
    head = torch.eye(3, dtype=logits.dtype)
    return predicted(logits, head, None, rows, torch.tensor(answer), support=support).logprobs


def likeliest_two(logits: Tensor) -> list[list[int]]:
    """top_k 2 after every prefix."""
    return [sorted(row) for row in logits.topk(2).indices.tolist()]


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_answers_of_a_truncated_policy_give_the_gradient_of_its_reward_at_any_lag(toy: ModuleType, lag: int) -> None:
    """Over all answers that weights `lag` versions old may give with top_k 2: the expectation of the ratio of a whole
    answer times its reward times grad log pi is the gradient of the reward of pi among the same tokens. Control: with
    log-probs over the whole vocabulary it is another, and at lag 0 the ratio is not 1."""
    logits, old = toy.policy(3).requires_grad_(), toy.policy(3, lag)
    masks = likeliest_two(old)
    possible = [
        answer
        for answer in toy.ANSWERS
        if all(token in masks[toy.PREFIXES[answer[:t]]] for t, token in enumerate(answer))
    ]
    rewards = torch.linspace(-1, 1, len(possible), dtype=torch.float64)[
        torch.randperm(len(possible), generator=torch.Generator().manual_seed(5))
    ]
    mu = torch.stack([of_answer(toy, old, masks, answer).sum().exp() for answer in possible])
    assert mu.sum() == pytest.approx(1)

    def estimate(of: Any) -> Tensor:
        pi = torch.stack([of(answer).sum() for answer in possible])
        value = (mu * (pi.detach().exp() / mu) * rewards * pi).sum()
        (found,) = torch.autograd.grad(value, logits)
        return found

    def rows_of(answer: tuple[int, ...]) -> Tensor:
        """Written again: the softmax over two logits."""
        parts = []
        for t, token in enumerate(answer):
            row = toy.PREFIXES[answer[:t]]
            parts.append(logits[row, token] - torch.logsumexp(logits[row, masks[row]], 0))
        return torch.stack(parts)

    (truth,) = torch.autograd.grad((torch.stack([rows_of(a).sum().exp() for a in possible]) * rewards).sum(), logits)
    torch.testing.assert_close(
        estimate(lambda answer: of_answer(toy, logits, masks, answer)), truth, atol=1e-10, rtol=0
    )
    assert truth.abs().max() > 1e-3
    ignored = estimate(lambda answer: toy.logprobs_of(logits, answer))
    assert (ignored - truth).abs().max() > 1e-3
    if lag == 0:
        one = [float(of_answer(toy, old, masks, answer).sum() - mu[n].log()) for n, answer in enumerate(possible)]
        assert max(map(abs, one)) < 1e-12
        whole = [float(toy.logprobs_of(old, answer).sum() - mu[n].log()) for n, answer in enumerate(possible)]
        assert max(map(abs, whole)) > 0.1


def test_tokens_after_one_prefix_share_a_row_where_their_masks_are_the_same() -> None:
    """What was drawn in the same way costs no more of the head than one token."""
    masks = [[1, 2], [1, 2], [], [~0], [1, 2]]
    rows = torch.tensor([4, 4, 4, 4, 5])
    found = Restriction.of(rows, Support.of(masks), vocabulary=8)
    assert found.hidden.tolist() == [4, 4, 4, 5]
    assert found.rows.tolist() == [0, 0, 1, 2, 3]
    allowed = [[token for token in range(8) if row[token] == 0] for row in found.apply_(torch.zeros(4, 8))]
    assert allowed == [[1, 2], list(range(8)), list(range(1, 8)), [1, 2]]
    parts = [found.apply_(torch.zeros(4, 3), start)[:, : 8 - start] for start in (0, 3, 6)]
    assert torch.equal(torch.cat([parts[0], parts[1], parts[2]], 1), found.apply_(torch.zeros(4, 8)))
