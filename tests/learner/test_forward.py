"""Packed log-probs equal those of each sequence alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import chain
from typing import Any

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

from asyncrl.learners import predictions
from asyncrl.learners.attention import PACKED
from asyncrl.learners.forward import pack_attention, token_logprobs, token_predictions
from asyncrl.learners.head import find_head
from asyncrl.learners.layout import Bucket, Layout, shared_prefixes

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


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("name", ["qwen3-sliding", "gpt2"])
@given(lengths=st.lists(st.integers(1, 20), min_size=2, max_size=6), data=st.data())
@settings(max_examples=15, deadline=None)
def test_changing_one_sequence_never_changes_another(
    name: str, share: bool, lengths: list[int], data: st.DataObject
) -> None:
    model = build(CONFIGS[name])
    assert pack_attention(model) is None
    ids, cu = sequences(lengths)
    if share:  # most of what they have in common
        ids = torch.cat([torch.arange(length) % 7 if length % 4 else torch.arange(length) % 5 for length in lengths])
    changed = data.draw(st.integers(0, len(lengths) - 1))
    assert not seen_elsewhere(model, ids, cu, changed, share=share)


def seen_elsewhere(model: torch.nn.Module, ids: torch.Tensor, cu: torch.Tensor, changed: int, *, share: bool) -> bool:
    """Whether other sequences have other log-probs where this one has other tokens; if anything is shared, to rounding,
    since a beginning that is no longer shared is computed in another place."""
    start, end = int(cu[changed]), int(cu[changed + 1])
    other = ids.clone()
    other[start:end] = (other[start:end] + 1 + torch.arange(end - start)) % 50
    with torch.no_grad():
        before, after = (token_logprobs(model, tokens, cu, share_prefixes=share) for tokens in (ids, other))
    outside = torch.ones(len(ids), dtype=torch.bool)
    outside[start:end] = False
    differences = (before - after)[outside].abs()
    return bool(differences.max() > (5e-5 if share else 0.0))


@pytest.mark.parametrize("share", [False, True])
def test_control_without_the_boundaries_it_would_be_seen(monkeypatch: pytest.MonkeyPatch, share: bool) -> None:
    model = build(CONFIGS["llama"])
    assert pack_attention(model) is None
    ids, cu = torch.tensor([7, 2, 3, 4, 7, 2, 5, 7, 2, 3, 6]), torch.tensor([0, 4, 7, 11])
    assert not seen_elsewhere(model, ids, cu, 0, share=share)
    of = Layout.of

    def borderless(lengths: list[int], device: torch.device, places: torch.Tensor | None = None) -> Layout:
        size = sum(lengths) if places is None else int(places.max()) + 1
        return of([size], device)

    monkeypatch.setattr(Layout, "of", borderless)
    assert seen_elsewhere(model, ids, cu, 0, share=share)


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


PROMPT, OTHER = list(range(3, 15)), [9, 9, 4]
SHORT_ROWS = [
    *([*PROMPT, 1, 2], [*PROMPT, 1, 7, 8], PROMPT, [*PROMPT, 5]),
    *([*OTHER, 2], [*OTHER, 2], [*OTHER, 2, 6], [1]),
]
LONG = torch.randint(0, 50, (400,), generator=torch.Generator().manual_seed(1)).tolist()
LONG_ROWS = [
    *(LONG[:150], [*LONG[:90], 3], LONG[:90], [*LONG[:80], *LONG[200:270]], [*LONG[:80], *LONG[200:270], 4, 5]),
    *([*LONG[:80], *LONG[200:260], 1], [7], [7], [7, 8], LONG[300:380], [*LONG[300:370], *LONG[:70]], LONG[300:370]),
]
"""Beginnings of three depths, rows that another one contains, of one token, of one own token, of several lengths."""


def packed(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([*chain(*rows)]), torch.tensor([0, *torch.tensor([len(r) for r in rows]).cumsum(0).tolist()])


def gradients(model: torch.nn.Module, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a sum in which each token weighs something else."""
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs), dtype=logprobs.dtype)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("rows", [SHORT_ROWS, LONG_ROWS], ids=["short", "long"])
@pytest.mark.parametrize("name", CONFIGS)
def test_shared_beginnings_change_neither_logprobs_nor_gradients(name: str, rows: list[list[int]]) -> None:
    plain, ours = build(CONFIGS[name], "eager"), build(CONFIGS[name])
    assert pack_attention(ours) is None
    ids, cu = packed(rows)
    expected = reference(plain, ids, cu, 0.7)
    found = token_logprobs(ours, ids, cu, temperature=0.7, share_prefixes=True)
    torch.testing.assert_close(found, expected, atol=1e-5 if rows is SHORT_ROWS else 3e-5, rtol=1e-6)
    wanted = gradients(plain, expected)
    for parameter, gradient in gradients(ours, found).items():
        largest = float(wanted[parameter].abs().max())
        torch.testing.assert_close(gradient, wanted[parameter], atol=1e-5 * largest, rtol=1e-3)


