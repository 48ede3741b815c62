"""What a request may ask of sampling, over a real vLLM: what is drawn, between which tokens, and with which log-probs;
where an answer ends; and what is known of it while it runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from asyncrl.collectors.engines.base import Completion, Request
from asyncrl.collectors.engines.vllm_base import VllmBase
from tests.engines.letters import spelt

from .conftest import START_S
from .models import TOLERANCE, VOCABULARY, logits_of, next_weights, request, staged

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(START_S + 120)]

PROMPT = (1, 2, 3, 4, 5)
STOPS = (2, 3, 5, 7, 11, 13, 17, 19)

SAMPLINGS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 5},
    "top_k 1": {"top_k": 1},
    "top_k of all": {"top_k": 500},
    "top_p": {"top_k": 30, "top_p": 0.8},
    "min_p": {"top_k": 30, "min_p": 0.1},
    "temperature and top_p": {"top_k": 30, "top_p": 0.9, "temperature": 0.7},
    "temperature and min_p": {"top_k": 30, "min_p": 0.05, "temperature": 1.3},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": STOPS},
    "min_tokens, greedily": {"min_tokens": 12, "stop_token_ids": STOPS, "temperature": 0.0},
    "min_tokens and top_k": {"min_tokens": 12, "stop_token_ids": STOPS, "top_k": 6, "top_p": 0.95},
    "nothing": {},
}


def kept_of(completion: Completion) -> NDArray[np.bool_]:
    """Which tokens each was drawn from, by its support: bool [T, vocabulary]."""
    kept = np.ones((len(completion.token_ids), VOCABULARY), dtype=bool)
    if (support := completion.support) is not None:
        assert len(support.counts) == len(kept)
        at = 0
        for row, count in zip(kept, support.counts.tolist(), strict=True):
            ids = support.ids[at : at + count]
            assert ids.tolist() == sorted(set(ids.tolist()))
            if count:
                row[:] = ids[0] < 0
                row[ids if ids[0] >= 0 else ~ids] = ids[0] >= 0
            at += count
    return kept


def restricted(logits: torch.Tensor, kept: NDArray[np.bool_], temperature: float) -> torch.Tensor:
    """Log-probs of all tokens among those that were kept."""
    return (logits / (temperature or 1.0)).masked_fill(~torch.from_numpy(kept), -torch.inf).log_softmax(-1)


def check_kept(asked: Request, logits: torch.Tensor, kept: NDArray[np.bool_]) -> None:
    """Each row of `kept` is what the definitions of top_k, top_p and min_p leave, up to rounding at their edges."""
    sampling = asked.sampling
    for place, (row, left) in enumerate(zip(logits.double(), torch.from_numpy(kept), strict=True)):
        allowed = torch.ones_like(left)
        if place < sampling.min_tokens:
            allowed[list(sampling.stop_token_ids)] = False
        assert not (left & ~allowed).any()
        if sampling.temperature == 0 or (sampling.top_k, sampling.top_p, sampling.min_p) == (-1, 1.0, 0.0):
            assert left.equal(allowed)
            continue
        mass = (row / sampling.temperature).masked_fill(~allowed, -torch.inf)
        mass = mass.masked_fill(mass < mass.topk(min(sampling.top_k, VOCABULARY)).values[-1], -torch.inf).softmax(-1)
        least, outside = mass[left].min(), mass[~left].max() if (~left).any() else torch.tensor(0.0)
        assert least > outside
        assert mass[left].sum() - least < sampling.top_p + 1e-5
        edge = sampling.min_p * mass.max()
        assert least >= edge - 1e-5
        if sampling.top_p < 1:
            assert mass[left].sum() > sampling.top_p - 1e-5
        else:
            assert outside <= max(edge, torch.tensor(0.0)) + 1e-5


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_logprobs_are_those_among_the_tokens_that_each_was_drawn_from(
    engine: VllmBase, model: PreTrainedModel, name: str
) -> None:
    # Among requests that ask for something else.
    others = [request(f"other{n}", PROMPT, seed=n, top_k=2 + n, max_tokens=30) for n in range(2)]
    asked = [request(f"r{n}", PROMPT[: 1 + n], seed=n, max_tokens=40, **SAMPLINGS[name]) for n in range(5)]
    answers = await asyncio.gather(*(engine.generate(r) for r in [*others, *asked]))
    errors, unrestricted = [], []
    for r, answer in zip(asked, answers[2:], strict=True):
        assert answer.error == ""
        logits, kept = logits_of(model, r.token_ids, answer), kept_of(answer)
        check_kept(r, logits, kept)
        drawn = answer.token_ids.astype(int)
        rows = np.arange(len(drawn))
        assert kept[rows, drawn].all()
        expected = restricted(logits, kept, r.sampling.temperature)[rows, drawn].numpy()
        np.testing.assert_allclose(answer.logprobs, expected, atol=TOLERANCE)
        plain = restricted(logits, np.ones_like(kept), r.sampling.temperature)[rows, drawn].numpy()
        errors.append(np.abs(answer.logprobs - expected).max())
        unrestricted.append(np.abs(answer.logprobs - plain).max())
        assert (answer.support is None) == (name == "nothing")
    if name not in ("nothing", "top_k of all"):  # negative control: of the whole vocabulary they would be others
        assert max(unrestricted) > 100 * TOLERANCE


async def test_tokens_are_drawn_as_often_as_their_logprobs_say(engine: VllmBase, model: PreTrainedModel) -> None:
    draws = 600
    asked = [request(f"r{n}", PROMPT, seed=n, max_tokens=1, top_k=5, temperature=1.5) for n in range(draws)]
    answers = await asyncio.gather(*(engine.generate(r) for r in asked))
    mass = restricted(logits_of(model, PROMPT, answers[0]), kept_of(answers[0]), 1.5)[0].exp().double().numpy()
    found = np.bincount([int(answer.token_ids[0]) for answer in answers], minlength=VOCABULARY)
    kept = mass > 0
    assert found[~kept].sum() == 0
    chi_square = ((found[kept] - draws * mass[kept]) ** 2 / (draws * mass[kept])).sum()
    assert chi_square < 30  # 4 degrees of freedom: beyond it once in 200,000 times; the seeds are fixed


async def test_an_answer_ends_with_the_token_that_completes_a_stop_string(
    engine: VllmBase, model: PreTrainedModel
) -> None:
    whole = await engine.generate(request("whole", seed=3, max_tokens=60))
    text = spelt(whole.token_ids.tolist())
    stop = text[29:32]
    end = text.index(stop) + 3
    answer = await engine.generate(request("a", seed=3, max_tokens=1500, stop=("ABCDEFGH", stop)))
    assert (answer.finish_reason, answer.stopped_by) == ("stop", stop)
    assert answer.token_ids.tolist() == whole.token_ids.tolist()[:end]
    np.testing.assert_allclose(answer.logprobs, whole.logprobs[:end], atol=TOLERANCE)
    assert [(span.start, span.end) for span in answer.spans] == [(0, end)]
    late = await engine.generate(request("b", seed=3, max_tokens=60, stop=(stop,), min_tokens=end))
    assert len(late.token_ids) > end
    assert engine.free_slots == engine.slots


async def test_a_stop_string_may_have_begun_before_the_answer_was_interrupted(engine: VllmBase) -> None:
    whole = await engine.generate(request("whole", max_tokens=30, temperature=0.0))
    text = spelt(whole.token_ids.tolist())
    end = text.index(text[9:12]) + 3
    begun = whole.token_ids.tolist()[: end - 1]
    rest = request("rest", (*PROMPT, *begun), max_tokens=30, temperature=0.0, stop=(text[end - 3 : end],))
    answer = await engine.generate(replace(rest, position=len(begun)))
    assert (answer.stopped_by, answer.token_ids.tolist()) == (text[end - 3 : end], [int(whole.token_ids[end - 1])])
    assert (await engine.generate(rest)).token_ids.tolist() != answer.token_ids.tolist()  # as a new answer it goes on


async def test_what_is_told_of_a_running_answer_is_the_beginning_of_what_comes_of_it(
    engine: VllmBase, model: PreTrainedModel, other: PreTrainedModel
) -> None:
    """Over activations too: what came before one was sampled by the weights before it."""
    asked = [request(f"r{n}", seed=n, max_tokens=500) for n in range(3)]
    tasks = [asyncio.create_task(engine.generate(r)) for r in asked]
    told: dict[str, list[Completion]] = {r.id: [] for r in asked}

    def hear(id: str) -> None:
        partial = engine.partial(id)
        if partial is not None:  # it has not ended meanwhile
            told[id].append(partial)

    await asyncio.sleep(0)  # they run
    for r in asked:
        empty = engine.partial(r.id)
        assert empty is not None
        assert len(empty.token_ids) == 0
        engine.listen(r.id, lambda id=r.id: hear(id))  # type: ignore[misc]
    assert engine.partial("unknown") is None
    for round in range(5):
        async with asyncio.timeout(60):
            while min(map(engine.progress, told)) < 40 * (round + 1):  # noqa: ASYNC110 - polled by contract
                await asyncio.sleep(0.002)
        await engine.stage(staged((other, model)[round % 2], next_weights(engine)))
        await engine.activate("keep")
    for r, answer in zip(asked, await asyncio.gather(*tasks), strict=True):
        assert len(answer.spans) == 6
        partials = told[r.id]
        assert len(partials) > 20
        for partial in partials:
            count = len(partial.token_ids)
            assert partial.finish_reason == "abort"
            assert partial.token_ids.tolist() == answer.token_ids[:count].tolist()
            assert partial.logprobs.tolist() == answer.logprobs[:count].tolist()
            assert partial.versions.tolist() == answer.versions[:count].tolist()
        assert engine.partial(r.id) is None
