"""A whole run whose connections fail all the time trains what it would without."""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.buffers.base import State
from asyncrl.buffers.store import script_text
from tests.faults.proxy import Fault, every_other, proxied
from tests.faults.runs import recipe_of, whole_run

STEPS = 8
LONGER = 40  # surely longer than a client takes to ask again
SHARE = 0.1  # of all requests that suffer a fault
SEEDS = (5, 7)  # with these the first 50 requests suffer each kind


def at_random(seed: int) -> Callable[[bytes], Fault | None]:
    """Not while a process opens its store: it looks once what is there, and says so."""
    rng = random.Random(seed)
    opening = (b"HELLO", b"CLIENT", b"INFO")

    def choose(request: bytes) -> Fault | None:
        if any(command in request[:20] for command in opening) or rng.random() >= SHARE:
            return None
        return rng.choice(list(Fault))

    return choose


@pytest.mark.faults
@pytest.mark.asyncio
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_run_over_failing_connections_is_complete_and_its_audit_is_clean(
    server_url: str, tmp_path: Path, seed: int
) -> None:
    recipe = recipe_of(f"proxied-{seed}", steps=STEPS)
    async with proxied(server_url, at_random(seed)) as proxy:
        report = await whole_run(proxy.url, recipe, tmp_path)
        assert all(proxy.suffered.values()), proxy.suffered
    assert report.problems == []
    assert report.stats.version == STEPS
    assert report.stats.states[State.TRAINED] == 2 * STEPS
    assert report.stats.refused_puts == 0, "each repetition was known as one"


@pytest.mark.faults
@pytest.mark.asyncio
async def test_where_a_put_has_no_identity_its_repetition_is_a_stranger(server_url: str, tmp_path: Path) -> None:
    guard = "local again = repeated(t, a)"
    assert guard in script_text()
    script = script_text().replace(guard, "local again = nil")
    async with proxied(server_url, every_other("put", Fault.LOST)) as proxy:
        report = await whole_run(proxy.url, recipe_of("put-twice", steps=LONGER), tmp_path, script=script)
    assert report.stats.refused_puts > 0, proxy.suffered


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.asyncio
async def test_so_is_one_of_a_real_learner_and_a_real_engine(
    server_url: str, tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    settings = ("run.name=real", f"run.max_steps={STEPS}", "run.output_dir=out")
    options = [text for setting in settings for text in ("--set", setting)]
    async with proxied(server_url, at_random(SEEDS[0])) as proxy:
        learner = spawn("learner", "learner", "--buffer", proxy.url, *options)
        collector = spawn("collector", "collector", "--buffer", proxy.url, "--run", "real", "--wait", "3m")
        for name, process in (("learner", learner), ("collector", collector)):
            code = await asyncio.to_thread(process.wait, 180)
            assert code == 0, (tmp_path / f"{name}.log").read_text()
        assert all(proxy.suffered.values()), proxy.suffered
    audited = spawn("audit", "buffer", "audit", "out", "--buffer", server_url)
    assert await asyncio.to_thread(audited.wait, 60) == 0, (tmp_path / "audit.log").read_text()
    assert f"archive: {STEPS} steps" in (tmp_path / "audit.log").read_text()
