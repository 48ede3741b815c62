"""Weights of the SGLang engine, and the versions of its tokens, against the double."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.collectors.engines.base import EngineError
from asyncrl.collectors.engines.sglang_server import SglangServer
from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights, WeightsError

from .sglang_ready import LLAMA, connected, long, ready
from .tiny_models import make_model, staged

pytestmark = pytest.mark.asyncio


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
