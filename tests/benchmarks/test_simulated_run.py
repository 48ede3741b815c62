from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.benchmarks.pipeline_model import Pipeline, simulate
from asyncrl.benchmarks.simulated import observe, recipe_of
from asyncrl.buffers.server import EmbeddedServer
from asyncrl.buffers.store import open_store


def test_the_recipe_gives_the_engine_the_time_and_slots_of_the_model() -> None:
    setting = Pipeline(k=2, c=2.0, B=4, G=3)
    recipe = recipe_of(setting, name="x", step_s=0.5)
    engine = recipe.collector.engine
    assert engine.type == "simulated"
    assert engine.slots == setting.slots == 24
    assert engine.token_s * engine.mean_tokens == pytest.approx(setting.scale * 0.5)
    assert recipe.run.max_steps > setting.steps  # the last measured step still has tickets behind it


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_real_pipeline_keeps_its_bound_and_is_no_faster_than_physics(tmp_path: Path) -> None:
    bounded, unbounded = Pipeline(k=1, B=4, G=4, steps=12), Pipeline(k=6, B=4, G=4, steps=12)
    async with EmbeddedServer(tmp_path / "store") as server:
        store = await open_store(server.url)
        try:
            found = await observe(store, bounded, name="bounded", step_s=0.2, log=tmp_path / "bounded.log")
            control = await observe(store, unbounded, name="unbounded", step_s=0.2, log=tmp_path / "unbounded.log")
        finally:
            await store.close()
    assert found.max_age <= 1
    assert found.lost == 0
    assert 0 < found.efficiency <= simulate(bounded).efficiency * 1.02  # start of the clock: a ticket's issue
    assert control.max_age > 1  # the measure sees what the bound prevents
