"""The outlet: what is announced, when it is announced again, who gets a sender, what ends a learner."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from asyncrl.buffers.base import Fenced, Member
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.config.recipe import Buffer, Lora, Recipe, Run
from asyncrl.config.weights import WeightsConfig
from asyncrl.learners import outlet as outlets
from asyncrl.learners.limits import limits_of
from asyncrl.learners.lora import attach, in_dtype, served_weights
from asyncrl.learners.model import load_model
from asyncrl.learners.outlet import Outlet
from asyncrl.staleness import Weights
from asyncrl.weights.base import Late, Recipient, Transport, WeightsError
from asyncrl.weights.image import Image
from asyncrl.weights.manifest import check_fits, combined_checksum, model_tensors, verify_served
from asyncrl.weights.reach import Place, here
from asyncrl.weights.shm import ShmReceiver

LIMIT_S = 20.0
ELSEWHERE = Place(host="b", memory="9", device="cpu")
FORK = Weights(0, 0)
SMALL = Qwen3Config(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    tie_word_embeddings=True,
)


class ByHand:
    """A sender that offers what the test says."""

    def __init__(self, transport: Transport, changed: Callable[[], None]) -> None:
        self.transport, self.changed = transport, changed
        self.served: list[tuple[Weights, list[str]]] = []
        self.offered: dict[str, Any] | None = None
        self.lates: list[Late] = []
        self.closed = False

    @property
    def last(self) -> list[str] | None:
        """For whom it was told last."""
        return self.served[-1][1] if self.served else None

    def serve(self, image: Image, recipients: Sequence[Recipient]) -> None:
        self.served.append((image.weights, [one.name for one in recipients]))

    def offer(self) -> Mapping[str, Any] | None:
        return self.offered

    def late(self) -> Sequence[Late]:
        lates, self.lates = self.lates, []
        return lates

    def measured(self) -> Mapping[str, float]:
        return {"bytes": 5.0, "seconds": 0.5}

    def close(self) -> None:
        self.closed = True


class Bench:
    """An outlet on the reference buffer, and the senders it has asked for."""

    def __init__(self, weights: WeightsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recipe = Recipe(run=Run(name="outlet-test"), buffer=Buffer(max_trajectory_age=1), weights=weights)
        self.buffer = MemoryBuffer("outlet-test", limits_of(self.recipe, max_length=64))
        self.senders: dict[str, ByHand] = {}
        self.refusals: dict[str, str] = {}
        self.stuck: threading.Event | None = None
        monkeypatch.setattr(outlets, "sender", self.make)
        monkeypatch.setattr(outlets, "LOOK_S", 0.02)
        self.outlet = Outlet(self.recipe, self.buffer, stop=asyncio.Event())

    def make(
        self, transport: Transport, config: WeightsConfig, *, run: str, changed: Callable[[], None], **where: str
    ) -> ByHand:
        if self.stuck is not None:
            assert self.stuck.wait(LIMIT_S)
        if transport in self.refusals:
            raise WeightsError(self.refusals[transport])
        self.senders[transport] = ByHand(transport, changed)
        return self.senders[transport]

    async def publish(self, version: int, value: float = 0.0) -> Image:
        self.buffer.model.version = version  # as after the commits of so many steps
        source = [("w", torch.full((4,), value))]
        return await self.outlet.publish(Weights(1, version), source, tied={}, fork=FORK)

    async def announced(self) -> dict[str, Any]:
        found = await self.buffer.announcement()
        assert found is not None
        return dict(found[1])

    async def beat(self, name: str, **told: Any) -> None:
        await self.buffer.beat(Member(name, f"{name}-1"), serving=None, checksum="", progress={}, info=told)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self.outlet.check()
                await asyncio.sleep(0.01)


@pytest_asyncio.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    made: list[Bench] = []

    async def make(**weights: Any) -> Bench:
        bench = Bench(WeightsConfig(**weights), monkeypatch)
        made.append(bench)
        await bench.buffer.new_lineage(parent=None, limits=bench.buffer.limits)
        bench.outlet.start(here())
        return bench

    yield make
    for bench in made:
        await bench.outlet.close()
        assert all(sender.closed for sender in bench.senders.values())


@pytest.mark.asyncio
async def test_a_publication_announces_where_the_image_is_and_the_last_checksums(bench: Any) -> None:
    one = await bench()
    images = [await one.publish(version, float(version)) for version in range(5)]
    document = await one.announced()
    assert (document["lineage"], document["version"], document["fork"]) == (1, 4, {"parent": 0, "version": 0})
    assert document["place"] == msgspec.to_builtins(here())
    assert document["checksums"] == {
        f"1/{n}": images[n].manifest.checksum for n in (2, 3, 4)
    }  # max age 1: those served
    (offer,) = document["offers"]
    staged = ShmReceiver().stage(offer, deadline_s=10.0)
    assert (staged.weights, staged.tensors["w"][0]) == (Weights(1, 4), 4.0)


@pytest.mark.asyncio
async def test_who_is_elsewhere_has_a_sender_before_the_first_batch_and_its_offer_is_announced(bench: Any) -> None:
    one = await bench()
    await one.publish(0)
    before = one.buffer.model.announcements
    await one.buffer.join(Member("far", "far-1"), {})
    await one.beat("far", place=msgspec.to_builtins(ELSEWHERE))
    await one.until(lambda: "collective" in one.senders)
    sender = one.senders["collective"]
    await one.until(lambda: (Weights(1, 0), ["far"]) in sender.served)
    assert one.buffer.model.announcements == before  # there is nothing new to read yet
    sender.offered = {"transport": "collective", "lineage": 1, "version": 0, "port": 7}
    sender.changed()
    await one.until(lambda: one.buffer.model.announcements == before + 1)
    assert [offer["transport"] for offer in (await one.announced())["offers"]] == ["shm", "collective"]
    assert one.outlet.measured() == {"collective": {"bytes": 5.0, "seconds": 0.5}}
    looks = len(sender.served)
    await one.until(lambda: len(sender.served) > looks + 3)
    assert one.buffer.model.announcements == before + 1  # nor after that


@pytest.mark.asyncio
async def test_a_slow_transports_older_offer_stays_announced_beside_newer_weights(bench: Any) -> None:
    one = await bench(transport="file", url="/w")
    await one.publish(0)
    await one.until(lambda: "file" in one.senders)
    one.senders["file"].offered = {"transport": "file", "lineage": 1, "version": 0}
    await one.publish(1)
    offers = (await one.announced())["offers"]
    assert [(offer["transport"], offer["version"]) for offer in offers] == [("shm", 1), ("file", 0)]
    assert one.senders["file"].served[-1] == (Weights(1, 1), [])


@pytest.mark.asyncio
async def test_who_is_late_is_named_once_and_no_collective_transfer_waits_for_it(
    bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one = await bench(deadline_s=0.2)
    await one.buffer.join(Member("far", "far-1"), {})
    await one.beat("far", place=msgspec.to_builtins(ELSEWHERE), weights={"phase": "stage", "weights": [1, 0]})
    await one.publish(0)
    await one.until(lambda: "collective" in one.senders and one.senders["collective"].last == [])
    (late,) = one.outlet.take_late()
    assert (late.member, late.weights, late.phase) == ("far", Weights(1, 0), "stage")
    assert "far is late with weights (1, 0): in phase stage" in caplog.text
    await one.beat("far", place=msgspec.to_builtins(ELSEWHERE), weights={"phase": "activate", "weights": [1, 0]})
    await one.until(lambda: one.senders["collective"].last == ["far"])
    assert one.outlet.take_late() == []


@pytest.mark.asyncio
async def test_who_a_sender_found_late_is_left_out_until_it_moves_on(bench: Any) -> None:
    one = await bench()
    await one.buffer.join(Member("far", "far-1"), {})
    await one.beat("far", place=msgspec.to_builtins(ELSEWHERE), weights={"phase": "stage", "weights": [1, 0]})
    await one.publish(0)
    await one.until(lambda: "collective" in one.senders)
    sender = one.senders["collective"]
    sender.lates = [Late("far", Weights(1, 0), "stage", 0.0)]
    await one.until(lambda: sender.last == [])
    assert [late.member for late in one.outlet.take_late()] == ["far"]


@pytest.mark.asyncio
@pytest.mark.parametrize(("every", "hashed"), [(1, [0, 1, 2, 3]), (2, [0, 2]), (3, [0, 3])])
async def test_the_first_version_and_every_nth_have_checksums(bench: Any, every: int, hashed: list[int]) -> None:
    one = await bench(verify_every=every)
    images = [await one.publish(version, float(version)) for version in range(4)]
    assert [n for n, image in enumerate(images) if image.manifest.checksum] == hashed
    assert list((await one.announced())["checksums"]) == [f"1/{n}" for n in hashed][-3:]


@pytest.mark.asyncio
async def test_what_was_published_unhashed_is_hashed_for_a_collector_that_serves_nothing(bench: Any) -> None:
    one = await bench(verify_every=9)
    await one.publish(0)
    await one.publish(1, 1.0)
    assert list((await one.announced())["checksums"]) == ["1/0"]
    await one.buffer.join(Member("new", "new-1"), {})
    await one.until(lambda: "1/1" in one.outlet._announced["checksums"])
    expected = combined_checksum([("w", torch.full((4,), 1.0))])
    assert (await one.announced())["checksums"]["1/1"] == expected


@pytest.mark.asyncio
async def test_a_transport_of_the_recipe_that_cannot_work_is_the_learners_error(bench: Any) -> None:
    one = await bench(transport="file", url="/w")
    one.refusals["file"] = "no such folder"
    await one.publish(0)
    with pytest.raises(WeightsError, match="no weights over file: no such folder"):
        await one.until(lambda: False)


@pytest.mark.asyncio
async def test_a_sender_that_never_becomes_ready_keeps_nobody_waiting_and_is_named(
    bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one = await bench(deadline_s=0.1)
    one.stuck = threading.Event()
    await one.buffer.join(Member("far", "far-1"), {})
    await one.beat("far", place=msgspec.to_builtins(ELSEWHERE))
    try:
        await one.publish(0)
        await one.until(
            lambda: "no weights over collective: it was not ready within weights.deadline_s 0.1" in caplog.text
        )
        await one.publish(1)
        assert (await one.announced())["version"] == 1
    finally:
        one.stuck.set()
    await one.until(lambda: "collective" in one.outlet.measured())


@pytest.mark.asyncio
async def test_one_that_only_a_collector_wants_is_said_once_and_the_others_go_on(
    bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one = await bench()
    one.refusals["collective"] = "no network"
    await one.buffer.join(Member("far", "far-1"), {})
    await one.beat("far", place=msgspec.to_builtins(ELSEWHERE))
    await one.publish(0)
    await one.until(lambda: "no weights over collective: no network" in caplog.text)
    await one.publish(1)
    assert caplog.text.count("no weights over collective") == 1
    assert (await one.announced())["version"] == 1
    del one.refusals["collective"]
    await one.until(lambda: "collective" in one.senders)


@pytest.mark.asyncio
async def test_an_announcement_that_the_store_has_lost_is_made_again(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await bench()
    await one.publish(1)
    document = await one.announced()
    await one.buffer.join(Member("near", "near-1"), {})
    one.buffer.model.announced = (Weights(1, 0), {"version": 0})  # as a store that lost its newest write
    monkeypatch.setattr(outlets, "REMIND_S", 0.0)
    await one.until(lambda: one.buffer.model.announced[0] == Weights(1, 1))
    assert await one.announced() == document


@pytest.mark.asyncio
async def test_a_learner_that_was_fenced_announces_nothing_more(bench: Any) -> None:
    one = await bench(transport="file", url="/w")
    await one.publish(0)
    await one.until(lambda: "file" in one.senders)
    await one.buffer.new_lineage(parent=Weights(1, 0), limits=one.buffer.limits)
    one.senders["file"].offered = {"transport": "file", "lineage": 1, "version": 0}
    one.senders["file"].changed()
    with pytest.raises(Fenced):
        await one.until(lambda: False)
    with pytest.raises(Fenced):
        await one.publish(1)


@pytest.mark.asyncio
@pytest.mark.parametrize("tied", [True, False])
async def test_masters_in_float32_are_served_in_bfloat16_with_heads_and_buffers(bench: Any, tied: bool) -> None:
    config = Qwen3Config.from_dict({**SMALL.to_dict(), "tie_word_embeddings": tied})
    master = AutoModelForCausalLM.from_config(config)
    master.register_buffer("calls", torch.tensor([3]))
    engine = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    engine.register_buffer("calls", torch.tensor([0]))
    one = await bench()
    served = served_weights(master)
    await one.outlet.publish(Weights(1, 0), in_dtype(served, "bfloat16"), tied=served.tied, fork=FORK)
    (offer,) = (await one.announced())["offers"]
    staged = ShmReceiver().stage(offer, deadline_s=10.0)
    check_fits(engine, staged)
    assert ("lm_head.weight" in staged.tensors) == (not tied)
    engine.load_state_dict(dict(staged.tensors), strict=False)
    engine.tie_weights()
    verify_served(engine, staged.checksum)
    for name, tensor in model_tensors(master)[0]:
        found = engine.state_dict()[name]
        assert torch.equal(found, tensor.to(found.dtype)), name
    assert engine.state_dict()["calls"] == 3


@pytest.mark.asyncio
async def test_of_an_adapter_the_sum_is_announced_by_its_checksum_also_to_who_comes_late(
    bench: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(SMALL)
    base.save_pretrained(tmp_path)
    model = load_model(tmp_path, "float32", "auto")
    attach(model, Lora(r=2), seed=0, base="base")
    one = await bench(verify_every=2, lora="adapter")
    sums: dict[int, str] = {}
    for version in range(2):
        one.buffer.model.version = version
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn(parameter.shape)
        served = served_weights(model)
        sums[version] = combined_checksum(served)
        source = served.factors.items()
        image = await one.outlet.publish(Weights(1, version), source, tied=served.tied, fork=FORK, sums=served)
        assert image.manifest.nbytes == sum(tensor.nbytes for tensor in served.factors.values())
        hashed = version % 2 == 0
        assert image.manifest.served == (sums[version] if hashed else "")
        assert (image.manifest.checksum != "") == hashed
        (offer,) = (await one.announced())["offers"]
        assert ShmReceiver().stage(offer, deadline_s=10.0).checksum == image.manifest.served
    assert (await one.announced())["checksums"] == {"1/0": sums[0]}
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(1.0)  # training goes on: what is proved is the image
    await one.buffer.join(Member("late", "late-1"), {})
    await one.until(lambda: "1/1" in one.outlet._announced["checksums"])
    assert (await one.announced())["checksums"] == {"1/0": sums[0], "1/1": sums[1]}


@pytest.mark.asyncio
async def test_no_segment_is_left_when_it_is_closed(bench: Any, tmp_path: Path) -> None:
    one = await bench()
    image = await one.publish(0)
    assert image.path.exists()
    await one.outlet.close()
    assert not image.path.exists()
