"""The engine from outside: what is sampled, with which log-probability, under which weights; the same over processes of
its own and over a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from asyncrl.collectors.engines import vllm_base as adapter
from asyncrl.collectors.engines.base import Completion, KvMode, Request
from asyncrl.collectors.engines.spans import Served
from asyncrl.collectors.engines.transformers import TransformersEngine
from asyncrl.collectors.engines.vllm_base import VllmBase
from asyncrl.collectors.engines.vllm_client import VllmClient
from asyncrl.staleness import Weights
from asyncrl.weights.base import WeightsError
from asyncrl.weights.manifest import combined_checksum

from .conftest import START_S
from .models import SLOTS, TOLERANCE, full_forward, next_weights, replay, request, staged

# The first test of each kind of engine waits for its start as well.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(START_S + 120)]

PROMPT = (1, 2, 3, 4, 5)
LONG = tuple(range(60)) * 5  # 300 tokens: two whole blocks of vLLM's cache, which has 128 a block on a CPU


async def until_progress(engine: VllmBase, ids: Sequence[str], tokens: int) -> None:
    async with asyncio.timeout(60):
        while min(map(engine.progress, ids)) < tokens:  # noqa: ASYNC110 - progress is polled by contract
            await asyncio.sleep(0.005)


def begin(engine: VllmBase, *requests: Request) -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(engine.generate(request)) for request in requests]


async def activate(engine: VllmBase, model: PreTrainedModel, kv: KvMode = "keep") -> Weights:
    weights = next_weights(engine)
    await engine.stage(staged(model, weights))
    assert await engine.activate(kv) == weights == engine.serving
    return weights


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_logprobs_are_those_of_a_plain_forward(
    engine: VllmBase, model: PreTrainedModel, temperature: float
) -> None:
    requests = [request(f"r{n}", LONG[: 5 + 60 * n], seed=n, temperature=temperature, max_tokens=40) for n in range(6)]
    for r, completion in zip(requests, await asyncio.gather(*begin(engine, *requests)), strict=True):
        assert completion.token_ids.dtype == completion.versions.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        assert (len(completion.token_ids), completion.finish_reason) == (40, "length")
        assert 0 < completion.first_token <= completion.done
        expected = full_forward(model, r.token_ids, completion, temperature=temperature or 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)


async def test_greedy_answers_are_those_of_the_transformers_engine(
    engine: VllmBase, model: PreTrainedModel, saved: Path
) -> None:
    other = TransformersEngine(
        "e1", saved, slots=4, max_length=None, dtype="float32", attn="auto", trust_remote_code=False
    )
    await other.start()
    try:
        await other.stage(staged(model, Weights(1, 1)))
        await other.activate()
        requests = [request(f"r{n}", LONG[: 1 + 7 * n], temperature=0.0, max_tokens=60) for n in range(4)]
        found = await asyncio.gather(*(engine.generate(r) for r in requests))
        expected = await asyncio.gather(*(other.generate(r) for r in requests))
    finally:
        await other.close()
    for one, two in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == two.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=TOLERANCE)


async def test_members_differ_by_seed_and_a_seed_says_what_is_sampled(engine: VllmBase) -> None:
    members = await asyncio.gather(*begin(engine, *(request(f"m{n}", seed=n) for n in range(8))))
    assert len({tuple(completion.token_ids.tolist()) for completion in members}) == 8
    again = await engine.generate(request("again", seed=3))
    assert again.token_ids.tolist() == members[3].token_ids.tolist()


async def test_what_goes_on_draws_other_numbers_than_what_it_goes_on_from(engine: VllmBase) -> None:
    whole = await engine.generate(request("a", seed=7, max_tokens=30))
    fresh, rest = (replace(request("b", seed=7, max_tokens=30), position=position) for position in (0, 10))
    assert (await engine.generate(fresh)).token_ids.tolist() == whole.token_ids.tolist()
    assert (await engine.generate(rest)).token_ids.tolist() != whole.token_ids.tolist()


async def test_a_stop_token_ends_the_answer_and_is_part_of_it(engine: VllmBase) -> None:
    free = await engine.generate(request("a", seed=3))
    stop = int(free.token_ids[4])
    first = free.token_ids.tolist().index(stop)
    stopped = await engine.generate(request("a", seed=3, stop_token_ids=(60, stop)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == free.token_ids.tolist()[: first + 1]
    assert len(stopped.logprobs) == len(stopped.versions) == first + 1


async def test_more_requests_than_slots_all_finish_and_slots_are_counted(engine: VllmBase) -> None:
    before = engine.generated_tokens
    assert (engine.slots, engine.free_slots) == (SLOTS, SLOTS)
    tasks = begin(engine, *(request(f"r{n}", seed=n, max_tokens=1 + n) for n in range(10)))
    await asyncio.sleep(0)
    assert engine.free_slots == 0
    assert [len(completion.token_ids) for completion in await asyncio.gather(*tasks)] == list(range(1, 11))
    assert engine.free_slots == SLOTS
    assert engine.generated_tokens - before == 55


async def test_abort_returns_the_partial_of_what_runs_and_nothing_of_what_waits(
    engine: VllmBase, model: PreTrainedModel
) -> None:
    running = [request(f"running{n}", max_tokens=1500, seed=n) for n in range(SLOTS)]
    tasks = begin(engine, *running)
    await until_progress(engine, [r.id for r in running], 3)
    (queued,) = begin(engine, request("queued"))
    await asyncio.sleep(0)
    engine.abort(["queued", "unknown", *(r.id for r in running)])
    nothing = await queued
    assert (nothing.finish_reason, len(nothing.token_ids), nothing.spans) == ("abort", 0, ())
    for partial in await asyncio.gather(*tasks):
        assert partial.finish_reason == "abort"
        assert 3 <= len(partial.token_ids) == len(partial.logprobs) == len(partial.versions) < 1500
        np.testing.assert_allclose(partial.logprobs, full_forward(model, PROMPT, partial), atol=TOLERANCE)
    assert len((await engine.generate(request("next"))).token_ids) == 12


async def test_a_cancelled_generate_frees_its_slot(engine: VllmBase) -> None:
    tasks = begin(engine, *(request(f"r{n}", max_tokens=1500) for n in range(SLOTS)))
    await until_progress(engine, ["r0"], 1)
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
    assert engine.free_slots == SLOTS
    async with asyncio.timeout(30):  # 1500 tokens take longer
        assert (await engine.generate(request("next"))).finish_reason == "length"


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_running_requests_survive_an_activation_with_one_span_per_stretch(
    engine: VllmBase, model: PreTrainedModel, other: PreTrainedModel, kv: KvMode
) -> None:
    first, before, paused = engine.serving, engine.checksum, engine.paused_s
    assert first is not None
    requests = [request(f"r{n}", LONG[: 5 + 50 * n], seed=n, max_tokens=300) for n in range(SLOTS)]
    tasks = begin(engine, *requests)
    await until_progress(engine, [r.id for r in requests], 20)
    second = await activate(engine, other, kv)
    assert engine.paused_s > paused
    assert engine.checksum == staged(other, second).checksum != before
    models = {first.version: model, second.version: other}
    for r, completion in zip(requests, await asyncio.gather(*tasks), strict=True):
        assert (len(completion.token_ids), completion.finish_reason) == (300, "length")
        old, new = completion.spans
        assert [(old.weights, old.checksum), (new.weights, new.checksum)] == [
            (first, before),
            (second, engine.checksum),
        ]
        assert old.start == 0
        assert 20 <= old.end == new.start
        assert new.end == 300
        assert completion.versions.tolist() == [first.version] * old.end + [second.version] * (300 - old.end)
        mixed = replay(models, r.token_ids, completion)
        whole = {version: full_forward(m, r.token_ids, completion) for version, m in models.items()}
        recomputed = torch.cat([whole[first.version][: old.end], whole[second.version][old.end :]])
        expected, wrong = (mixed, recomputed) if kv == "keep" else (recomputed, mixed)
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
        # Negative control: the other mode, and one token under the other version, give other numbers.
        assert np.abs(completion.logprobs - wrong.numpy())[old.end :].max() > 100 * TOLERANCE
        assert abs(completion.logprobs[old.end] - whole[first.version][old.end]) > TOLERANCE
        assert abs(completion.logprobs[old.end - 1] - whole[second.version][old.end - 1]) > TOLERANCE


async def prefix_twice(engine: VllmBase, other: PreTrainedModel, monkeypatch: pytest.MonkeyPatch | None) -> float:
    """The error of an answer whose prompt was in vLLM's cache before the activation. monkeypatch: without the salt."""
    if monkeypatch is not None:
        prompt_of = adapter.prompt_of
        monkeypatch.setattr(adapter, "prompt_of", lambda r, served: prompt_of(r, Served(Weights(0, 0), "")))
    for n in range(2):
        await engine.generate(request(f"before{n}", LONG))
    await activate(engine, other)
    completion = await engine.generate(request("after", LONG))
    return float(np.abs(completion.logprobs - full_forward(other, LONG, completion).numpy()).max())


