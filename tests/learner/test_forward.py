"""Packed log-probs equal those of each sequence alone."""

from __future__ import annotations

import copy
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    PretrainedConfig,
    Qwen3Config,
)

from asyncrl.learners.attention import PACKED
from asyncrl.learners.forward import pack_attention, token_logprobs
from asyncrl.learners.layout import Layout, shared_prefixes

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": None,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, num_key_value_heads=4),
    "llama-gqa": LlamaConfig(**SHAPE, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SHAPE, num_key_value_heads=1, head_dim=16),
    "qwen3-sliding": Qwen3Config(
        **SHAPE, num_key_value_heads=2, head_dim=8, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "gemma": GemmaConfig(**SHAPE, num_key_value_heads=1, head_dim=16),
    "gemma2": Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=8, sliding_window=6),
    "gemma3": Gemma3TextConfig(**SHAPE, num_key_value_heads=2, head_dim=8, sliding_window=6),
    "gpt2": GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3),
}


def build(config: PretrainedConfig, attn: str | None = None) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attn).eval()


def sequences(lengths: list[int], vocab: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(0, vocab, (sum(lengths),), generator=generator)
    return ids, torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def reference(model: torch.nn.Module, ids: torch.Tensor, cu: torch.Tensor, temperature: float) -> torch.Tensor:
    parts = []
    for start, end in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        logits = model(ids[None, start:end]).logits[0].double() / temperature
        logprobs = torch.log_softmax(logits, -1)[:-1].gather(1, ids[start + 1 : end, None])[:, 0]
        parts += [torch.zeros(1), logprobs]
    return torch.cat(parts).float()


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_logprobs_and_gradients_equal_those_of_each_sequence_alone(name: str) -> None:
    plain, packed = build(CONFIGS[name], "eager"), build(CONFIGS[name])
    assert pack_attention(packed) is None
    for lengths in ([7, 3, 12, 1, 7, 9], [5, 5, 5], [11], [1, 1], [150, 80, 10, 100]):
        ids, cu = sequences(lengths)
        expected, found = reference(plain, ids, cu, 0.7), token_logprobs(packed, ids, cu, temperature=0.7)
        torch.testing.assert_close(found, expected, atol=2e-5 if max(lengths) > 20 else 5e-6, rtol=1e-6)
        if max(lengths) > 1:
            weights = torch.linspace(-1, 1, len(ids))
            wanted = torch.autograd.grad((expected * weights).sum(), list(plain.parameters()), allow_unused=True)
            grads = torch.autograd.grad((found * weights).sum(), list(packed.parameters()), allow_unused=True)
            for a, b in zip(grads, wanted, strict=True):
                if a is not None and b is not None:
                    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["qwen3-sliding", "gpt2"])
@given(lengths=st.lists(st.integers(1, 20), min_size=2, max_size=6), data=st.data())
@settings(max_examples=15, deadline=None)
def test_changing_one_sequence_never_changes_another(name: str, lengths: list[int], data: st.DataObject) -> None:
    model = build(CONFIGS[name])
    assert pack_attention(model) is None
    ids, cu = sequences(lengths)
    changed = data.draw(st.integers(0, len(lengths) - 1))
    start, end = int(cu[changed]), int(cu[changed + 1])
    other = ids.clone()
    other[start:end] = (other[start:end] + 1 + torch.arange(end - start)) % 50
    with torch.no_grad():
        before, after = token_logprobs(model, ids, cu), token_logprobs(model, other, cu)
    outside = torch.ones(len(ids), dtype=torch.bool)
    outside[start:end] = False
    assert torch.equal(before[outside], after[outside])


def test_models_that_mix_tokens_elsewhere_are_refused_with_a_reason_and_still_exact() -> None:
    bloom = BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=2, initializer_range=0.3)
    mamba = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    dynamic = LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, num_key_value_heads=4
    )
    for config, reason in ((bloom, "cannot be replaced"), (mamba, ""), (dynamic, "rotary")):
        model = build(config)
        answer = pack_attention(model)
        assert answer is not None
        assert reason in answer
        assert model.config._attn_implementation != PACKED
        ids, cu = sequences([4, 7])
        with torch.no_grad():
            torch.testing.assert_close(
                token_logprobs(model, ids, cu), reference(model, ids, cu, 1.0), atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize("cu", [[0, 5], [1, 6], [0, 3, 3, 6], [0], []])
def test_boundaries_that_do_not_describe_the_tokens_are_refused(cu: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens"):
        token_logprobs(build(CONFIGS["llama"]), torch.zeros(6, dtype=torch.int64), torch.tensor(cu, dtype=torch.int64))


def test_packed_attention_outside_token_logprobs_says_so() -> None:
    model = build(CONFIGS["llama"])
    assert pack_attention(model) is None
    with pytest.raises(RuntimeError, match="only inside asyncrl's token_logprobs"):
        model(torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize("name", CONFIGS)
def test_shared_beginnings_change_neither_logprobs_nor_gradients(name: str) -> None:
    plain, packed = build(CONFIGS[name], "eager"), build(CONFIGS[name])
    assert pack_attention(packed) is None
    prompt, other = list(range(3, 15)), [9, 9, 4]
    rows = [[*prompt, 1, 2], [*prompt, 1, 7, 8], prompt, [*prompt, 5], [*other, 2], [*other, 2], [*other, 2, 6], [1]]
    ids, cu = torch.tensor([*chain(*rows)]), torch.tensor([0, *torch.tensor([len(r) for r in rows]).cumsum(0).tolist()])
    expected = reference(plain, ids, cu, 0.7)
    found = token_logprobs(packed, ids, cu, temperature=0.7, share_prefixes=True)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-6)
    weights = torch.linspace(-1, 1, len(ids))
    wanted = torch.autograd.grad((expected * weights).sum(), list(plain.parameters()), allow_unused=True)
    grads = torch.autograd.grad((found * weights).sum(), list(packed.parameters()), allow_unused=True)
    for a, b in zip(grads, wanted, strict=True):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_a_sequence_that_ends_within_the_one_before_it_takes_no_part_in_attention() -> None:
    rows = [[1, 2, 3], [1, 2, 3], [1, 2], [1, 4], [5], [5], [5, 6]]
    lengths = [len(row) for row in rows]
    places = shared_prefixes(torch.tensor([*chain(*rows)]), lengths)
    layout = Layout.of(lengths, places.device, places)
    assert [bucket.rows for bucket in layout.buckets] == [4]
    assert layout.size == 6


@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8),
)
def test_tokens_share_a_place_exactly_when_what_leads_to_them_is_alike(rows: list[list[int]]) -> None:
    places = shared_prefixes(torch.tensor([*chain(*rows)]), [len(row) for row in rows]).tolist()
    histories: dict[int, tuple[int, ...]] = {}
    before: list[tuple[int, ...]] = []
    expected_new = 0
    for row in rows:
        mine = [tuple(row[: i + 1]) for i in range(len(row))]
        for history in mine:
            place = places.pop(0)
            assert histories.setdefault(place, history) == history  # never two different ones at a place
            expected_new += history not in before  # the neighbour's are taken over, all of them
        before = mine
    assert sorted(histories) == list(range(expected_new))
