"""Two real engines in one collector, of which one dies, runs out of memory or hangs in the middle of its batch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.buffers.audit import ledger_problems
from asyncrl.buffers.base import State
from asyncrl.collectors import fleet
from asyncrl.collectors.engines import transformers
from asyncrl.collectors.engines.decode import Decoder
from asyncrl.collectors.engines.transformers import TransformersEngine
from asyncrl.collectors.seats import Seats
from asyncrl.schema import pack
from tests.collector.real import MAX_LENGTH, check_logprobs, versions_of
from tests.engines.tiny_models import full_forward, make_model, request, staged

pytestmark = [pytest.mark.faults, pytest.mark.asyncio]

STEPS = 5
FAULT_AT = 40  # decode steps of the first engine: in its second or third batch


class Fault:
    """What happens in the decode thread of the first engine, once, and what became of the requests it had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
        self.lost: dict[str, list[int]] = {}  # request -> its tokens by then
        self.asked: list[tuple[str, str, int]] = []  # engine, request, tokens of its answer that were there already
        self.ended: list[str] = []  # engine, of each answer between the fault and the first request that goes on
        steps, left = Decoder.step, [FAULT_AT]
        generate = TransformersEngine.generate

        def step(decoder, served):
            if threading.current_thread().name == "decode-c0/0" and left[0] >= 0:
                left[0] -= 1
                if left[0] < 0:
                    self.lost = {g.request.id: list(g.tokens) for g in decoder.running}
                    happens()
            return steps(decoder, served)

        async def asked(engine, request):
            self.asked.append((engine.name, request.id, request.position))
            answer = await generate(engine, request)
            if self.lost and not self.again:
                self.ended.append(engine.name)
            return answer

        monkeypatch.setattr(Decoder, "step", step)
        monkeypatch.setattr(TransformersEngine, "generate", asked)

    @property
    def again(self) -> dict[str, int]:
        """Lost requests that were asked again, and how many of their tokens were not sampled again."""
        first = {id for _, id, _ in self.asked if id in self.lost and [i for _, i, _ in self.asked].count(id) > 1}
        return {id: max(kept for _, i, kept in self.asked if i == id) for id in first}


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def happening(kind: str, released: threading.Event) -> Callable[[], None]:
    def dies() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    def out_of_memory() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def hangs() -> None:
        released.wait(30.0)

    return {"dies": dies, "out of memory": out_of_memory, "hangs": hangs}[kind]


async def trained(kit, model_path, publisher, **collector):
    """A run of STEPS steps, its learner and its buffer."""
    recipe = kit.recipe(
        run={"max_steps": STEPS},
        collector={
            "engine": {"type": "transformers", "slots": 4},
            "engines": 2,
            "group_size": 4,
            "sampling": {"max_tokens": 24},
            "score_timeout_s": 1.5,
            **collector,
        },
        model={"max_length": MAX_LENGTH},
    )
    buffer = kit.buffer(recipe)
    kept, publish = versions_of(model_path, publisher)
    learner = kit.learner(buffer, publish)
    async with kit.collecting(recipe, buffer, model_path=model_path):
        await learner.start()
        for _ in range(STEPS):
            await learner.step()
    for batches in learner.batches.values():
        check_logprobs(pack(batches), kept)
    return learner, buffer


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(fleet, "FIRST_BACKOFF_S", 0.05)
    monkeypatch.setattr(transformers, "_CLOSE_S", 0.2)


@pytest.mark.parametrize("kind", ["dies", "out of memory", "hangs"])
async def test_what_a_lost_engine_had_sampled_is_trained_and_nothing_is_sampled_twice(
    kit, model_path, publisher, monkeypatch, released, kind
):
    fault = Fault(monkeypatch, happening(kind, released))
    learner, buffer = await trained(kit, model_path, publisher, group_timeout_s=2.0)
    stats = await buffer.stats()
    assert ledger_problems(*(await buffer.snapshot()), buffer.limits) == []
    assert stats.states[State.TRAINED] == 2 * STEPS
    assert {ticket.losses for ticket in buffer.model.all.values()} == {0}
    assert fault.lost
    assert all(fault.lost.values())
    assert fault.again == {id: len(tokens) for id, tokens in fault.lost.items()}
    assert "c0/1" in fault.ended or kind != "hangs", "the other engine goes on meanwhile"
    rows = {
        f"{row['ticket']}.{row['attempt']}.{row['member']}": row
        for batches in learner.batches.values()
        for batch in batches
        for row in batch.to_pylist()
    }
    assert any(id in rows for id in fault.lost)
    for id, tokens in fault.lost.items():
        if (row := rows.get(id)) is not None:  # what was still held when the run ended is in no batch
            assert row["token_ids"][row["prompt_length"] :][: len(tokens)] == tokens
            assert "c0/0" in row["engine"]


