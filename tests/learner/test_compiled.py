"""torch.compile of the layers: the same numbers, and nothing compiled anew for packs of other sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from asyncrl.learners.compiled import compile_layers
from asyncrl.learners.forward import token_logprobs
from asyncrl.learners.model import ModelError, load_model
from asyncrl.learners.recompute import recompute_layers

PACKS = ([7, 5], [3, 8, 6, 2], [9], [4, 4, 4, 9, 2, 2])
"""Lengths of the sequences of packs of 12, 19, 9 and 25 tokens."""


def passes(model: PreTrainedModel) -> list[torch.Tensor]:
    """Log-probs and gradients of each pack."""
    found = []
    for number, lengths in enumerate(PACKS):
        generator = torch.Generator().manual_seed(number)
        token_ids = torch.randint(0, 24, (sum(lengths),), generator=generator)
        model.zero_grad()
        logprobs = token_logprobs(model, token_ids, torch.tensor([0, *np.cumsum(lengths)]), share_prefixes=True)
        torch.autograd.backward(logprobs.sum())
        found += [logprobs.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_layers_compute_the_same_for_packs_of_all_sizes(model_path: Path) -> None:
    model = load_model(model_path, "float32", "auto")
    expected = passes(model)
    torch._dynamo.reset()
    counters.clear()
    compile_layers(model)
    recompute_layers(model)
    found = passes(model)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) < 1e-5 * max(1.0, float(other.abs().max()))
    compiled = counters["stats"]["unique_graphs"]
    assert compiled > 0
    again = passes(model)
    assert all(torch.equal(one, other) for one, other in zip(again, found, strict=True))
    assert counters["stats"]["unique_graphs"] == compiled


def test_a_model_that_does_not_name_its_layers_is_not_compiled(model_path: Path) -> None:
    model = load_model(model_path, "float32", "auto")
    model._no_split_modules = set()
    with pytest.raises(ModelError, match=r"learner\.compile works on decoder layers"):
        compile_layers(model)
