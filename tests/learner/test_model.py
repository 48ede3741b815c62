"""Loading a model: what is set, and what each mistake says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

from asyncrl.learners.attention import PACKED
from asyncrl.learners.forward import token_logprobs
from asyncrl.learners.model import ModelError, load_model, load_tokenizer, longest_sequence


def test_masters_are_float32_without_dropout_and_with_gradients(model_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        model = load_model(model_path, dtype, "auto")
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert not model.training
        assert model.config._attn_implementation == PACKED
        logprobs = token_logprobs(model, torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2, 4]))
        assert logprobs.dtype == torch.float32
        logprobs.sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_eager_attention_is_honoured_one_sequence_at_a_time_and_says_so(
    model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    eager, packed = load_model(model_path, "float32", "eager"), load_model(model_path, "float32", "sdpa")
    assert eager.config._attn_implementation == "eager"
    assert "one sequence at a time" in caplog.text
    ids, cu = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2, 5])
    torch.testing.assert_close(token_logprobs(eager, ids, cu), token_logprobs(packed, ids, cu), atol=1e-6, rtol=1e-6)


def test_each_mistake_is_one_clear_error(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere is not a folder"):
        load_model(tmp_path / "nowhere", "float32", "auto")
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        load_model(tmp_path, "float32", "auto")

    no_weights = tmp_path / "no-weights"
    shutil.copytree(model_path, no_weights, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ModelError, match=r"cannot load .*no-weights"):
        load_model(no_weights, "float32", "auto")

    encoder = tmp_path / "encoder"
    BertModel(
        BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
    ).save_pretrained(encoder)
    config = json.loads((encoder / "config.json").read_text())
    (encoder / "config.json").write_text(json.dumps({**config, "model_type": "vit"}))
    with pytest.raises(ModelError, match="not a causal language model"):
        load_model(encoder, "float32", "auto")

    no_tokenizer = tmp_path / "no-tokenizer"
    shutil.copytree(model_path, no_tokenizer, ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    with pytest.raises(ModelError, match="has no tokenizer") as error:
        load_tokenizer(no_tokenizer)
    assert len(str(error.value).splitlines()) <= 3


def test_the_longest_sequence_is_the_models_or_the_recipes_whichever_is_less(model_path: Path) -> None:
    assert longest_sequence(model_path, limit=None, trust_remote_code=False) == 64
    assert longest_sequence(model_path, limit=20, trust_remote_code=False) == 20
    assert longest_sequence(model_path, limit=4000, trust_remote_code=False) == 64
