"""Weights that change under running requests, in each mode: a real model, real shared memory, the collector's own task.

Every token must carry the version that sampled it, and its log-probability must be that version's: over the whole
sequence where keys and values are computed anew, before the change where they are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import to_builtins

from asyncrl.buffers.limits import Limits
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.collectors.engines.base import Completion, Request
from asyncrl.collectors.engines.decode import Decoder
from asyncrl.collectors.engines.transformers import TransformersEngine
from asyncrl.collectors.fleet import Fleet, Host
from asyncrl.collectors.updates import Updates
from asyncrl.config.weights import WeightsConfig
from asyncrl.staleness import Weights
from asyncrl.weights.image import Images
from asyncrl.weights.manifest import model_tensors
from asyncrl.weights.reach import here
from asyncrl.weights.shm import shm_offer
from tests.engines.tiny_models import full_forward, make_model, replay, request

pytestmark = pytest.mark.asyncio

LIMIT_S = 60.0
ENDLESS = 4000  # tokens: seconds of decoding, so that what happens "meanwhile" does
PROMPT = (1, 2, 3, 4, 5)
MODES = ("keep", "recompute", "drain", "abort-and-continue")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(seed=99).save_pretrained(path)
    return path


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Images]:
    made = Images("test", folder=tmp_path)
    yield made
    made.close()


class Collector:
    """A fleet of one real engine that follows announcements, and a learner that makes them."""

    def __init__(self, saved: Path, images: Images, mode: str, *, slots: int, drain_limit_s: float) -> None:
        def engine() -> TransformersEngine:
            return TransformersEngine(
                "e0", saved, slots=slots, max_length=None, dtype="float32", attn="auto", trust_remote_code=False
            )

        self.images = images
        self.buffer = MemoryBuffer("r", Limits(max_age=1, groups_per_step=2, max_steps=9))
        self.fleet = Fleet([engine])
        self.updates = Updates(
            self.fleet,
            self.buffer,
            config=WeightsConfig(update=mode, deadline_s=30.0),  # type: ignore[arg-type]
            me="c0-1",
            place=here(),
            drain_limit_s=drain_limit_s,
            store_limit_s=1.0,
            on_change=self.changed,
        )
        self.changes = 0

    @property
    def host(self) -> Host:
        return self.fleet.hosts[0]

    async def changed(self) -> None:
        self.changes += 1

    async def publish(self, version: int) -> None:
        """Announce `make_model(seed=version)` as (1, version); it may not be served yet."""
        weights = Weights(1, version)
        tensors, tied = model_tensors(make_model(seed=version))
        image = await asyncio.to_thread(self.images.write, weights, tensors, tied=tied)
        fork = {"parent": 0, "version": 0}
        document = {"place": to_builtins(here()), "fork": fork, "offers": [shm_offer(image)]}
        self.buffer.model.version = version  # as if its step had been committed
        await self.buffer.announce(weights, document)
        self.updates.announced(weights, version)

    async def served(self, version: int) -> None:
        await until(lambda: self.host.engine.serving == Weights(1, version))

    def ask(self, asked: Request) -> asyncio.Task[Completion]:
        return asyncio.create_task(self.host.entrance.generate(self.host.engine, asked))

    async def progressed(self, id: str, tokens: int = 10) -> None:
        """`id` has sampled so many tokens more."""
        entrance, engine = self.host.entrance, self.host.engine
        goal = entrance.progress(engine, id) + tokens
        await until(lambda: entrance.progress(engine, id) >= goal)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the progress of a decode thread, polled; LIMIT_S bounds it
        await asyncio.sleep(0.0005)


@pytest.fixture
def collector(saved: Path, images: Images) -> Callable[..., Any]:
    """`async with collector(mode)`: it serves (1, 1) and follows the announcements."""

    @asynccontextmanager
    async def collector(mode: str, *, slots: int = 4, drain_limit_s: float = LIMIT_S) -> AsyncIterator[Collector]:
        made = Collector(saved, images, mode, slots=slots, drain_limit_s=drain_limit_s)
        async with asyncio.timeout(LIMIT_S):
            await made.fleet.start()
            await made.buffer.new_lineage(parent=None, limits=made.buffer.limits)
            following = asyncio.create_task(made.updates.run())
            try:
                await made.publish(1)
                await made.served(1)
                yield made
            finally:
                following.cancel()
                await asyncio.wait({following})
                await made.updates.close()
                await made.fleet.close()

    return collector


def expected(completion: Completion, *, kept: bool = False) -> torch.Tensor:
    """Log-probabilities by plain forwards over the whole sequence, each token's under the version that it carries; or
    over keys and values that stay as they were."""
    versions = sorted({span.weights.version for span in completion.spans})
    models = {version: make_model(seed=version) for version in versions}
    if kept:
        return replay(models, PROMPT, completion)
    by_version = {version: full_forward(model, PROMPT, completion) for version, model in models.items()}
    return torch.stack([by_version[version][at] for at, version in enumerate(completion.versions.tolist())])


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort-and-continue"])
async def test_every_token_has_the_version_and_the_logprob_of_the_weights_that_sampled_it(collector, mode):
    async with collector(mode) as one:
        answers = [one.ask(request(f"r{n}", PROMPT, seed=n, max_tokens=ENDLESS)) for n in range(4)]
        for version in (2, 3):
            await one.progressed("r0")
            await one.publish(version)
            await one.served(version)
        await one.progressed("r0")
        one.host.engine.abort([f"r{n}" for n in range(4)])
        found = await asyncio.gather(*answers)
        late = await one.ask(request("late", PROMPT, seed=9))
    for completion in found:
        assert [span.weights.version for span in completion.spans] == [1, 2, 3]
        assert completion.spans[0].start == 0
        ends = [*(span.start for span in completion.spans[1:]), len(completion.token_ids)]
        assert [span.end for span in completion.spans] == ends
        assert len({span.checksum for span in completion.spans}) == 3
        np.testing.assert_allclose(completion.logprobs, expected(completion, kept=mode == "keep"), atol=2e-5)
        first = completion.spans[0]
        np.testing.assert_allclose(completion.logprobs[: first.end], expected(completion)[: first.end], atol=2e-5)
    assert [span.weights.version for span in late.spans] == [3]


async def test_kept_keys_and_values_are_not_those_of_the_version_a_token_carries(collector):
    """Negative control of the test above: under `keep` the plain forward is an approximation, and it can tell."""
    async with collector("keep") as one:
        answer = one.ask(request("r0", PROMPT, max_tokens=ENDLESS))
        await one.progressed("r0")
        await one.publish(2)
        await one.served(2)
        await one.progressed("r0")
        one.host.engine.abort(["r0"])
        completion = await answer
    assert float((expected(completion) - torch.tensor(completion.logprobs)).abs().max()) > 1e-2


async def test_an_interrupted_answer_is_the_answer_it_would_have_been(collector):
    """Interrupted by weights that turn out not to be what was published: the old ones go on, draw by draw."""
    undisturbed = request("r0", PROMPT, seed=3, max_tokens=300)
    async with collector("abort-and-continue") as one:
        whole = await one.ask(undisturbed)
        answer = one.ask(undisturbed)
        await one.progressed("r0")
        staged = one.host.engine.stage

        async def spoiled(weights):
            await staged(type(weights)(weights.weights, weights.tensors, weights.tied, "0" * 16))

        one.host.engine.stage = spoiled
        await one.publish(2)
        await until(lambda: one.updates.course.error != "")
        assert "0000000000000000" in one.updates.course.error
        again = await answer
    assert again.spans == whole.spans
    assert again.token_ids.tolist() == whole.token_ids.tolist()
    np.testing.assert_allclose(again.logprobs, whole.logprobs, atol=2e-5)


async def test_a_drain_lets_nobody_in_until_what_runs_has_ended(collector):
    async with collector("drain") as one:
        running = one.ask(request("running", PROMPT, max_tokens=ENDLESS))
        await one.progressed("running")
        await one.publish(2)
        await until(lambda: one.host.entrance.closed_since is not None)
        assert one.fleet.startable(1) == 0
        newcomer = one.ask(request("newcomer", PROMPT))
        assert one.updates.course.phase is None, "it is not the engine that is waited for"
        await one.progressed("running")
        assert not newcomer.done()
        one.host.engine.abort(["running"])
        old, new = await running, await newcomer
        assert (old.finish_reason, new.finish_reason, len(new.token_ids)) == ("abort", "length", 12)
        assert one.fleet.startable(1) > 0
    assert [span.weights.version for span in (*old.spans, *new.spans)] == [1, 2]
    for completion in (old, new):
        np.testing.assert_allclose(completion.logprobs, expected(completion), atol=2e-5)


async def test_a_drain_has_a_limit_and_what_still_runs_is_computed_anew(collector):
    async with collector("drain", drain_limit_s=0.2) as one:
        running = one.ask(request("running", PROMPT, max_tokens=ENDLESS))
        await one.progressed("running")
        await one.publish(2)
        await one.served(2)
        await one.progressed("running")
        one.host.engine.abort(["running"])
        completion = await running
    assert completion.finish_reason == "abort", "that abort was none of an update's"
    assert [span.weights.version for span in completion.spans] == [1, 2]
    np.testing.assert_allclose(completion.logprobs, expected(completion), atol=2e-5)


@pytest.mark.parametrize("mode", MODES)
async def test_no_prefix_is_shared_across_versions(collector, mode):
    """The members of a group share their prompt's keys and values; those that get their slot later, under other
    weights, must not."""
    async with collector(mode, slots=1) as one:
        second = await second_of_a_group(one, mode)
    assert [span.weights.version for span in second.spans] == [1 if mode == "drain" else 2]  # in a drain it is inside
    np.testing.assert_allclose(second.logprobs, expected(second), atol=2e-5)


async def test_a_prefix_that_crossed_versions_would_be_noticed(collector, monkeypatch):
    """Negative control of the test above: a prefill that remembers prompts."""
    prefill, kept = Decoder._prefill, {}

    def remembered(self, sequences):
        return kept.setdefault(tuple(sequences), prefill(self, sequences))

    async with collector("keep", slots=1) as one:
        monkeypatch.setattr(Decoder, "_prefill", remembered)
        second = await second_of_a_group(one, "keep")
    assert float((expected(second) - torch.tensor(second.logprobs)).abs().max()) > 1e-2


async def second_of_a_group(one: Collector, mode: str) -> Completion:
    """The answer that waits for the one slot while the first one samples and weights change."""
    first = one.ask(request("r0", PROMPT, seed=0, max_tokens=ENDLESS))
    second = one.ask(request("r1", PROMPT, seed=1, max_tokens=100))
    await one.progressed("r0")
    await one.publish(2)
    await until(lambda: one.host.engine.serving == Weights(1, 2) or one.host.entrance.closed_since is not None)
    if mode != "drain":
        await one.served(2)
        await one.progressed("r0", 1)  # it is in the engine again
    one.host.engine.abort(["r0"])
    await first
    return await second
