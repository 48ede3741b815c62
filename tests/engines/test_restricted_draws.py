"""What may be drawn under top_k, top_p, min_p and barred tokens, against an enumeration that sorts; and that the
log-prob is that among the rest."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from asyncrl.collectors.engines.base import Sampling
from asyncrl.collectors.engines.sampling import draw, left_in, may_draw, support_of, uniforms
from asyncrl.schema.support import Support

KNOBS = {
    "top_k": Sampling(top_k=3),
    "top_p": Sampling(top_p=0.8),
    "min_p": Sampling(min_p=0.2),
    "top_k and top_p": Sampling(top_k=5, top_p=0.7),
    "top_k and min_p": Sampling(top_k=5, min_p=0.1),
    "top_p and min_p": Sampling(top_p=0.95, min_p=0.1),
    "all, warm": Sampling(top_k=6, top_p=0.9, min_p=0.05, temperature=1.7),
    "all, cold": Sampling(top_k=6, top_p=0.9, min_p=0.05, temperature=0.4),
}

logits = st.lists(st.floats(-8, 8, width=32) | st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=9)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.25, 1.0, 3.0]),
    top_k=st.sampled_from([-1, 1, 2, 5, 100]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


def enumerated(scores: list[float], sampling: Sampling, barred: Collection[int] = ()) -> list[int]:
    """The definition, token by token, from the likeliest on; ids ascending."""
    ranking = sorted((id for id in range(len(scores)) if id not in barred), key=lambda id: (-scores[id], id))
    if sampling.top_k != -1:
        ranking = ranking[: sampling.top_k]
    if not ranking:
        return []
    weights = [math.exp((scores[id] - scores[ranking[0]]) / sampling.temperature) for id in ranking]
    kept, mass = [], 0.0
    for id, weight in zip(ranking, weights, strict=True):
        if (sampling.top_p < 1 and mass >= sampling.top_p * sum(weights)) or weight < sampling.min_p:
            break
        kept.append(id)
        mass += weight
    return sorted(kept)


def restricted(scores: torch.Tensor, sampling: Sampling, barred: Collection[int] = ()) -> torch.Tensor:
    """Logits [n, vocabulary] as the engine draws from them, all rows under the same sampling."""
    rows = len(scores)
    kept = may_draw(scores, [sampling] * rows, [barred] * rows)
    return left_in(scores, torch.arange(rows), kept)


@given(st.lists(logits.filter(lambda row: len(row) == 5), min_size=1, max_size=4), st.data())
@settings(max_examples=150, deadline=None)
def test_what_may_be_drawn_is_what_the_definition_enumerates(rows: list[list[float]], data: st.DataObject) -> None:
    chosen = [data.draw(samplings) for _ in rows]
    barred = [data.draw(st.frozensets(st.integers(0, 4), max_size=4)) for _ in rows]
    kept = may_draw(torch.tensor(rows), chosen, barred)
    for row, scores in enumerate(rows):
        assert np.flatnonzero(kept[row]).tolist() == enumerated(scores, chosen[row], barred[row])
        alone = may_draw(torch.tensor([scores]), [chosen[row]], [barred[row]])
        assert alone[0].tolist() == kept[row].tolist(), "other rows decide over it"


@given(logits, samplings)
def test_one_at_least_may_be_drawn_and_top_k_bounds_them(scores: list[float], sampling: Sampling) -> None:
    count = int(may_draw(torch.tensor([scores]), [sampling], [()]).sum())
    assert 1 <= count <= (len(scores) if sampling.top_k == -1 else sampling.top_k)


def test_of_equal_logits_the_lower_ids_are_kept() -> None:
    kept = may_draw(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]), [Sampling(top_k=2)], [()])
    assert np.flatnonzero(kept[0]).tolist() == [1, 2]


def test_top_p_keeps_the_token_that_crosses_it_and_no_other() -> None:
    scores = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    kept = [int(may_draw(scores, [Sampling(top_p=p)], [()]).sum()) for p in (0.49, 0.51, 0.74, 0.76, 0.99, 1.0)]
    assert kept == [1, 2, 2, 3, 4, 4]


@pytest.mark.parametrize("knob", KNOBS)
def test_the_same_tokens_are_kept_as_by_transformers(knob: str) -> None:
    sampling, scores = KNOBS[knob], torch.randn(200, 30, generator=torch.Generator().manual_seed(3)) * 3
    warpers = LogitsProcessorList()
    if sampling.top_k != -1:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    theirs = warpers(torch.zeros(200, 1, dtype=torch.long), scores / sampling.temperature)
    kept = may_draw(scores, [sampling] * 200, [()] * 200)
    assert kept.tolist() == theirs.isfinite().tolist()
    ids, logprobs = draw(restricted(scores, sampling), [sampling.temperature] * 200, uniforms(1, 200).tolist())
    torch.testing.assert_close(logprobs, theirs.log_softmax(-1).gather(1, ids[:, None]).squeeze(1))


def chi_square(ids: torch.Tensor, probabilities: list[float]) -> float:
    """Pearson's statistic over its degrees of freedom; 1 is what is to be expected. Infinite if one was drawn that
    cannot be."""
    counts, p = np.bincount(ids.numpy(), minlength=len(probabilities)), np.array(probabilities)
    if counts[p == 0].any():
        return math.inf
    expected = len(ids) * p[p > 0]
    return float(((counts[p > 0] - expected) ** 2 / expected).sum() / max(1, len(expected) - 1))


@pytest.mark.parametrize("barred", [(), (0, 3)])
@pytest.mark.parametrize("knob", KNOBS)
def test_tokens_are_drawn_from_the_distribution_whose_logprob_is_reported(knob: str, barred: tuple[int, ...]) -> None:
    """Control: the same draws do not follow the distribution without the restriction, nor one not renormalised."""
    sampling, n = KNOBS[knob], 20_000
    scores = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0])
    rest = restricted(scores[None], sampling, barred).expand(n, -1)
    ids, logprobs = draw(rest, [sampling.temperature] * n, uniforms(11, n).tolist())
    kept = enumerated(scores.tolist(), sampling, barred)
    assert sorted(set(ids.tolist())) == kept, "each that may be drawn is, and no other"
    reported = [0.0] * len(scores)
    for id in kept:
        reported[id] = math.exp(float(logprobs[ids == id][0]))
    assert sum(reported) == pytest.approx(1, abs=1e-6)
    assert chi_square(ids, reported) < 5
    unrestricted = (scores / sampling.temperature).softmax(-1)
    assert chi_square(ids, unrestricted.tolist()) > 5
    assert sum(unrestricted[kept].tolist()) < 0.999, "renormalising changes nothing here: the control shows nothing"


def test_a_greedy_row_is_not_truncated_but_takes_no_barred_token() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0]])
    greedy = Sampling(temperature=0.0, top_k=1, top_p=0.5)
    kept = may_draw(scores, [greedy], [(0,)])
    assert kept.tolist() == [[False, True, True]]
    ids, logprobs = draw(left_in(scores, torch.tensor([0]), kept), [0.0], [0.9])
    assert ids.tolist() == [1]
    assert logprobs.item() == pytest.approx(-math.log(1 + math.exp(-1)))


def test_barring_an_id_that_the_model_has_not_is_no_restriction() -> None:
    assert bool(may_draw(torch.zeros(1, 3), [Sampling()], [(5, -1)]).all())


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=2), Sampling(top_p=0.9), Sampling(min_p=0.1)])
@pytest.mark.parametrize("row", [[math.nan] * 4, [0.0, math.nan, 1.0, 2.0], [-math.inf] * 4])
def test_logits_that_are_no_distribution_say_so_under_every_restriction(sampling: Sampling, row: list[float]) -> None:
    _, logprobs = draw(restricted(torch.tensor([row]), sampling, (3,)), [1.0], [0.5])
    assert math.isnan(logprobs.item())


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=5))
def test_a_support_says_which_tokens_may_be_drawn_in_the_shorter_way(rows: list[list[bool]]) -> None:
    draws = support_of(torch.tensor(rows))
    support = Support.of([ids.tolist() for ids in draws])
    for ids, kept in zip(draws, rows, strict=True):
        assert ids.tolist() == sorted(ids.tolist())
        assert len(ids) <= 3
        told = set(ids.tolist()) if (ids >= 0).all() else set(range(6)) - {~id for id in ids.tolist()}
        if any(kept):  # all or nothing left over are never drawn from
            assert (told or set(range(6))) == {id for id in range(6) if kept[id]}
    assert support.counts.tolist() == [len(ids) for ids in draws]
