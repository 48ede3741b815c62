"""Activation checkpointing: a decoder layer keeps its input only, and the backward pass computes the rest once more.

    memory:  the inputs of all layers and one layer in full, instead of all layers in full
    time:    one more forward pass of the layers (Chen et al. 2016, arXiv 1604.06174)

transformers has it for models in training mode, and a learner's are in evaluation mode for good. What is to be got
right here is the pack: when a layer is computed again its pack is no longer the current one, and on a GPU it is another
thread that computes. So the pack's layout is kept with the layer's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from asyncrl.learners.attention import current_layout, laid_out
from asyncrl.learners.layers import layers_for

KEY = "learner.gradient_checkpointing"


def recompute_layers(model: PreTrainedModel) -> None:
    """From now on `model`, sharded or not, keeps of a pass with gradients the inputs of its decoder layers only.

    Gradients are the same, to the bit if a layer gives the same bits twice. Raises ModelError if `model` does not say
    which its layers are.
    """
    for layer in layers_for(KEY, model):
        # `forward` and not the call: what FSDP2 hooks on the call, to gather weights, must not happen twice.
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        layout = current_layout()

        def run(*args: Any, **kwargs: Any) -> Any:
            with laid_out(layout), _casts_not_kept():
                return forward(*args, **kwargs)

        # No random numbers are drawn in evaluation mode, so there is no state of theirs to bring back.
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return recomputed


@contextmanager
def _casts_not_kept() -> Iterator[None]:
    """Autocast keeps each weight that it has cast until the pass is over, in case it is used again. In a layer none is,
    and together these copies would be half of all weights."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
