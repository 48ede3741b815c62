"""In bfloat16 too, the log-prob of a token is that of a float32 head over the model's hidden states."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.collectors.engines import head
from asyncrl.collectors.engines.decode import Decoder, Generation
from asyncrl.collectors.engines.head import widen_head
from asyncrl.collectors.engines.live import LiveModel
from asyncrl.collectors.engines.spans import Served
from asyncrl.learners.forward import token_logprobs
from asyncrl.learners.model import load_model
from asyncrl.staleness import Weights

from .tiny_models import ARCHITECTURES, VOCABULARY, make_model, request, staged

SERVED = Served(Weights(1, 0), "checksum")
IDS = torch.randint(0, VOCABULARY, (64, 24), generator=torch.Generator().manual_seed(0))


def half(architecture: str = "qwen3", *, seed: int = 0) -> PreTrainedModel:
    model: nn.Module = make_model(architecture, seed=seed)
    model.to(torch.bfloat16)
    return model  # type: ignore[return-value]


def chosen(logits: Tensor, ids: Tensor = IDS) -> Tensor:
    """Log-probs of what follows each token, [rows, tokens - 1]."""
    return torch.log_softmax(logits, -1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)


@torch.inference_mode()
def exact(model: PreTrainedModel) -> Tensor:
    """Of the model's own hidden states and weights, in float64."""
    hidden = model.base_model(IDS).last_hidden_state.double()
    layer = model.get_output_embeddings()
    return chosen(hidden @ layer.weight.double().T)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if not name.startswith("gemma")])
@torch.inference_mode()
def test_logits_are_those_of_exact_products(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """Control: as the model itself has them, they are not."""
    model = half(architecture)
    before = model(IDS).logits
    assert before.dtype == torch.bfloat16
    assert float((chosen(before.float()) - exact(model)).abs().max()) > 1e-2
    for block in (1 << 22, 32 * 7):  # in one, and in blocks that do not divide the vocabulary
        monkeypatch.setattr(head, "BLOCK", block)
        assert widen_head(model) is None
        after = model(IDS).logits
        assert after.dtype == torch.float32
        torch.testing.assert_close(chosen(after), exact(model), atol=1e-4, rtol=0, check_dtype=False)


@torch.inference_mode()
def test_the_log_prob_that_a_request_reports_is_exact_in_bfloat16() -> None:
    model = half()
    layer = model.get_output_embeddings()
    seen: list[Tensor] = []
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0, -1].double()))
    decoder = Decoder(model, slots=1)
    generation = Generation(request("a", seed=3, temperature=0.7), 12)
    decoder.join([generation], SERVED)
    while decoder.running:
        decoder.step(SERVED)
    logits = torch.stack(seen) @ layer.weight.double().T / 0.7
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(generation.tokens)[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(generation.logprobs).double(), expected, atol=1e-5, rtol=0)
    decoder.check_exact()


@torch.inference_mode()
def test_a_head_whose_weights_are_exchanged_computes_with_the_new_ones() -> None:
    live, other = LiveModel(half()), half(seed=1)
    assert widen_head(live.model) is None
    live.stage(staged(other, 1, 1))
    live.activate()
    torch.testing.assert_close(chosen(live.model(IDS).logits), exact(other), atol=1e-4, rtol=0, check_dtype=False)
    tied = live.model.get_output_embeddings().weight
    assert tied.data_ptr() == live.model.get_input_embeddings().weight.data_ptr()
    assert tied.dtype == torch.bfloat16


@torch.inference_mode()
def test_in_float32_nothing_is_changed_and_another_head_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    assert widen_head(model) is None
    assert "forward" not in model.get_output_embeddings().__dict__
    strange = half("llama")
    strange.lm_head = nn.Sequential(strange.lm_head)
    with caplog.at_level(logging.WARNING):
        Decoder(strange, slots=1)
    assert "computes its logits, and with them log-probs, in torch.bfloat16: its head is a Sequential" in caplog.text


def test_engine_and_learner_then_disagree_by_what_the_layers_below_the_head_compute(tmp_path: Path) -> None:
    """The mean square of the difference of log-probs is that of the body's rounding and that of the head's; only the
    first is left."""
    ids = torch.randint(0, VOCABULARY, (512, 24), generator=torch.Generator().manual_seed(0))
    cu_seqlens = torch.arange(0, ids.numel() + 1, ids.shape[1])
    make_model().save_pretrained(tmp_path)
    learner = load_model(tmp_path, "bfloat16", "auto")
    with torch.no_grad():
        for parameter in learner.parameters():  # as a checkpoint in bfloat16 has them
            parameter.copy_(parameter.bfloat16().float())
        mine = token_logprobs(learner, ids.flatten(), cu_seqlens).view(ids.shape)[:, 1:]
    model = half()
    with torch.inference_mode():
        before = chosen(model(ids).logits.float(), ids)
        assert widen_head(model) is None
        after = chosen(model(ids).logits, ids)
    was, now, of_head = (float((a - b).square().mean()) for a, b in ((before, mine), (after, mine), (before, after)))
    assert now < was
    assert was - now == pytest.approx(of_head, rel=0.5)
