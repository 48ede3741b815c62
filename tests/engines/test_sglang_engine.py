"""The SGLang engine against a double of a server that was written from SGLang's source: no GPU, no SGLang here."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from asyncrl.collectors.engines import sglang as adapter
from asyncrl.collectors.engines.base import Completion, EngineError, Request
from asyncrl.collectors.engines.sglang import SglangEngine
from asyncrl.collectors.engines.sglang_server import SglangServer
from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights, WeightsError

from .sglang_double import SglangDouble, digest_of, serving, token_of
from .tiny_models import make_model, request, staged

pytestmark = pytest.mark.asyncio

LIMIT_S = 60.0
PROMPT = (1, 2, 3, 4, 5)
LLAMA = "llama"


class Ready:
    """An engine, the double it is a client of, and the models it was given, by version."""

    def __init__(self, engine: SglangEngine, double: SglangDouble) -> None:
        self.engine, self.double = engine, double
        self.models: dict[int, PreTrainedModel] = {}

    async def stage(self, version: int, **changes: Any) -> None:
        """A version of its own. The double makes no step meanwhile: what runs, runs afterwards, on any machine."""
        self.models[version] = make_model(LLAMA, seed=version)
        self.double.steps.clear()
        try:
            await self.engine.stage(replace(staged(self.models[version], 1, version), **changes))
        finally:
            self.double.steps.set()

    async def serve(self, version: int, **changes: Any) -> Weights:
        await self.stage(version, **changes)
        return await self.engine.activate("recompute")

    def begin(self, *requests: Request) -> list[asyncio.Task[Completion]]:
        return [asyncio.create_task(self.engine.generate(request)) for request in requests]

    async def until(self, id: str, tokens: int) -> None:
        while self.engine.progress(id) < tokens:  # noqa: ASYNC110 - progress is polled by contract; LIMIT_S bounds it
            await asyncio.sleep(0.001)

    def sampled_by(self, request: Request, completion: Completion) -> list[bool]:
        """Of each token, whether the version it is stamped with sampled it."""
        digests = {version: digest_of(model.named_parameters()) for version, model in self.models.items()}
        return [
            (token, pytest.approx(logprob)) == token_of(request.seed, len(request.token_ids) + place, digests[version])
            for place, (token, logprob, version) in enumerate(
                zip(
                    completion.token_ids.tolist(),
                    completion.logprobs.tolist(),
                    completion.versions.tolist(),
                    strict=True,
                )
            )
        ]


def make_engine(double: SglangDouble, saved: Path, folder: Path) -> SglangEngine:
    return SglangEngine(
        "e0",
        saved,
        url=double.url,
        slots=4,
        max_length=None,
        folder=str(folder),
        api_key_env=None,
        trust_remote_code=False,
    )


@asynccontextmanager
async def connected(saved: Path, folder: Path) -> AsyncIterator[Ready]:
    """Started, and serving nothing yet."""
    async with asyncio.timeout(LIMIT_S), serving(SglangDouble(make_model(LLAMA, seed=99))) as double:
        engine = make_engine(double, saved, folder)
        try:
            await engine.start()
            yield Ready(engine, double)
        finally:
            await engine.close()


@asynccontextmanager
async def ready(saved: Path, folder: Path) -> AsyncIterator[Ready]:
    """Serving version 1."""
    async with connected(saved, folder) as one:
        assert await one.serve(1) == Weights(1, 1) == one.engine.serving
        yield one


def long(id: str, *, seed: int = 0, tokens: int = 400) -> Request:
    return request(id, PROMPT, seed=seed, max_tokens=tokens)


async def test_an_answer_has_tokens_logprobs_and_the_version_that_sampled_them(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        asked = long("a", seed=2**62, tokens=100)
        answer = await one.engine.generate(asked)
        assert (len(answer.token_ids), answer.finish_reason, answer.error) == (100, "length", "")
        assert all(one.sampled_by(asked, answer))
        (span,) = answer.spans
        assert (span.weights, span.checksum) == (Weights(1, 1), one.engine.checksum)
        assert 0 < answer.first_token <= answer.done
        assert one.engine.generated_tokens == 100
        assert one.engine.free_slots == 4


async def test_it_stops_at_a_token_of_the_request_which_is_part_of_the_answer(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        whole = await one.engine.generate(long("a", seed=3, tokens=30))
        stop = int(whole.token_ids[20])
        place = whole.token_ids.tolist().index(stop)
        answer = await one.engine.generate(request("b", PROMPT, seed=3, max_tokens=30, stop_token_ids=(stop,)))
        assert answer.finish_reason == "stop"
        assert answer.token_ids.tolist() == whole.token_ids.tolist()[: place + 1]


async def test_an_end_token_of_the_model_alone_ends_nothing(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        whole = await one.engine.generate(long("a", seed=3, tokens=30))
        one.double.eos = {int(whole.token_ids[5]), int(whole.token_ids[-1])}
        again = await one.engine.generate(long("b", seed=3, tokens=30))
        assert again.token_ids.tolist() == whole.token_ids.tolist()
        assert again.logprobs.tolist() == whole.logprobs.tolist()
        assert (again.finish_reason, len(again.spans)) == ("length", 1)


async def test_tokens_have_the_version_that_sampled_them_over_an_update(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        asked = [long(f"r{seed}", seed=seed) for seed in range(6)]
        running = one.begin(*asked)
        await one.until("r0", 64)
        await one.serve(2)
        await one.until("r0", 192)
        await one.serve(3)
        for wanted, answer in zip(asked, await asyncio.gather(*running), strict=True):
            assert all(one.sampled_by(wanted, answer))
            assert len(answer.token_ids) == 400
        assert [span.weights.version for span in answer.spans][-1] == 3
        assert len((await running[0]).spans) == 3
        assert one.engine.paused_s > 0


async def test_with_keys_and_values_kept_the_versions_would_be_wrong(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why `keep` is refused, and the negative control of the test before."""

    async def pause(server: SglangServer) -> None:
        await server._call("POST", "/pause_generation", {"mode": "in_place"})

    async def load(server: SglangServer, folder: str, label: str) -> None:
        body = {"model_path": folder, "load_format": "auto", "flush_cache": False, "weight_version": label}
        await server._call("POST", "/update_weights_from_disk", body)

    async with ready(saved, tmp_path) as one:
        monkeypatch.setattr(SglangServer, "pause", pause)
        monkeypatch.setattr(SglangServer, "load", load)
        asked = long("a")
        (running,) = one.begin(asked)
        await one.until("a", 64)
        await one.serve(2)
        assert one.sampled_by(asked, await running).count(False) == 1


