"""An engine that is given adapters alone serves, bit for bit, what it would have been given as whole weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from asyncrl.collectors.engines.live import LiveModel, load_base, load_model
from asyncrl.config.recipe import Lora
from asyncrl.config.weights import WeightsConfig
from asyncrl.learners.lora import attach, in_dtype, served_weights
from asyncrl.learners.model import load_model as load_trained
from asyncrl.staleness import Weights
from asyncrl.weights.adapter import ServedWeights
from asyncrl.weights.base import Recipient, Sender, StagedWeights, WeightsError
from asyncrl.weights.build import receiver, sender
from asyncrl.weights.image import Image, Images
from asyncrl.weights.manifest import combined_checksum, model_tensors
from asyncrl.weights.shm import shm_offer

from .tiny_models import make_model

LOADED: dict[str, Any] = {"attn": "auto", "trust_remote_code": False}
LIMIT_S = 20.0

Folder = Callable[..., Path]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A saved model of an architecture."""
    made: dict[tuple[str, int], Path] = {}

    def make(architecture: str, seed: int = 0) -> Path:
        if (architecture, seed) not in made:
            made[architecture, seed] = tmp_path_factory.mktemp(architecture)
            make_model(architecture, seed=seed).save_pretrained(made[architecture, seed])
        return made[architecture, seed]

    return make


class Learner:
    """A model with an adapter that changes from version to version, and its images."""

    def __init__(self, base: Path, images: Path, *, dtype: str = "float32", lora: Lora | None = None) -> None:
        self.model = load_trained(base, dtype, "auto")
        attach(self.model, lora or Lora(r=3, alpha=6), seed=0, base=str(base))
        self.images, self.dtype = Images("adapters", folder=images), dtype

    def train(self, version: int) -> ServedWeights:
        """What is to be served after some training."""
        generator = torch.Generator().manual_seed(version)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        return served_weights(self.model, self.dtype)

    def merged(self, version: int) -> Image:
        served = self.train(version)
        return self.images.write(Weights(1, version), in_dtype(served, self.dtype), tied=served.tied)

    def alone(self, version: int, **other: object) -> Image:
        served = self.train(version)
        assert served.adapter is not None
        proved = {"served": combined_checksum(in_dtype(served, self.dtype)), **other}
        adapter = msgspec.structs.replace(served.adapter, **proved)
        return self.images.write(Weights(1, version), served.factors.items(), tied=served.tied, adapter=adapter)


