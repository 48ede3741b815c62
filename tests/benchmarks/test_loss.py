"""`bench loss`, in small: both sides answer, and their memory is their own."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from asyncrl.benchmarks import loss
from asyncrl.benchmarks.loss import Problem, _apart, _inputs, _plain, side

SMALL = Problem(512, 8, vocabulary=50_000)  # logits: 98 MiB


@pytest.mark.timeout(200)
def test_the_sides_agree_each_has_a_memory_of_its_own_and_its_end_is_named() -> None:
    found = {}
    for name in ("plain", "blocks", "spread"):
        with side(name, SMALL) as once:
            first, second = once(), once()
            for process in multiprocessing.active_children():
                process.kill()
            with pytest.raises(RuntimeError, match=r"its process ended with -9; -9: the machine's memory"):
                once()
        assert torch.equal(first.values, second.values)
        assert first.seconds > 0
        assert first.cpu_seconds > 0
        found[name] = first
    logits = 4 * SMALL.tokens * SMALL.vocabulary
    assert 2 * logits < found["plain"].bytes < 5 * logits
    for name in ("blocks", "spread"):
        assert _apart(found[name].values, found["plain"].values, SMALL.tokens) < loss.APART
        # All logits fit into what may be kept here; beside them there are two or three blocks, and what malloc holds.
        assert 0.8 * logits < found[name].bytes < 3 * logits


def test_other_logprobs_or_gradients_would_be_told() -> None:
    """Negative control of the comparison, at another temperature by one thousandth."""
    inputs, weights = _inputs(Problem(16, 8, vocabulary=100))
    values = []
    for scale in (1.0, 1.001):
        logprobs = _plain(inputs[0] * scale, *inputs[1:])
        (gradient,) = torch.autograd.grad((logprobs * weights).sum(), inputs[:1])
        values.append(torch.cat([logprobs.detach(), gradient.flatten()]))
    assert _apart(values[0], values[1], 16) > loss.APART