async def test_a_prefix_never_outlives_its_weights(engine: VllmBase, other: PreTrainedModel) -> None:
    assert await prefix_twice(engine, other, None) < TOLERANCE


async def test_without_the_salt_a_prefix_would_outlive_its_weights(
    engine: VllmBase, other: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await prefix_twice(engine, other, monkeypatch) > 100 * TOLERANCE


async def waiting_over_an_activation(engine: VllmBase, other: PreTrainedModel) -> tuple[Completion, Weights]:
    """What a request samples that waited for a slot when the weights changed, its prompt being in vLLM's cache."""
    await engine.generate(request("cached", LONG))
    running = [request(f"running{n}", max_tokens=1500, seed=n) for n in range(SLOTS)]
    tasks = begin(engine, *running)
    await until_progress(engine, [r.id for r in running], 1)
    (waiting,) = begin(engine, request("waiting", LONG))
    await until_submitted(engine, "waiting")
    second = await activate(engine, other)
    engine.abort([r.id for r in running])
    await asyncio.gather(*tasks)
    return await waiting, second


async def until_submitted(engine: VllmBase, id: str) -> None:
    async with asyncio.timeout(30):
        while not await is_submitted(engine._llm, id):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def is_submitted(llm: Any, id: str) -> bool:
    """Whether vLLM has this request; of a server's, whether it has one that waits."""
    if isinstance(llm, VllmClient):
        lines = (await llm._http.get("/metrics")).text.splitlines()
        return any(line.startswith("vllm:num_requests_waiting{") and float(line.split()[-1]) > 0 for line in lines)
    return any(name.startswith(f"{id}#") for name in llm.output_processor.external_req_ids)


async def test_what_waits_for_a_slot_begins_under_the_weights_that_sample_it(
    engine: VllmBase, other: PreTrainedModel
) -> None:
    completion, second = await waiting_over_an_activation(engine, other)
    assert [span.weights for span in completion.spans] == [second]
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 12)
    np.testing.assert_allclose(completion.logprobs, full_forward(other, LONG, completion), atol=TOLERANCE)


