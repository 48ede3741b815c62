"""Logits in float32 out of a model that computes in 16 bits.

In bfloat16 a logit of 20 is off by up to 0.06, and so is the log-prob that is reported for a token. The learner has its
head in float32; so must an engine, or both disagree on tokens from weights that are the same (MiniMax-M1, arXiv
2506.13585). What is left of a mismatch is then what the layers below the head compute differently.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

BLOCK = 1 << 22
"""Weights that are float32 at once, 16 MiB: the copy of a block stays in a cache until it is used, and a head of a
real vocabulary is never in memory twice."""


def widen_head(model: PreTrainedModel) -> str | None:
    """Have the head of `model` give float32 logits from now on, whatever type its weights are in. None = done, or it
    does already; else this is the reason why not, and the model is as it was.

    The layer stays the object that it was, with its weights: they may be tied, exchanged, or memory that the learner
    wrote. What the model does with its logits beyond the layer, a scale or a softcap, happens in float32 too.
    """
    layer = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
    if type(layer) is not nn.Linear:
        return f"its head is a {type(layer).__name__}"
    if layer.weight.dtype != torch.float32:
        layer.forward = partial(float32_linear, layer)  # type: ignore[method-assign]
    return None


def float32_linear(layer: nn.Linear, inputs: Tensor) -> Tensor:
    """float32 [..., out] of inputs [..., in]: products and sums in float32, of numbers in the types they come in."""
    wide = inputs.float()
    blocks = torch.split(layer.weight, max(1, BLOCK // layer.in_features))
    logits = torch.cat([F.linear(wide, block.float()) for block in blocks], dim=-1)
    bias: Tensor | None = layer.bias
    return logits if bias is None else logits + bias.float()
