"""What a learner keeps of its past is what it published, bit for bit, whichever way it is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.config.recipe import Lora, Model
from asyncrl.learners.history import SMALL, History
from asyncrl.learners.lora import in_dtype, served_weights
from asyncrl.learners.trained import load_trained
from asyncrl.staleness import Weights
from asyncrl.weights.image import Images
from asyncrl.weights.manifest import combined_checksum

KEEP = 3


@pytest.fixture(scope="module")
def load(model_path: Path) -> Callable[..., Any]:
    return lambda **options: load_trained(Model(**options), model_path, None, seed=0)


def checksum(model: Any, dtype: str) -> str:
    """Of what engines would be served."""
    return combined_checksum(in_dtype(served_weights(model), dtype))


@torch.no_grad()
def change(model: Any, share: float, generator: torch.Generator) -> None:
    """Move this share of the trained elements by so much that bfloat16 sees it."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            chosen = torch.rand(parameter.shape, generator=generator) < share
            parameter.add_(torch.where(chosen, 0.1 * torch.randn(parameter.shape, generator=generator), 0.0))


CHANGES = st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0]), min_size=1, max_size=7)
"""Share of elements that each step changes; 0: it was skipped."""


@pytest.mark.parametrize("small", [0, SMALL], ids=["deltas", "whole"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "lora"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=CHANGES, publish_every=st.integers(1, 2), data=st.data())
def test_every_version_held_has_the_checksum_it_was_published_with(
    tmp_path_factory: pytest.TempPathFactory,
    load: Any,
    small: int,
    kind: str,
    changes: list[float],
    publish_every: int,
    data: st.DataObject,
) -> None:
    dtype = "bfloat16" if kind == "bfloat16" else "float32"
    model = load(dtype=dtype, lora=Lora(r=2, alpha=4) if kind == "lora" else None)
    kept_as = None if kind == "lora" else getattr(torch, dtype)
    generator = torch.Generator().manual_seed(len(changes))
    images = Images("history", folder=tmp_path_factory.mktemp("shm"))
    published: dict[int, str] = {}

    def publish(version: int) -> None:
        served = served_weights(model)
        image = images.write(Weights(1, version), in_dtype(served, dtype), tied=served.tied)
        published[version] = image.manifest.checksum

    publish(7)
    history = History(model, version=7, keep=KEEP, dtype=kept_as, small=small)
    for version, share in enumerate(changes, start=8):
        change(model, share, generator)
        history.remember(version)
        if version % publish_every == 0:
            publish(version)
    images.close()

    newest = 7 + len(changes)
    assert history.versions == tuple(range(newest, max(6, newest - KEEP - 1), -1))
    own = [parameter.detach().clone() for parameter in model.parameters()]
    with history.loading() as put:
        for version in data.draw(st.permutations([v for v in history.versions if v in published])):
            put(version)
            assert checksum(model, dtype) == published[version]
    assert all(torch.equal(parameter, before) for parameter, before in zip(model.parameters(), own, strict=True))


def test_few_changes_are_kept_as_a_delta_and_many_as_the_whole(load: Any) -> None:
    model = load(dtype="bfloat16")
    generator = torch.Generator().manual_seed(0)
    history = History(model, version=0, keep=4, dtype=torch.bfloat16, small=0)
    whole = history.nbytes
    assert whole == 2 * sum(parameter.numel() for parameter in model.parameters())
    sizes = []
    for version, share in enumerate([0.0, 0.01, 0.05, 1.0], start=1):
        change(model, share, generator)
        before = history.nbytes
        history.remember(version)
        sizes.append(history.nbytes - before)
    assert sizes[0] < sizes[1] < sizes[2] < whole / 2  # a skipped step has nothing but the headers of its deltas
    assert sizes[3] == whole


def test_numbers_that_compare_oddly_are_kept_as_they_are(load: Any) -> None:
    model = load()
    parameter = next(model.parameters())
    with torch.no_grad():
        parameter.view(-1)[:2] = torch.tensor([0.0, torch.nan])
    history = History(model, version=0, keep=1, small=0)
    with torch.no_grad():
        parameter.view(-1)[0] = -0.0
    history.remember(1)
    with history.loading() as put:
        put(0)
        assert not torch.signbit(parameter.view(-1)[0])
        assert torch.isnan(parameter.view(-1)[1])


def test_the_model_has_its_own_weights_back_after_an_error(load: Any) -> None:
    model = load(dtype="bfloat16")
    history = History(model, version=0, keep=1, dtype=torch.bfloat16)
    change(model, 1.0, torch.Generator().manual_seed(0))
    history.remember(1)
    own = [parameter.detach().clone() for parameter in model.parameters()]

    def ask() -> None:
        with history.loading() as put:
            put(0)
            assert not torch.equal(next(model.parameters()), own[0])
            put(-1)

    with pytest.raises(KeyError):
        ask()
    assert all(torch.equal(parameter, before) for parameter, before in zip(model.parameters(), own, strict=True))


def test_versions_follow_one_another_and_a_restart_forgets_them(load: Any) -> None:
    history = History(load(), version=4, keep=2)
    history.remember(5)
    with pytest.raises(ValueError, match="version 7 cannot follow version 5"):
        history.remember(7)
    history.restart(5)
    assert history.versions == (5,)