async def test_what_waits_would_find_an_old_prefix_if_it_did_not_begin_again(
    engine: VllmBase, other: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(_: VllmBase) -> None:
        """The guard removed."""

    monkeypatch.setattr(VllmBase, "_begin_again", nothing)
    completion, _ = await waiting_over_an_activation(engine, other)
    assert np.abs(completion.logprobs - full_forward(other, LONG, completion).numpy()).max() > 100 * TOLERANCE


async def test_many_activations_while_requests_come_and_go(
    engine: VllmBase, model: PreTrainedModel, other: PreTrainedModel
) -> None:
    """Every token's logprob is that of the version it is stamped with, whatever came in between."""
    models: dict[int, PreTrainedModel] = {}
    done: list[tuple[Request, Completion]] = []
    stop = asyncio.Event()
    assert engine.serving is not None
    models[engine.serving.version] = model

    async def client(n: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            r = request(f"c{n}.{turn}", LONG[: 5 + 140 * (n % 2)], seed=1000 * n + turn, max_tokens=5 + 9 * (turn % 7))
            done.append((r, await engine.generate(r)))

    clients = [asyncio.create_task(client(n)) for n in range(2 * SLOTS)]
    for round in range(10):
        while len(done) < 8 * (round + 1):  # noqa: ASYNC110 - the test's own limit bounds it
            await asyncio.sleep(0.005)
        served = (model, other)[round % 2]
        models[(await activate(engine, served, ("keep", "recompute")[round % 3 == 0])).version] = served
    stop.set()
    await asyncio.gather(*clients)
    crossed = 0
    for r, completion in done:
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == r.sampling.max_tokens
        if len(completion.spans) == 1:
            expected = full_forward(models[completion.spans[0].weights.version], r.token_ids, completion)
            np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
        crossed += len(completion.spans) > 1
    assert crossed > 0


async def test_verify_hashes_what_is_served(engine: VllmBase) -> None:
    assert await engine.verify() == (engine.serving, engine.checksum)


async def test_weights_without_a_checksum_are_served_and_hashed_when_asked(
    engine: VllmBase, other: PreTrainedModel
) -> None:
    unhashed = staged(other, next_weights(engine))
    expected, unhashed = unhashed.checksum, replace(unhashed, checksum="")
    await engine.stage(unhashed)
    await engine.activate()
    assert engine.checksum == ""
    completion = await engine.generate(request("a"))
    np.testing.assert_allclose(completion.logprobs, full_forward(other, PROMPT, completion), atol=TOLERANCE)
    assert await engine.verify() == (unhashed.weights, expected)
    assert await engine.verify() == (unhashed.weights, expected)


async def test_logprobs_that_are_no_numbers_end_an_answer_with_an_error(
    engine: VllmBase, model: PreTrainedModel
) -> None:
    broken = staged(model, next_weights(engine))
    broken.tensors["model.norm.weight"].fill_(float("nan"))
    await engine.stage(replace(broken, checksum=combined_checksum(broken.tensors.items())))
    await engine.activate()
    completion = await engine.generate(request("a"))
    assert completion.finish_reason == "error"
    assert "nan" in completion.error
    assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions) == 0
    await activate(engine, model)
    completion = await engine.generate(request("b"))
    np.testing.assert_allclose(completion.logprobs, full_forward(model, PROMPT, completion), atol=TOLERANCE)


REFUSED = {
    "top_p": ({"top_p": 0.9}, "top_p 0.9 / min_p 0.0 without top_k"),
    "min_p": ({"top_k": 9, "top_p": 0.9, "min_p": 0.1}, "vLLM applies min_p first"),
    "cold": ({"temperature": 0.001}, "temperature 0.001: vLLM has 0, and 0.01 to 2"),
    "hot": ({"temperature": 2.5}, "temperature 2.5: vLLM has 0, and 0.01 to 2"),
    "negative": ({"temperature": -1.0}, "is not a number >= 0"),
    "nothing": ({"max_tokens": 0}, "leaves nothing to sample"),
    "empty": ({"prompt": ()}, "a prompt of 0 tokens"),
    "long": ({"prompt": (1,) * 2048}, "takes 1 to 2047"),
    "outside": ({"prompt": (61,)}, "outside the model's vocabulary of 61"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_request_that_cannot_be_served_exactly_is_refused(engine: VllmBase, case: str) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        await engine.generate(request("a", **arguments))
    assert engine.free_slots == SLOTS


async def test_a_request_fills_what_the_model_has_room_for(engine: VllmBase) -> None:
    completion = await engine.generate(request("a", (1,) * 2040, max_tokens=100))
    assert (len(completion.token_ids), completion.finish_reason) == (8, "length")


async def test_two_requests_of_one_id_are_refused(engine: VllmBase) -> None:
    tasks = begin(engine, request("a"), request("a"))
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(outcomes[0], Completion)
    assert isinstance(outcomes[1], ValueError)


UNFIT = {
    "missing": "not published",
    "extra": "nothing that the vLLM model has",
    "shape": "in the vLLM model, published as float32",
    "type": r"published as bfloat16\[",
    "untied": "lm_head.weight",
}


@pytest.mark.parametrize("case", UNFIT)
async def test_weights_that_do_not_fit_are_refused_before_anything_is_loaded(
    engine: VllmBase, model: PreTrainedModel, case: str
) -> None:
    good = staged(model, next_weights(engine))
    tensors, tied = dict(good.tensors), dict(good.tied)
    name = "model.layers.1.self_attn.k_proj.weight"
    match case:
        case "missing":
            del tensors[name]  # of three that vLLM has in one
        case "extra":
            tensors["model.layers.2.self_attn.k_proj.weight"] = tensors[name]
        case "shape":
            tensors[name] = tensors[name][:-1]
        case "type":
            tensors[name] = tensors[name].bfloat16()
        case "untied":
            tied.clear()
    with pytest.raises(WeightsError, match=UNFIT[case]):
        await engine.stage(replace(good, tensors=tensors, tied=tied))
    with pytest.raises(WeightsError, match="stage"):
        await engine.activate()
    completion = await engine.generate(request("a"))
    np.testing.assert_allclose(completion.logprobs, full_forward(model, PROMPT, completion), atol=TOLERANCE)