def in_float64(model: torch.nn.Module) -> torch.nn.Module:
    """With other norms: those of transformers compute in float32 whatever they are given."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, torch.nn.RMSNorm(module.weight.shape, eps=1e-6))
    return model.double()


@pytest.mark.parametrize("rows", [SHORT_ROWS, LONG_ROWS], ids=["short", "long"])
@pytest.mark.parametrize("name", CONFIGS)
def test_in_float64_they_are_those_of_the_same_rows_unshared(name: str, rows: list[list[int]]) -> None:
    model = in_float64(build(CONFIGS[name]))
    assert pack_attention(model) is None
    ids, cu = packed(rows)
    expected = token_logprobs(model, ids, cu)
    wanted = gradients(model, expected)
    found = token_logprobs(model, ids, cu, share_prefixes=True)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    for parameter, gradient in gradients(model, found).items():
        torch.testing.assert_close(gradient, wanted[parameter], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-sliding", "gemma2"])
def test_in_bfloat16_they_are_as_far_from_float32_as_those_of_the_same_rows_unshared(name: str) -> None:
    model = build(CONFIGS[name])
    assert pack_attention(model) is None
    ids, cu = packed(LONG_ROWS)
    exact = gradients(model, token_logprobs(model, ids, cu))
    model.compute_dtype = torch.bfloat16

    def apart(*, share: bool) -> float:
        found = gradients(model, token_logprobs(model, ids, cu, share_prefixes=share))
        errors = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
        return (errors / sum(float(gradient.square().sum()) for gradient in exact.values())) ** 0.5

    assert 1e-4 < apart(share=True) < 1.5 * apart(share=False)


def test_control_without_what_members_share_in_their_keys_the_gradients_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Own tokens that look at own tokens alone."""
    model = build(CONFIGS["llama-gqa"]).double()
    assert pack_attention(model) is None
    ids, cu = packed(LONG_ROWS)
    expected = token_logprobs(model, ids, cu)
    of = Layout.of

    def forgetful(lengths: list[int], device: torch.device, places: torch.Tensor | None = None) -> Layout:
        layout = of(lengths, device, places)
        buckets = tuple(Bucket(b.queries, b.queries, b.rows, b.own, b.own) for b in layout.buckets)
        return replace(layout, buckets=buckets)

    monkeypatch.setattr(Layout, "of", forgetful)
    assert (token_logprobs(model, ids, cu, share_prefixes=True) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("way", ["packed", "blocks", "one by one"])
def test_only_what_is_asked_for_reaches_the_head(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Two of the tokens that are asked for follow the same beginning, and one is the first of its sequence."""
    model = build(CONFIGS["llama-gqa"])
    model.logprob_head = find_head(model)
    assert way == "one by one" or pack_attention(model) is None
    monkeypatch.setattr("asyncrl.learners.forward.FEW", 0)
    if way == "blocks":
        monkeypatch.setattr("asyncrl.learners.predictions.PLAIN", 0)
    ids, cu = packed(SHORT_ROWS)
    asked = torch.zeros(len(ids), dtype=torch.bool)
    asked[[5, 13, 27, int(cu[4]), int(cu[7]) - 1]] = True
    everything = token_predictions(model, ids, cu, share_prefixes=True, spread=True)
    computed = []
    whole = predictions.predicted

    def by_blocks(hidden: torch.Tensor, *rest: Any, **named: Any) -> Any:
        computed.append(len(hidden))
        return whole(hidden, *rest, **named)

    monkeypatch.setattr("asyncrl.learners.head.predicted", by_blocks)
    hook = model.lm_head.register_forward_hook(lambda _, inputs, __: computed.append(inputs[0].shape[1]))
    found = token_predictions(model, ids, cu, share_prefixes=True, spread=True, asked=asked)
    hook.remove()
    assert sum(computed) == (4 if way == "one by one" else 3)  # 13 and 27 are both predicted by the end of the prompt
    asked[cu[4]] = False
    for values, all_of_them, certain in zip(found, everything, (0.0, 0.0, 1.0), strict=True):
        torch.testing.assert_close(values[asked], all_of_them[asked], atol=1e-5, rtol=1e-5)
        assert (values[~asked] == certain).all()
    wanted = gradients(model, torch.where(asked, everything.logprobs, 0.0))
    for name, gradient in gradients(model, found.logprobs).items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-5, rtol=1e-4)


def test_nothing_asked_for_is_a_pass_with_a_gradient_of_zero() -> None:
    model = build(CONFIGS["llama"])
    assert pack_attention(model) is None
    ids, cu = packed(SHORT_ROWS)
    found = token_logprobs(model, ids, cu, asked=torch.zeros(len(ids), dtype=torch.bool))
    assert (found == 0).all()
    assert all(not gradient.any() for gradient in gradients(model, found).values())


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