async def test_to_keep_keys_and_values_is_refused_while_requests_run(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        (running,) = one.begin(long("a"))
        await one.until("a", 1)
        await one.stage(2)
        with pytest.raises(WeightsError, match="recompute"):
            await one.engine.activate("keep")
        assert set((await running).versions.tolist()) == {1}
        assert await one.engine.activate("keep") == Weights(1, 2)  # nothing runs


async def test_before_a_version_is_proved_nothing_is_sampled_from_it(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        (running,) = one.begin(long("a", tokens=4000))
        await one.until("a", 1)
        one.double.corrupt = "model.layers.1.self_attn.qkv_proj.weight"
        said = []
        await one.stage(2)
        with pytest.raises(
            EngineError, match=r"1 of \d+ tensors differ, model\.layers\.1\.self_attn\.qkv_proj\.weight"
        ):
            await one.engine.activate("recompute", exchanged=lambda: said.append(one.double.calls[-1][0]))
        assert said == ["/update_weights_from_disk"]
        assert one.double.paused
        with pytest.raises(EngineError, match="tensors differ"):
            await running
        with pytest.raises(EngineError, match="does not generate any more"):
            await one.engine.generate(long("b"))


async def test_an_engine_that_is_started_again_goes_on_with_a_paused_server(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        one.double.corrupt = "model.norm.weight"
        with pytest.raises(EngineError):
            await one.serve(2)
        one.double.corrupt = ""
        await one.engine.close()
        await one.engine.start()
        with pytest.raises(EngineError, match="serves nothing yet"):
            await one.engine.generate(long("b"))
        await one.serve(3)
        assert set((await one.engine.generate(long("c"))).versions.tolist()) == {3}


async def test_it_proves_again_what_is_served(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        assert await one.engine.verify() == (Weights(1, 1), one.engine.checksum)
        one.double.live["model.norm.weight"][0] += 1
        weights, found = await one.engine.verify()
        assert (weights, found != one.engine.checksum) == (Weights(1, 1), True)


async def test_a_version_without_checksum_is_proved_all_the_same(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        whole = staged(make_model(LLAMA, seed=2), 1, 2)
        await one.serve(2, checksum="")
        assert one.engine.checksum == ""
        assert await one.engine.verify() == (Weights(1, 2), whole.checksum)
        one.double.corrupt = "lm_head.weight"
        with pytest.raises(EngineError, match=r"lm_head\.weight"):
            await one.serve(3, checksum="")


async def test_a_server_that_another_process_updates_is_noticed(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        one.double.weight_version = "1/7/aa"
        with pytest.raises(EngineError, match="another process updates it"):
            await one.serve(2)


async def test_a_label_that_is_not_of_this_run_is_an_error_of_the_request(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        one.double.weight_version = "default"
        answer = await one.engine.generate(long("a"))
        assert (answer.finish_reason, len(answer.token_ids)) == ("error", 0)
        assert "not of this run" in answer.error


def without(weights: StagedWeights, name: str) -> StagedWeights:
    return replace(weights, tensors={key: tensor for key, tensor in weights.tensors.items() if key != name})


async def test_weights_that_are_not_the_servers_model_are_refused(saved: Path, tmp_path: Path) -> None:
    async with connected(saved, tmp_path) as one:
        weights = staged(make_model(LLAMA, seed=1), 1, 1)
        with pytest.raises(EngineError, match=r"also computes with model\.norm\.weight"):
            await one.engine.stage(without(weights, "model.norm.weight"))
        await one.serve(1)
        with pytest.raises(WeightsError, match=r"qkv_proj\.weight: not published"):
            await one.engine.stage(without(weights, "model.layers.0.self_attn.k_proj.weight"))
        with pytest.raises(WeightsError, match=r"has no model\.more"):
            await one.engine.stage(
                replace(weights, tensors={**weights.tensors, "model.more": weights.tensors["model.norm.weight"]})
            )
        assert one.engine.serving == Weights(1, 1)


async def test_an_aborted_request_returns_what_it_has(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        asked = long("a", tokens=4000)
        running, other = one.begin(asked, long("b"))
        await one.until("a", 64)
        one.engine.abort(["a", "unknown"])
        answer = await running
        assert answer.finish_reason == "abort"
        assert 64 <= len(answer.token_ids) < 4000
        assert all(one.sampled_by(asked, answer))
        assert (await other).finish_reason == "length"


async def test_an_abort_ends_no_request_whose_name_only_begins_alike(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        short, longer = one.begin(long("r1", tokens=4000), long("r10"))
        await one.until("r10", 1)
        one.engine.abort(["r1"])
        assert ((await short).finish_reason, (await longer).finish_reason) == ("abort", "length")


async def test_an_abort_that_the_server_never_hears_ends_the_request_without_a_token(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "GIVE_UP_S", 1.0)
    async with ready(saved, tmp_path) as one:
        one.double.deaf = True
        (running,) = one.begin(long("a", tokens=4000))
        await one.until("a", 1)
        one.engine.abort(["a"])
        answer = await running
        assert (answer.finish_reason, len(answer.token_ids)) == ("abort", 0)


async def test_logprobs_that_are_no_numbers_are_an_error_without_tokens(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        one.double.nan = True
        answer = await one.engine.generate(long("a"))
        assert (answer.finish_reason, len(answer.token_ids)) == ("error", 0)
        assert "log-probs [None" in answer.error


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"temperature": 0.7}, "SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ({"top_p": 0.9}, "truncation"),
        ({"max_tokens": 0}, "nothing to sample"),
    ],
)
async def test_what_cannot_be_sampled_exactly_is_refused(
    saved: Path, tmp_path: Path, sampling: dict[str, Any], says: str
) -> None:
    async with ready(saved, tmp_path) as one:
        with pytest.raises(ValueError, match=says):
            await one.engine.generate(request("a", PROMPT, **sampling))
        assert not one.double.bodies


async def test_what_the_server_refuses_is_refused_with_its_reason(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        one.double.info["max_req_input_len"] = 3
        with pytest.raises(ValueError, match="longer than the model's context length"):
            await one.engine.generate(long("a"))


async def test_a_server_that_dies_ends_all_requests(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        running = one.begin(long("a", tokens=4000), long("b", tokens=4000))
        await one.until("a", 1)
        one.double.die()
        for answer in running:
            with pytest.raises(EngineError, match="does not generate any more"):
                await answer
        assert one.engine.free_slots == 4


async def test_a_cancelled_request_frees_its_slot_and_ends_no_other(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        cancelled, other = one.begin(long("a", tokens=4000), long("b"))
        await one.until("a", 1)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert (await other).finish_reason == "length"


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("version", "0.5.9", "from 0.5.23 on"),
        ("tp_size", 2, "tp_size 2"),
        ("quantization", "fp8", "quantization 'fp8'"),
        ("preferred_sampling_params", '{"top_p": 0.9}', "preferred_sampling_params"),
        ("incremental_streaming_output", True, "incremental_streaming_output True"),
        ("frontend", "rust", "frontend 'rust'"),
    ],
)
async def test_a_server_that_was_started_otherwise_is_refused(
    saved: Path, tmp_path: Path, key: str, value: object, says: str
) -> None:
    async with asyncio.timeout(LIMIT_S), serving(SglangDouble(make_model(LLAMA))) as double:
        double.info[key] = value
        engine = make_engine(double, saved, tmp_path)
        with pytest.raises(EngineError, match=says):
            await engine.start()
        await engine.close()


async def test_a_server_that_is_not_there_is_said_so(saved: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    double = SglangDouble(make_model(LLAMA))
    double.url = url
    engine = make_engine(double, saved, tmp_path)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(EngineError, match=f"{url}/server_info: ConnectError"):
            await engine.start()
        await engine.close()


def folders(parent: Path) -> set[Path]:
    return set(parent.iterdir())


async def test_weights_lie_in_the_folder_until_the_server_has_them_and_nothing_afterwards(
    saved: Path, tmp_path: Path
) -> None:
    prefix = f"asyncrl-sglang-{socket.gethostname()}"
    dead = tmp_path / f"{prefix}-4194305-x"  # above the largest process id
    alive = tmp_path / f"{prefix}-{os.getpid()}-x"
    elsewhere = tmp_path / "asyncrl-sglang-another.host-4194305-x"
    for left in (dead, alive, elsewhere):
        left.mkdir()
    async with ready(saved, tmp_path) as one:
        (mine,) = folders(tmp_path) - {alive, elsewhere}
        assert not folders(mine)
        for version in (2, 3):
            await one.stage(version)
            assert folders(mine) == {mine / f"1-{version}"}
        await one.engine.activate("recompute")
        assert not folders(mine)
    assert folders(tmp_path) == {alive, elsewhere}
