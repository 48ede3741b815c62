"""What attention computes of a pack: every pair of a query and a key that there must be, and few others."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.attention.bias import causal_lower_right
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.benchmarks.learner_flops import by_formula, counted, pairs_of
from asyncrl.learners import attention, forward, predictions
from asyncrl.learners.forward import pack_attention, token_logprobs
from asyncrl.learners.head import find_head
from asyncrl.learners.layout import CALL_ON_CPU, SHORT, Layout, shared_prefixes

CONFIG = LlamaConfig(
    vocab_size=50,
    hidden_size=96,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    pad_token_id=None,
)
NEAR = 1.03
"""Of the formula's operations, those that are counted: rows that share a call are as long as the longest."""


@pytest.fixture(autouse=True)
def no_logits_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the head has what is asked for, in a model of no size too."""
    monkeypatch.setattr(forward, "FEW", 0)


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(copy.deepcopy(CONFIG)).eval()


def log_normal(rows: int, mean: float) -> list[int]:
    """cv 1, from 1 token on."""
    generator, spread = np.random.default_rng(0), np.sqrt(np.log(2.0))
    drawn = mean * np.exp(spread * generator.standard_normal(rows) - spread**2 / 2)
    return np.clip(np.round(drawn), 1, 10 * mean).astype(int).tolist()


def pack(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([*chain(*rows)]), torch.tensor([0, *np.cumsum([len(row) for row in rows])])


def random_rows(lengths: list[int], *, prompt: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(1)
    beginning = generator.integers(0, 50, prompt).tolist()
    return [beginning + generator.integers(0, 50, length).tolist() for length in lengths]


def attended(lengths: list[int], rows: list[list[int]], *, share: bool) -> int:
    """What is counted in attention, forward: of the whole pass less what would be counted without any pair."""
    model = llama()
    assert pack_attention(model) is None
    ids, cu = pack(rows)
    places = shared_prefixes(ids, [len(row) for row in rows]) if share else torch.arange(len(ids))
    asked = torch.zeros(len(ids), dtype=torch.bool)
    asked[-1] = True
    with torch.no_grad():
        all_of_it = counted(lambda: token_logprobs(model, ids, cu, share_prefixes=share, asked=asked))
    return all_of_it - by_formula(CONFIG, computed=int(places.max()) + 1, pairs=0, predicted=1, backward=False)


def pairs_cost(pairs: int) -> int:
    return by_formula(CONFIG, computed=0, pairs=pairs, predicted=0, backward=False)


def test_attention_of_a_pack_costs_the_sum_of_squared_lengths() -> None:
    lengths = log_normal(40, 400.0)
    found = attended(lengths, random_rows(lengths), share=False) / pairs_cost(pairs_of(lengths))
    assert 1.0 <= found < NEAR


def test_control_as_one_sequence_and_padded_it_costs_more() -> None:
    lengths = log_normal(20, 400.0)
    model = llama()
    whole = counted(lambda: model(torch.zeros(1, sum(lengths), dtype=torch.int64), logits_to_keep=1))
    whole -= by_formula(CONFIG, computed=sum(lengths), pairs=0, predicted=1, backward=False)
    assert whole > 5 * NEAR * pairs_cost(pairs_of(lengths))
    padded = pairs_cost(len(lengths) * max(lengths) * (max(lengths) + 1) // 2)
    assert padded > 3 * NEAR * pairs_cost(pairs_of(lengths))


def test_of_members_of_a_group_each_costs_its_own_tokens_times_those_that_they_see() -> None:
    answers = log_normal(8, 100.0)
    rows = random_rows(answers, prompt=700)
    lengths, own = [700 + n for n in answers], [700 + answers[0], *answers[1:]]
    shared, apart = (attended(lengths, rows, share=share) for share in (True, False))
    # With a mask the kernel computes what it hides, the half of own tokens x own tokens.
    assert 1.0 <= shared / pairs_cost(pairs_of(lengths, own)) < 1.1
    assert 1.0 <= apart / pairs_cost(pairs_of(lengths)) < NEAR
    assert apart > 2.5 * shared


@pytest.mark.parametrize("blocks", [False, True])
def test_forward_and_backward_are_what_the_formula_says(blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, lengths = llama(), log_normal(12, 300.0)
    model.logprob_head = find_head(model)
    monkeypatch.setattr(predictions, "PLAIN", 0 if blocks else 1 << 40)
    assert pack_attention(model) is None
    ids, cu = pack(random_rows(lengths))
    found = counted(lambda: token_logprobs(model, ids, cu).sum().backward())
    expected = by_formula(
        CONFIG, computed=len(ids), pairs=pairs_of(lengths), predicted=len(ids) - len(lengths), backward=True
    )
    assert 0.98 < found / expected < NEAR


@given(
    shape=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 130), st.integers(1, 130)), min_size=1, max_size=12),
)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_layout_has_every_token_once_and_each_query_sees_what_leads_to_it(shape: list[tuple[int, int, int]]) -> None:
    """Rows of `own` tokens after the first `depth` of one of the rows before."""
    rows: list[list[int]] = []
    for n, (of, depth, own) in enumerate(shape):
        rows.append([*(rows[-1 - of % len(rows)][:depth] if rows else []), *(n * 1000 + np.arange(own)).tolist()])
    rows.sort()
    ids, _ = pack(rows)
    lengths = [len(row) for row in rows]
    places = shared_prefixes(ids, lengths)
    layout = Layout.of(lengths, ids.device, places)
    assert layout.back is not None
    leading: dict[int, list[int]] = {}
    needed = 0
    for row, at in zip(rows, torch.split(places, lengths), strict=True):
        needed += len(row) * len(set(at.tolist()) - set(leading))
        leading |= {place: row[: n + 1] for n, place in enumerate(at.tolist())}
    token = dict(zip(places.tolist(), ids.tolist(), strict=True))
    seen, computed = [], 0
    for _, keys, count, own, longest in layout.buckets:
        computed += count * own * longest
        for to in keys.view(count, longest).tolist():
            seen += [[token[key] for key in to[: column + 1]] for column in range(longest - own, longest)]
    assert {place: seen[at] for place, at in enumerate(layout.back.tolist())} == leading
    assert computed <= needed + len(rows) * max(CALL_ON_CPU, SHORT * SHORT)


def test_what_a_gpu_computes_without_a_mask_is_what_a_cpu_computes_with_one() -> None:
    """`causal_lower_right` on a CPU is made a mask of; what torch does with it on a GPU is torch's."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 16, generator=generator) for heads, n in ((4, 30), (2, 100), (2, 100)))
    ours = attention._causal(q, k, v, None, 0.0, None, None)
    repeated = [x.repeat_interleave(2, dim=1) for x in (k, v)]
    theirs = F.scaled_dot_product_attention(q, *repeated, attn_mask=causal_lower_right(30, 100))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize("own", [1, 30, 100])
def test_the_fused_kernel_and_the_products_it_stands_for_agree(own: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 16, generator=generator) for heads, n in ((4, own), (2, 100), (2, 100)))
    fused = attention._causal(q, k, v, 0.3, 0.0, window, None)
    products = attention._by_products(q, k, v, attention._bias(q, 100, window), 0.3, 0.0, None)
    torch.testing.assert_close(fused, products, atol=1e-5, rtol=1e-5)