@pytest.fixture
def learner(tmp_path: Path, folder: Folder) -> Iterator[Callable[..., Learner]]:
    made: list[Learner] = []

    def make(architecture: str = "qwen3", **options: Any) -> Learner:
        made.append(Learner(folder(architecture), tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.images.close()


def engine(base: Path, dtype: str = "float32", *, adapters: bool = True) -> LiveModel:
    return LiveModel(load_model(base, dtype=dtype, **LOADED), load_base(base, **LOADED) if adapters else None)


def fetched(image: Image) -> StagedWeights:
    return receiver(shm_offer(image)).stage(shm_offer(image), deadline_s=LIMIT_S)


def served(live: LiveModel, staged: StagedWeights) -> dict[str, torch.Tensor]:
    """What the engine computes with after it has taken these."""
    live.stage(staged)
    with torch.inference_mode():  # as the decode thread does
        assert live.activate().checksum == staged.checksum != ""
    return dict(model_tensors(live.model)[0])


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("architecture", "lora"),
    [
        ("qwen3", Lora(r=3, alpha=6)),  # a tied head
        ("llama", Lora(r=1, alpha=0.3, target_modules=["q_proj", "lm_head"])),  # a head of its own, adapted
        ("gpt2", Lora(r=8, alpha=16)),  # Conv1D: weights that lie [in, out]
        ("gemma3", Lora(r=2, alpha=1)),
    ],
)
def test_an_adapter_alone_makes_the_very_weights_that_would_have_been_published(
    learner: Callable[..., Learner], folder: Folder, architecture: str, lora: Lora, dtype: str
) -> None:
    one = learner(architecture, dtype=dtype, lora=lora)
    whole, alone = engine(folder(architecture), dtype, adapters=False), engine(folder(architecture), dtype)
    for version in range(1, 5):
        merged, adapter = fetched(one.merged(version)), fetched(one.alone(version))
        assert adapter.checksum == merged.checksum
        assert sum(t.nbytes for t in adapter.tensors.values()) < sum(t.nbytes for t in merged.tensors.values())
        assert equal(served(whole, merged), served(alone, adapter)), version
        assert alone.verify() == (Weights(1, version), merged.checksum)


def recipient() -> Recipient:
    return Recipient("c", "c-1", None, None, None)


@pytest.mark.parametrize("transport", ["file", "delta"])
def test_over_folders_it_is_the_same_and_only_the_adapter_is_in_the_files(
    learner: Callable[..., Learner], folder: Folder, tmp_path: Path, transport: Any, eventually: Callable[..., bool]
) -> None:
    one = learner(dtype="bfloat16")
    whole, alone = engine(folder("qwen3"), "bfloat16", adapters=False), engine(folder("qwen3"), "bfloat16")
    config = WeightsConfig(transport=transport, url=str(tmp_path / "weights"))
    out: Sender = sender(transport, config, run="r", changed=lambda: None)
    taking = None
    factors = sum(tensor.nbytes for tensor in one.train(0).factors.values())
    try:
        for version in range(1, 4):
            image = one.alone(version)
            out.serve(image, [recipient()])
            assert eventually(LIMIT_S, lambda v=version: (out.offer() or {}).get("version") == v)
            offer = out.offer()
            assert offer is not None
            taking = taking or receiver(offer)
            staged = taking.stage(offer, deadline_s=LIMIT_S)
            assert equal(served(alone, staged), served(whole, fetched(one.merged(version))))
            written = (tmp_path / "weights" / "r" / f"1-{version}" / "model.safetensors").stat().st_size
            assert factors < written < factors + 8192, "the factors and the names of them"
    finally:
        out.close()


def test_over_shared_memory_the_segments_are_as_large_as_the_adapter(learner: Callable[..., Learner]) -> None:
    one = learner()
    factors = sum(tensor.nbytes for tensor in one.train(0).factors.values())
    for version in range(4):
        image = one.alone(version)
        assert factors <= image.path.stat().st_size <= factors + 4096 + 64 * len(image.manifest.tensors)


def test_what_no_adapter_changes_is_there_once_and_the_rest_takes_turns(
    learner: Callable[..., Learner], folder: Folder
) -> None:
    one, live = learner(), engine(folder("qwen3"))
    places = []
    for version in range(6):
        found = served(live, fetched(one.alone(version)))
        places.append({name: tensor.data_ptr() for name, tensor in found.items()})
        assert all(place % 64 == 0 for place in places[-1].values()), "as mapped weights lie"
    adapted = set(one.train(0).adapter.weights)  # type: ignore[union-attr]
    for name in places[0]:
        turns = [place[name] for place in places]
        if name in adapted:
            assert turns[0] == turns[2] == turns[4] != turns[1] == turns[3]
        else:
            assert len(set(turns)) == 1


def test_no_segment_is_held_once_an_adapter_is_staged(learner: Callable[..., Learner], folder: Folder) -> None:
    one, live = learner(), engine(folder("qwen3"))
    for version in range(8):
        served(live, fetched(one.alone(version)))
    assert len(one.images.segments) == 2


@pytest.mark.parametrize("order", ["amam", "maam", "aamm", "mama"])
def test_adapters_and_whole_weights_may_follow_one_another(
    learner: Callable[..., Learner], folder: Folder, order: str
) -> None:
    one, live = learner(), engine(folder("qwen3"))
    for version, kind in enumerate(order):
        image = one.alone(version) if kind == "a" else one.merged(version)
        if version % 2:  # as a copy, whose memory is used again
            tensors = {name: tensor.clone() for name, tensor in fetched(image).tensors.items()}
            staged = replace(fetched(image), tensors=tensors, mapped=False)
        else:
            staged = fetched(image)
        expected = combined_checksum(one.train(version))
        found = served(live, staged)
        assert combined_checksum(found.items()) == expected == staged.checksum


def test_an_adapter_of_another_base_is_refused_by_name_and_the_old_weights_go_on(
    learner: Callable[..., Learner], folder: Folder
) -> None:
    one = learner()
    live = engine(folder("qwen3", seed=5))
    live.stage(fetched(one.merged(0)))
    before = live.activate()
    with pytest.raises(WeightsError, match=rf"are an adapter of {folder('qwen3')} \(xxh3 \w+\), but this engine"):
        live.stage(fetched(one.alone(1)))
    assert live.verify() == (Weights(1, 0), before.checksum)


def test_an_engine_without_a_base_refuses_adapters(learner: Callable[..., Learner], folder: Folder) -> None:
    live = engine(folder("qwen3"), adapters=False)
    with pytest.raises(WeightsError, match="are an adapter, and this engine keeps no base"):
        live.stage(fetched(learner().alone(1)))


def test_other_ties_are_refused(learner: Callable[..., Learner], folder: Folder) -> None:
    live = engine(folder("qwen3"))
    with pytest.raises(WeightsError, match="expected tied tensors"):
        live.stage(replace(fetched(learner().alone(1)), tied={}))


def test_control_a_sum_that_is_not_the_published_one_is_never_served(
    learner: Callable[..., Learner], folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, live = learner(), engine(folder("qwen3"))
    before = served(live, fetched(one.alone(0)))
    was = {name: tensor.clone() for name, tensor in before.items()}
    live.stage(fetched(one.alone(1, scale=2.0001)))  # the factors are right by their checksums, the sum is not
    with pytest.raises(WeightsError, match="has checksum"):
        live.activate()
    assert live.verify()[0] == Weights(1, 0)
    assert equal(dict(model_tensors(live.model)[0]), was)

    monkeypatch.setattr("asyncrl.collectors.engines.live.verify_served", lambda model, checksum: None)
    live.stage(fetched(one.alone(2, scale=2.0001)))
    live.activate()
    assert live.verify()[1] != combined_checksum(one.train(2)), "without the guard it would be"


def test_a_base_that_was_damaged_after_it_was_proved_is_found(learner: Callable[..., Learner], folder: Folder) -> None:
    base = load_base(folder("qwen3"), **LOADED)
    live = LiveModel(load_model(folder("qwen3"), dtype="float32", **LOADED), base)
    one = learner()
    served(live, fetched(one.alone(0)))
    base.tensors["model.layers.0.mlp.up_proj.weight"].view(torch.uint8)[0, 0] ^= 1
    live.stage(fetched(one.alone(1)))
    with pytest.raises(WeightsError, match="has checksum"):
        live.activate()
    assert live.verify()[0] == Weights(1, 0)
