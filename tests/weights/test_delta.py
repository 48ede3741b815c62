"""Transport `delta`: what is written when, and that whoever receives it has the published bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asyncrl.staleness import Weights
from asyncrl.weights import delta, file
from asyncrl.weights.base import WeightsError, WeightsGone
from asyncrl.weights.delta import DeltaReceiver, DeltaSender
from asyncrl.weights.manifest import tensor_bytes
from tests.weights.folders import Learner, Tensors, recipient


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Learner]:
    sender = DeltaSender("r", str(tmp_path / "url"), deadline_s=30, anchor_every=5, changed=lambda: None)
    learner = Learner(tmp_path, sender)
    yield learner
    learner.close()


class Model:
    """Tensors of several types, a few elements of which change with each version."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.tensors: Tensors = [
            ("embedding", torch.randn(200, 64).bfloat16()),
            ("norm", torch.randn(64)),
            ("mask", torch.zeros(100, dtype=torch.bool)),
            ("empty", torch.empty(0)),
            ("steps", torch.tensor(0)),
            ("last", torch.empty(0, 3)),
        ]

    def step(self, share: float = 0.01) -> Tensors:
        result = []
        for name, tensor in self.tensors:
            changed = tensor.clone()
            bits = changed.view(-1).view(torch.uint8).numpy().reshape(-1, tensor.element_size())
            where = self.random.random(len(bits)) < share
            bits[where, 0] ^= 1
            result.append((name, changed))
        self.tensors = result
        return result


def check(offer: Any, tensors: Tensors, receiver: DeltaReceiver | None = None) -> Any:
    staged = (receiver or DeltaReceiver()).stage(json.loads(json.dumps(offer)), deadline_s=30)
    assert list(staged.tensors) == [name for name, _ in tensors]
    for name, tensor in tensors:
        assert tensor_bytes(name, staged.tensors[name]) == tensor_bytes(name, tensor)
    return staged


def folder(tmp_path: Path, version: int) -> Path:
    return tmp_path / "url" / "r" / f"1-{version}"


def names(tmp_path: Path, version: int) -> set[str]:
    return {path.name for path in folder(tmp_path, version).iterdir()}


WHOLE, CHANGES = {"manifest.json", "model.safetensors"}, {"manifest.json", "delta.bin"}


@pytest.mark.parametrize("hashed", [True, False])
def test_followers_and_late_joiners_have_the_published_bits(learner: Learner, tmp_path: Path, hashed: bool) -> None:
    model, follower, serving = Model(), DeltaReceiver(), None
    for version in range(12):
        tensors = model.step()
        offer = learner.publish(
            Weights(1, version), tensors, tied={"head": "norm"}, hashed=hashed, recipients=[recipient("a", serving)]
        )
        serving = check(offer, tensors, follower).weights
        late = check(offer, tensors)
        assert late.tied == {"head": "norm"}
        assert learner.image is not None
        assert late.checksum == learner.image.manifest.checksum
        expected = WHOLE if version == 0 else WHOLE | CHANGES if version % 5 == 0 else CHANGES
        assert names(tmp_path, version) == expected
    assert learner.sender.measured()["whole"] == 3
    assert learner.sender.measured()["deltas"] == 11
    assert 0.005 < learner.sender.measured()["density"] < 0.02


def test_what_is_staged_stays_as_it_is_when_more_is_staged(learner: Learner) -> None:
    model, follower = Model(), DeltaReceiver()
    before = model.step()
    first = check(learner.publish(Weights(1, 0), before), before, follower)
    after = model.step()
    check(learner.publish(Weights(1, 1), after), after, follower)
    for name, tensor in before:
        assert tensor_bytes(name, first.tensors[name]) == tensor_bytes(name, tensor)


def test_a_collector_that_missed_versions_fetches_one_delta_more_and_none_that_it_missed(
    learner: Learner, tmp_path: Path
) -> None:
    model, follower = Model(), DeltaReceiver()
    for version in range(4):
        tensors = model.step()
        offer = learner.publish(Weights(1, version), tensors, recipients=[recipient("a", Weights(1, 0))])
        if version == 0:
            check(offer, tensors, follower)
    for version in (1, 2):
        (folder(tmp_path, version) / "delta.bin").unlink()
    check(offer, tensors, follower)
    check(offer, tensors)


def test_a_version_that_changed_much_is_written_whole(learner: Learner, tmp_path: Path) -> None:
    model, follower = Model(), DeltaReceiver()
    for version, share in enumerate([1.0, 0.01, 0.6, 0.01]):
        tensors = model.step(share)
        check(learner.publish(Weights(1, version), tensors), tensors, follower)
    assert [names(tmp_path, version) for version in range(4)] == [WHOLE, CHANGES, WHOLE, CHANGES]