async def test_without_partial_answers_the_same_tokens_are_sampled_again(
    kit, model_path, publisher, monkeypatch, released
):
    """Negative control of the test above."""
    fault = Fault(monkeypatch, happening("dies", released))
    monkeypatch.setattr(TransformersEngine, "partial", lambda self, request_id: None)
    _, buffer = await trained(kit, model_path, publisher)
    assert {ticket.losses for ticket in buffer.model.all.values()} == {0}
    assert fault.again == dict.fromkeys(fault.lost, 0)


@asynccontextmanager
async def two_engines(path, *versions) -> AsyncIterator[fleet.Fleet]:
    """Each serves weights of its own."""

    def engine(name: str) -> TransformersEngine:
        return TransformersEngine(
            name, path, slots=2, max_length=None, dtype="float32", attn="auto", trust_remote_code=False
        )

    found = fleet.Fleet([lambda: engine("c0/0"), lambda: engine("c0/1")])
    await found.start()
    for host, version in zip(found.hosts, versions, strict=True):
        await host.engine.stage(staged(make_model(seed=version), 1, version))
        await host.engine.activate()
    try:
        yield found
    finally:
        await found.close()


@pytest.mark.parametrize("newer", [1, 2])
async def test_an_answer_of_two_engines_is_the_one_that_one_would_have_given_and_each_token_has_its_own_weights(
    kit, tmp_path, monkeypatch, released, newer
):
    """Under the same weights no draw differs; under newer ones those before the loss are the old ones', exactly."""
    make_model(seed=0).save_pretrained(tmp_path)
    asked = request("r", max_tokens=100, seed=7)
    async with asyncio.timeout(kit.limit_s), two_engines(tmp_path, 1, newer) as found:
        undisturbed = await found.hosts[0].engine.generate(replace(asked, id="undisturbed"))
        fault = Fault(monkeypatch, happening("dies", released))
        places = Seats(found, may=lambda _: True, wait_s=0.0)
        answer = await places.generate(asked)
    tokens, kept = answer.token_ids.tolist(), len(fault.lost["r"])
    assert places.engines == {"c0/0", "c0/1"}
    assert (len(tokens), answer.finish_reason) == (100, "length")
    assert tokens[:kept] == undisturbed.token_ids.tolist()[:kept]
    expected = [full_forward(make_model(seed=version), asked.token_ids, answer) for version in (1, newer)]
    np.testing.assert_allclose(answer.logprobs[:kept], expected[0][:kept], atol=2e-5)
    np.testing.assert_allclose(answer.logprobs[kept:], expected[1][kept:], atol=2e-5)
    if newer == 1:
        assert tokens == undisturbed.token_ids.tolist()
        assert len(answer.spans) == 1
    else:
        assert [(s.weights.version, s.start, s.end) for s in answer.spans] == [(1, 0, kept), (2, kept, 100)]


async def test_an_engine_that_dies_idle_is_found_by_its_health_check_and_takes_requests_with_current_weights_only(
    kit, model_path, publisher, monkeypatch
):
    monkeypatch.setattr(fleet, "CHECK_S", 0.05)
    served, generate = [], TransformersEngine.generate

    async def asked(engine, request):
        served.append((engine, engine.serving))
        return await generate(engine, request)

    monkeypatch.setattr(TransformersEngine, "generate", asked)
    made: list[TransformersEngine] = []
    init = TransformersEngine.__init__
    monkeypatch.setattr(TransformersEngine, "__init__", lambda self, *a, **k: made.append(self) or init(self, *a, **k))
    recipe = kit.recipe(
        collector={"engine": {"type": "transformers", "slots": 2}, "engines": 2, "sampling": {"max_tokens": 4}},
        model={"max_length": MAX_LENGTH},
    )
    buffer = kit.buffer(recipe)
    _, publish = versions_of(model_path, publisher)
    learner = kit.learner(buffer, publish)
    async with kit.collecting(recipe, buffer, model_path=model_path) as task:
        await learner.start()
        await learner.step()
        await kit.until(lambda: all(engine.serving == learner.weights for engine in made), task)
        await kit.until(lambda: not any(engine._active for engine in made), task)  # the window is full
        await made[0].close()
        await kit.until(lambda: len(made) == 3, task)
        await kit.until(lambda: made[2].serving == learner.weights, task)
        for _ in range(5):
            await learner.step()
    first = next(weights for engine, weights in served if engine is made[2])
    assert first >= (1, 1)
    assert {ticket.losses for ticket in buffer.model.all.values()} == {0}
