"""torch.compile of the decoder layers, one by one: they are alike, so what is compiled for the first serves all."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from asyncrl.learners.attention import PACKED, packed_attention
from asyncrl.learners.layers import layers_for

KEY = "learner.compile"


def compile_layers(model: PreTrainedModel) -> None:
    """From its next pass on `model`, sharded or not, computes its decoder layers by compiled code, for any number of
    tokens. To be called before `recompute_layers`, which computes again whatever a layer is by then.

    Raises ModelError if `model` does not say which its layers are.
    """
    # Attention is another program for each number of buckets that a pack has: it stays as it is, amid what is compiled.
    plain = torch.compiler.disable(packed_attention)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    ALL_ATTENTION_FUNCTIONS.register(PACKED, plain)
    for layer in layers_for(KEY, model):
        # `forward` and not the call, on which FSDP2 hooks what gathers weights.
        layer.forward = torch.compile(layer.forward, dynamic=True)
