"""The head of a model, as far as log-probs can be had from its last hidden states (`predictions.py`): what is known of
it, and when it is used."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.learners import predictions
from asyncrl.learners.predictions import Predicted, predicted
from asyncrl.schema import Support


@dataclass(frozen=True, slots=True)
class Head:
    """What a model does between its last hidden state and its logits, beside the linear layer.

    softcap: c of c tanh(z / c), Gemma 2's `final_logit_softcapping`; None: nothing.
    """

    softcap: float | None


def find_head(model: PreTrainedModel) -> Head | str:
    """The head of `model`, or the reason why its log-probs are not computed by blocks.

    Softcaps are known by name. Anything else that a model may do with its logits, a scale or a mask, shows in the
    comparison with its own on a few tokens.
    """
    layer = _layer(model)
    if type(layer) is not nn.Linear:
        return f"its head is a {type(layer).__name__}"
    if model.base_model is model:
        return "its hidden states cannot be had without its logits"
    text = model.config.get_text_config()
    head = Head(softcap=getattr(text, "final_logit_softcapping", None))
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, text.vocab_size, (8,), generator=generator).to(model.device)
    targets = token_ids.flip(0)
    with torch.no_grad():
        logits = model(input_ids=token_ids[None], use_cache=False).logits[0]
        expected = torch.log_softmax(logits.float(), dim=-1).gather(1, targets[:, None]).squeeze(1)
        rows = torch.arange(8, device=model.device)
        try:
            found = call_with_head(model, head, rows, targets, 1.0, input_ids=token_ids[None], use_cache=False).logprobs
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            return f"its last hidden states cannot be had: {str(error).splitlines()[0]}"
    difference = float((found - expected).abs().max())
    if not difference <= 1e-4:  # float32 rounding is 1e-5
        return f"its log-probs differ by {difference:.2g} when they are computed from its last hidden states"
    return head


def head_for(model: PreTrainedModel, dtype: torch.dtype, *, tokens: int) -> Head | None:
    """The head to compute a pass of so many tokens with, in which `dtype` products run; None: the plain way, all logits
    at once. `load_model` sets `model.logprob_head`, where `find_head` found one.

    Under bfloat16 it is always the head, whose products are float32: were it up to a pass's size, the same weights
    would give a token one log-prob in one pass and another in the next. In float32 both ways are equal to rounding.
    """
    head: Head | None = getattr(model, "logprob_head", None)
    if head is None or type(_layer(model)) is not nn.Linear:  # an adapter may have come to it
        return None
    return head if dtype != torch.float32 or tokens * len(_layer(model).weight) > predictions.PLAIN else None


def float32_logits(model: PreTrainedModel) -> str | None:
    """For a model without a known head: have its linear layer give float32 logits, whatever products run in elsewhere.
    None = done, and what the model does with them beyond the layer is in float32 too; else this is the reason why not.
    """
    layer = _layer(model)
    if type(layer) is not nn.Linear:
        return f"its head is a {type(layer).__name__}"
    layer.forward = partial(_float32_linear, layer)  # type: ignore[method-assign]
    return None


def _float32_linear(layer: nn.Linear, inputs: Tensor) -> Tensor:
    with torch.autocast(inputs.device.type, enabled=False):
        return F.linear(inputs.float(), layer.weight, layer.bias)


def _layer(model: PreTrainedModel) -> Any:
    return model.get_output_embeddings()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated


def call_with_head(
    model: PreTrainedModel,
    head: Head,
    rows: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    kept: Tensor | None = None,
    spread: bool = False,
    support: Support | None = None,
    **inputs: Any,
) -> Predicted:
    """`model(**inputs)` for one sequence or pack, with `predicted` in the place of its logits. kept: the places of the
    hidden states that `rows` are among, None for all.

    The model is called as ever, since hooks on that call are what gathers a sharded model's weights, the head's too,
    and what gives them back after the backward pass. Only what it computes is replaced.
    """

    def forward(**inputs: Any) -> Predicted:
        hidden = model.base_model(**inputs).last_hidden_state[0]
        if kept is not None:
            hidden = hidden.index_select(0, kept)
        layer = _layer(model)
        return predicted(
            hidden,
            layer.weight,
            layer.bias,
            rows,
            targets,
            temperature=temperature,
            softcap=head.softcap,
            spread=spread,
            support=support,
        )

    before = model.__dict__.get("forward")
    model.forward = forward
    try:
        found: Predicted = model(**inputs)
    finally:
        if before is None:
            del model.forward
        else:
            model.forward = before
    return found
