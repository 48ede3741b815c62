"""An engine that serves from the learner's own memory: nothing is copied, ties hold, and old memory is let go of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.collectors.engines.live import LiveModel
from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights, WeightsError
from asyncrl.weights.image import Images
from asyncrl.weights.manifest import combined_checksum, model_tensors
from asyncrl.weights.shm import ShmReceiver, shm_offer

from .tiny_models import ARCHITECTURES, make_model, staged


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Images]:
    images = Images("engine", folder=tmp_path)
    yield images
    images.close()


def published(images: Images, version: int, *, architecture: str = "qwen3", mapped: bool = True) -> StagedWeights:
    """The model made with seed `version`, through shared memory."""
    tensors, tied = model_tensors(make_model(architecture, seed=version))
    offer = shm_offer(images.write(Weights(1, version), tensors, tied=tied))
    return ShmReceiver(mapped=mapped).stage(offer, deadline_s=10)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([[1, 2, 3, 4]])).logits
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mapped_weights_are_served_where_they_lie_and_compute_the_same(images: Images, architecture: str) -> None:
    live = LiveModel(make_model(architecture, seed=99))
    heads = live.model.get_input_embeddings().weight, live.model.get_output_embeddings().weight
    for version in (1, 2, 3):
        weights = published(images, version, architecture=architecture)
        live.stage(weights)
        with torch.inference_mode():  # as the decode thread does
            assert live.activate().checksum == weights.checksum
        tensors, _ = model_tensors(live.model)
        assert [tensor.data_ptr() for _, tensor in tensors] == [t.data_ptr() for t in weights.tensors.values()]
        assert torch.equal(logits(live.model), logits(make_model(architecture, seed=version)))
    assert heads == (live.model.get_input_embeddings().weight, live.model.get_output_embeddings().weight)


def test_a_tied_head_follows_the_mapped_source(images: Images) -> None:
    live = LiveModel(make_model(seed=99))
    live.stage(published(images, 2))
    live.activate()
    assert live.model.lm_head.weight.data_ptr() == live.model.get_input_embeddings().weight.data_ptr()
    assert torch.equal(live.model.lm_head.weight, make_model(seed=2).lm_head.weight)


def test_what_is_served_and_staged_is_all_that_stays_locked(images: Images) -> None:
    live = LiveModel(make_model(seed=99))
    for version in range(12):
        live.stage(published(images, version))
        if version % 3 == 2:
            live.activate()  # two of three are staged in vain
        assert len(images.segments) <= 3
    for version in range(12, 15):
        live.stage(published(images, version))
        live.activate()
    images.write(Weights(1, 15), model_tensors(make_model(seed=15))[0], tied={})
    assert len(images.segments) == 3  # the newest, the served one, and the next one's


def test_what_is_served_stays_good_whatever_the_learner_publishes(images: Images) -> None:
    live = LiveModel(make_model(seed=99))
    live.stage(published(images, 0))
    served = live.activate()
    for version in range(1, 6):
        published(images, version)
        assert live.verify() == (Weights(1, 0), served.checksum)
    images.close()
    assert live.verify() == (Weights(1, 0), served.checksum)


def test_memory_that_was_overwritten_under_an_engine_is_found_when_it_is_verified(images: Images) -> None:
    """Nobody who keeps to the locks does that; it is what verification on demand is for."""
    live = LiveModel(make_model(seed=99))
    live.stage(published(images, 0))
    served = live.activate()
    with open(images.segments[0], "r+b") as file:
        file.seek(5000)
        file.write(b"\xff")
    assert live.verify()[1] != served.checksum


def test_mapped_weights_that_differ_are_given_back_and_the_old_ones_served(images: Images) -> None:
    live = LiveModel(make_model(seed=99))
    live.stage(published(images, 0))
    served = live.activate()
    live.stage(published(images, 1))
    with open(images.segments[1], "r+b") as file:
        file.seek(5000)
        file.write(b"\xff")
    with pytest.raises(WeightsError, match="has checksum"):
        live.activate()
    assert live.verify() == (Weights(1, 0), served.checksum)
    for version in range(2, 5):
        published(images, version)
    assert len(images.segments) == 3


@pytest.mark.parametrize("order", [(True, False, True, True), (False, False, True, False), (False, True, False, False)])
def test_mapped_and_copied_weights_may_follow_one_another(images: Images, order: tuple[bool, ...]) -> None:
    live = LiveModel(make_model(seed=99))
    for version, mapped in enumerate(order):
        live.stage(published(images, version, mapped=mapped) if version else staged(make_model(seed=0), 1, 0))
        live.activate()
        assert combined_checksum(model_tensors(live.model)[0]) == combined_checksum(
            model_tensors(make_model(seed=version))[0]
        )


def test_copies_take_turns_in_the_same_memory() -> None:
    live = LiveModel(make_model(seed=99))
    places = []
    for version in range(6):
        live.stage(staged(make_model(seed=version), 1, version))
        live.activate()
        places.append(live.model.get_input_embeddings().weight.data_ptr())
    assert places[0] == places[2] == places[4] != places[1] == places[3]
