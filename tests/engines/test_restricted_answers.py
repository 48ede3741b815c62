"""Answers under every knob of sampling: log-probs against plain forwards between the tokens that could be drawn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.collectors.engines import decode
from asyncrl.collectors.engines.base import Completion, Request
from asyncrl.collectors.engines.decode import Decoder, Generation
from asyncrl.collectors.engines.parts import continued, joined
from asyncrl.collectors.engines.spans import Served
from asyncrl.schema.support import Support
from asyncrl.staleness import Weights

from .tiny_models import ARCHITECTURES, VOCABULARY, make_model, request

SERVED = Served(Weights(1, 0), "checksum")
KNOBS: dict[str, dict[str, object]] = {
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": tuple(range(0, 40, 2))},
    "all": {
        "temperature": 1.6,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "min_tokens": 6,
        "stop_token_ids": tuple(range(0, 40, 2)),
    },
}


@torch.inference_mode()
def run(decoder: Decoder, requests: list[Request]) -> dict[str, Completion]:
    done = decoder.join([Generation(r, budget=r.sampling.max_tokens) for r in requests], SERVED)
    while decoder.running:
        done += decoder.step(SERVED)
    return {g.request.id: g.completion() for g in done}


def masks(support: Support | None, tokens: int) -> torch.Tensor:
    """Which tokens each draw could take, bool [tokens, vocabulary]."""
    mask = torch.ones(tokens, VOCABULARY, dtype=torch.bool)
    if support is not None:
        ends = np.cumsum(support.counts)
        for row, ids in enumerate(np.split(support.ids, ends[:-1])):
            if len(ids) and ids[0] >= 0:
                mask[row] = False
                mask[row, ids] = True
            elif len(ids):
                mask[row, ~ids] = False
    return mask


@torch.inference_mode()
def expected(model: torch.nn.Module, r: Request, completion: Completion) -> torch.Tensor:
    """Log-probs of one plain forward, between the tokens that each draw is said to be of."""
    tokens = torch.tensor([[*r.token_ids, *completion.token_ids.tolist()]])
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(r.token_ids) - 1 : -1] / r.sampling.temperature
    logits = logits.masked_fill(~masks(completion.support, len(completion.token_ids)), -torch.inf)
    return logits.log_softmax(-1).gather(1, tokens[0, len(r.token_ids) :, None]).squeeze(1)


def crowd(**sampling: object) -> list[Request]:
    """Restricted requests among free ones, of several lengths."""
    free = [request(f"free{n}", range(n + 1), seed=n, max_tokens=5 + n) for n in range(3)]
    prompts = [(5,), (1, 2, 3), tuple(range(20, 32))]
    return [*free, *(request(f"r{n}", p, seed=n, max_tokens=10 + n, **sampling) for n, p in enumerate(prompts))]


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize("knob", KNOBS)
def test_logprobs_are_those_between_the_tokens_that_could_be_drawn(architecture: str, knob: str) -> None:
    model, requests = make_model(architecture), crowd(**KNOBS[knob])
    completions = run(Decoder(model, slots=6), requests)
    for r in requests:
        completion = completions[r.id]
        np.testing.assert_allclose(completion.logprobs, expected(model, r, completion), atol=2e-5)
        if r.id.startswith("free"):
            assert completion.support is None
        else:
            assert completion.support is not None
            assert len(completion.support.counts) == len(completion.token_ids)
            assert completion.support.counts.dtype == completion.support.ids.dtype == np.int32
        alone = run(Decoder(model, slots=1), [r])[r.id]
        assert alone.token_ids.tolist() == completion.token_ids.tolist()


def test_control_without_the_mask_the_logprobs_are_others() -> None:
    model, requests = make_model(), crowd(**KNOBS["all"])
    for r in requests[3:]:
        completion = run(Decoder(model, slots=1), [r])[r.id]
        blind = expected(model, r, replace(completion, support=None))
        assert float(np.abs(completion.logprobs - blind.numpy()).max()) > 1e-2


def test_control_logits_that_are_not_restricted_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine with its renormalisation removed: the first test must not pass over it."""
    monkeypatch.setattr(decode, "left_in", lambda logits, rows, kept: logits)
    with pytest.raises(AssertionError):
        test_logprobs_are_those_between_the_tokens_that_could_be_drawn("qwen3", "top_k")


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_no_end_comes_before_min_tokens_and_the_mask_says_so(temperature: float) -> None:
    """Control: the same request without min_tokens ends sooner."""
    model, stop = make_model(), tuple(range(2, VOCABULARY))
    hasty = request("a", stop_token_ids=stop, temperature=temperature)
    patient = replace(hasty, sampling=replace(hasty.sampling, min_tokens=5))
    assert len(run(Decoder(model, slots=1), [hasty])["a"].token_ids) < 5
    completion = run(Decoder(model, slots=1), [patient])["a"]
    assert (len(completion.token_ids) > 5, completion.finish_reason) == (True, "stop")
    assert set(completion.token_ids[:5].tolist()) <= {0, 1}
    assert completion.support is not None
    assert completion.support.counts.tolist() == [2] * 5 + [0] * (len(completion.token_ids) - 5)


