"""One request at a time, as `run.deterministic` has it at age 0: its bits depend on nothing that came before."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch

from asyncrl.collectors.engines.base import Request
from asyncrl.collectors.engines.decode import Decoder, Generation
from asyncrl.collectors.engines.spans import Served
from asyncrl.staleness import Weights

from .tiny_models import ARCHITECTURES, make_model, request

SERVED = Served(Weights(1, 0), "checksum")
Bits = dict[str, tuple[bytes, bytes]]


def requests() -> list[Request]:
    """Prompts and answers of many lengths."""
    rng = np.random.default_rng(0)
    return [
        request(f"r{n}", rng.integers(0, 61, rng.integers(1, 30)).tolist(), seed=n, max_tokens=int(rng.integers(2, 25)))
        for n in range(24)
    ]


@torch.inference_mode()
def decoded(decoder: Decoder, arrivals: Iterable[Request]) -> Bits:
    """Tokens and log-probs of each, bit for bit; a request joins as soon as there is a slot."""
    waiting, done = list(arrivals), []
    while waiting or decoder.running:
        newcomers = [Generation(r, budget=r.sampling.max_tokens) for r in waiting[: decoder.free]]
        waiting = waiting[len(newcomers) :]
        if newcomers:
            done += decoder.join(newcomers, SERVED)
        if decoder.running:
            done += decoder.step(SERVED)
    completions = {generation.request.id: generation.completion() for generation in done}
    return {id: (c.token_ids.tobytes(), c.logprobs.tobytes()) for id, c in completions.items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_with_one_slot_the_bits_do_not_depend_on_what_was_decoded_before(architecture: str) -> None:
    model, wanted = make_model(architecture), requests()
    alone: Bits = {}
    for one in wanted:
        alone |= decoded(Decoder(model, slots=1), [one])
    order = np.random.default_rng(1).permutation(len(wanted))
    assert decoded(Decoder(model, slots=1), [wanted[n] for n in order]) == alone


def test_with_several_slots_they_do() -> None:
    """Negative control: rows of one forward round each other's numbers a little differently."""
    model, wanted = make_model(), requests()
    one, several = decoded(Decoder(model, slots=1), wanted), decoded(Decoder(model, slots=8), wanted)
    assert one.keys() == several.keys()
    assert one != several
