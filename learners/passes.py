"""How a batch goes through the model in passes: where, how large one is, and how ranks make as many as each other."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from asyncrl.learners.attention import PACKED
from asyncrl.learners.forward import token_logprobs
from asyncrl.learners.objectives.aggregate import token_sum


def compute_device(model: PreTrainedModel) -> torch.device:
    """Where a pass of `model` is computed; its parameters may be in host memory meanwhile (`learner.cpu_offload`)."""
    device: torch.device = getattr(model, "compute_device", None) or next(model.parameters()).device
    return device


def portion(model: PreTrainedModel, max_tokens: int) -> int:
    """Tokens of a micro-batch. Of a model that does not pack a sequence is one: it is called so often anyway, and ranks
    must agree how often."""
    return max_tokens if model.config._attn_implementation == PACKED else 1


def pass_along(model: PreTrainedModel, device: torch.device, *, graded: bool) -> None:
    """A pass that trains nothing, over the shortest sequence that has a prediction."""
    with torch.set_grad_enabled(graded):
        logprobs = token_logprobs(model, torch.zeros(2, dtype=torch.int64, device=device), torch.tensor([0, 2]))
        loss = token_sum(logprobs, torch.zeros(2, dtype=torch.bool, device=device))
    if graded:
        torch.autograd.backward(loss)