def test_few_barred_tokens_are_stored_and_not_the_many_that_are_left() -> None:
    completion = run(Decoder(make_model(), slots=1), [request("a", stop_token_ids=(7, 9), min_tokens=2)])["a"]
    assert completion.support is not None
    assert completion.support.counts.tolist()[:3] == [2, 2, 0]
    assert completion.support.ids.tolist() == [~9, ~7] * 2


@pytest.mark.parametrize("knob", KNOBS)
def test_an_answer_in_two_parts_is_the_answer_in_one(knob: str) -> None:
    model = make_model()
    whole_request = request("a", seed=5, **{**KNOBS[knob], "max_tokens": 14})
    whole = run(Decoder(model, slots=1), [whole_request])["a"]
    for cut in range(1, len(whole.token_ids), 4):
        first = run(
            Decoder(model, slots=1), [replace(whole_request, sampling=replace(whole_request.sampling, max_tokens=cut))]
        )["a"]
        rest = run(Decoder(model, slots=1), [continued(whole_request, first)])["a"]
        both = joined([first, rest])
        assert both.token_ids.tolist() == whole.token_ids.tolist()
        np.testing.assert_allclose(both.logprobs, whole.logprobs, atol=2e-5)
        assert both.support is not None
        assert whole.support is not None
        assert both.support.counts.tolist() == whole.support.counts.tolist()
        assert both.support.ids.tolist() == whole.support.ids.tolist()


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_member_that_comes_later_shares_the_prompt_of_one_that_runs(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not prefilled, and samples what it samples alone. Under other weights it is prefilled."""
    model, prompt = make_model(architecture), tuple(range(3, 20))
    prefilled: list[int] = []
    prefill = Decoder._prefill

    def counted(self: Decoder, sequences: list[tuple[int, ...]]) -> object:
        prefilled.append(len(sequences))
        return prefill(self, sequences)

    monkeypatch.setattr(Decoder, "_prefill", counted)
    members = [replace(request(f"m{n}", prompt, seed=n), group="g") for n in range(5)]
    decoder, done = Decoder(model, slots=5), []
    other = Served(Weights(1, 1), "another")
    for step, served in enumerate([SERVED] * 3 + [other] * 2):
        done += decoder.join([Generation(members[step], budget=12)], served)
        done += decoder.step(served)
        assert len(prefilled) == (1 if served is SERVED else 2)
    while decoder.running:
        done += decoder.step(other)
    for generation in done:
        together, r = generation.completion(), generation.request
        alone = run(Decoder(model, slots=1), [r])[r.id]
        assert together.token_ids.tolist() == alone.token_ids.tolist()
        np.testing.assert_allclose(together.logprobs, alone.logprobs, atol=1e-5)
