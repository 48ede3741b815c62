"""A whole run over the SGLang engine and a double of the server: no token of it is any good, but all have versions."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

from asyncrl.config.loading import load_recipe
from asyncrl.runtime.models import resolve
from tests.engines.sglang_double import SglangDouble, serving

STEPS = 4


@contextmanager
def in_a_thread(double: SglangDouble) -> Iterator[SglangDouble]:
    """The double's own event loop, while this thread waits for processes."""
    up, loop, done = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with serving(double):
            up.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert up.wait(20)
        yield double
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(20)
        loop.close()


@pytest.mark.slow
def test_the_tiny_recipe_trains_over_a_double_of_sglang(
    cli: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve(load_recipe("tiny-reverse").recipe), dtype="float32")
    with in_a_thread(SglangDouble(model.requires_grad_(False), max_running=64)) as double:
        engine = {"collector.engine.type": "sglang", "collector.engine.url": double.url, "weights.update": "recompute"}
        done = cli(
            *("run", "tiny-reverse", "--max-trajectory-age", "1"),
            *(part for key, value in engine.items() for part in ("--set", f"{key}={value}")),
            *("--set", f"run.max_steps={STEPS}"),
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (folder,) = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["age_max"] <= 1) == (STEPS, True)
    loads = [body["weight_version"] for route, body in double.calls if route == "/update_weights_from_disk"]
    assert loads[-1].startswith(f"1/{STEPS}/")
    rows = [row for part in (folder / "archive").glob("*.parquet") for row in pq.read_table(part).to_pylist()]
    assert {row["trained_version"] for row in rows} == set(range(STEPS))
    assert not list(Path("/dev/shm").glob(f"asyncrl-sglang-*-{'*'}/1-{STEPS}"))