def test_other_tensors_are_written_whole(learner: Learner, tmp_path: Path) -> None:
    follower = DeltaReceiver()
    for version, tensors in enumerate([[("a", torch.ones(4))], [("b", torch.ones(4))], [("b", torch.ones(5))]]):
        check(learner.publish(Weights(1, version), tensors), tensors, follower)
        assert names(tmp_path, version) == WHOLE


def test_a_base_that_is_not_what_it_should_be_is_found_and_dropped(
    learner: Learner, caplog: pytest.LogCaptureFixture
) -> None:
    model, follower = Model(), DeltaReceiver()
    tensors = model.step()
    check(learner.publish(Weights(1, 0), tensors), tensors, follower)
    assert follower._kept is not None
    follower._kept[1][70] ^= 1
    tensors = model.step()
    check(learner.publish(Weights(1, 1), tensors), tensors, follower)
    assert "1 of 6 tensors differ: embedding" in caplog.text
    assert "beginning again with a whole version" in caplog.text


def test_bytes_are_compared_even_where_the_recipe_asks_for_no_verification(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, follower = Model(), DeltaReceiver()
    tensors = model.step()
    offer = learner.publish(Weights(1, 0), tensors)
    check(offer, tensors, follower)

    def damage() -> Any:
        assert follower._kept is not None
        follower._kept[1][70] ^= 1
        return follower.stage(offer, deadline_s=30, verify=False).tensors["embedding"]

    assert tensor_bytes("", damage()) == tensor_bytes("", tensors[0][1])
    monkeypatch.setattr(file, "compare", lambda *_, **__: None)  # and without the guard, the damage is served
    assert tensor_bytes("", damage()) != tensor_bytes("", tensors[0][1])


def test_a_damaged_delta_is_an_error_that_names_it_unless_a_whole_version_leads_past_it(
    learner: Learner, tmp_path: Path
) -> None:
    model, follower, serving = Model(), DeltaReceiver(), None
    for version in range(2):
        tensors = model.step()
        offer = learner.publish(Weights(1, version), tensors, recipients=[recipient("a", serving)])
        if version == 0:
            serving = check(offer, tensors, follower).weights
    path = folder(tmp_path, 1) / "delta.bin"
    content = path.read_bytes()
    for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1]), b"", b"something else"):
        path.write_bytes(damaged)
        with pytest.raises(WeightsError, match=rf"1-1/delta\.bin: expected {len(content)} bytes of xxh3 \w+, found"):
            check(offer, tensors, follower)
    path.unlink()
    with pytest.raises(WeightsGone, match=r"1-1/delta\.bin has been removed"):
        check(offer, tensors, follower)
    path.write_bytes(content)
    check(offer, tensors, follower)

    for version in range(2, 6):  # 1-5 is an anchor
        tensors = model.step()
        offer = learner.publish(Weights(1, version), tensors, recipients=[recipient("a", serving)])
    (folder(tmp_path, 5) / "delta.bin").write_bytes(b"damaged")
    check(offer, tensors, follower)


def test_a_learner_whose_own_deltas_are_gone_goes_on_with_a_whole_version(
    learner: Learner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, follower, serving = Model(), DeltaReceiver(), None
    for version in range(4):
        tensors = model.step()
        offer = learner.publish(Weights(1, version), tensors, recipients=[recipient("a", serving)])
        serving = check(offer, tensors, follower).weights
        if version == 2:
            (folder(tmp_path, 2) / "delta.bin").unlink()
    assert "the next weights are written whole: " in caplog.text
    assert names(tmp_path, 3) == WHOLE


def test_anchors_are_files_as_transport_file_writes_them(learner: Learner, tmp_path: Path) -> None:
    tensors = Model().step()
    learner.publish(Weights(1, 0), tensors)
    found = load_file(folder(tmp_path, 0) / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors)


def test_all_that_an_offer_needs_is_kept_and_no_more(
    learner: Learner, tmp_path: Path, eventually: Callable[..., bool]
) -> None:
    model, serving = Model(), None
    for version in range(23):
        tensors = model.step()
        offer = learner.publish(Weights(1, version), tensors, recipients=[recipient("a", serving)])
        check(offer, tensors)
        serving = Weights(1, version)
    kept = [f"1-{version}" for version in range(15, 23)]
    assert [link["version"] for link in offer["chain"]] == list(range(15, 23))
    assert eventually(20, lambda: sorted(path.name for path in (tmp_path / "url" / "r").glob("1-*")) == kept)


def test_an_offer_whose_chain_does_not_end_with_it_is_refused(learner: Learner) -> None:
    offer = learner.publish(Weights(1, 0), Model().step())
    for chain in ([], [{**offer["chain"][0], "version": 1}]):
        with pytest.raises(WeightsError, match=f"its chain of {len(chain)} versions does not end with it"):
            delta.DeltaReceiver().stage({**offer, "chain": chain}, deadline_s=30)
