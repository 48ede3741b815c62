"""Heads of models: log-probs by blocks of the vocabulary are those that the models themselves give."""

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

from asyncrl.learners import predictions
from asyncrl.learners.forward import pack_attention, token_logprobs, token_predictions
from asyncrl.learners.head import Head, call_with_head, find_head, head_for
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
            monkeypatch.setattr(predictions, "PLAIN", 0)
            monkeypatch.setattr(predictions, "LOGITS", 100)
            monkeypatch.setattr(predictions, "BLOCK", 90)
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
    monkeypatch.setattr(predictions, "PLAIN", 0)
    monkeypatch.setattr(predictions, "LOGITS", 100)
    monkeypatch.setattr(predictions, "BLOCK", 90)
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


def test_such_a_models_logits_are_float32_in_bfloat16_too(tmp_path: Path) -> None:
    """Control: as the model itself has them, they are not."""
    build(GraniteConfig(**SHAPE, logits_scaling=0.5)).save_pretrained(tmp_path)
    model = load_model(tmp_path, "bfloat16", "auto")
    assert model.logprob_head is None
    ids = torch.tensor([1, 5, 9, 3, 20, 11])

    def logprobs() -> torch.Tensor:
        with torch.no_grad():
            return token_logprobs(model, ids, torch.tensor([0, 6]))[1:]

    found = logprobs()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model.set_attn_implementation("sdpa")
        hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    exact = torch.log_softmax(hidden.double() @ model.lm_head.weight.detach().double().T / 0.5, dim=-1)
    expected = exact[:-1].gather(1, ids[1:, None])[:, 0].float()
    torch.testing.assert_close(logprobs(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0)  # packed attention rounds elsewhere
    del model.lm_head.forward
    assert float((logprobs() - expected).abs().max()) > 1e-3


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
    most = predictions.PLAIN // 24
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
