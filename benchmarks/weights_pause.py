"""Part of `weights`: for how long does decoding stand still when weights change, on a real model?

The SmolLM2 recipe (an adapter, merged weights published after every step) for a few steps: the longest pause of an
activation, as the engine meters it, over the median step. Staging happens beside decoding and is shown, not counted.

Control: on a tiny model, an exchange that is made to take CONTROL_S. The meter, and the longest gap between two tokens,
must both see it: a meter that reads too little would meet the target as well.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.runs import train
from asyncrl.collectors.engines.base import Request, Sampling
from asyncrl.collectors.engines.live import LiveModel
from asyncrl.collectors.engines.transformers import TransformersEngine
from asyncrl.learners.cache import BuiltinModelError
from asyncrl.learners.smollm2 import ensure_smollm2
from asyncrl.staleness import Weights
from asyncrl.telemetry.metrics import read_metrics, surviving_steps
from asyncrl.weights.base import StagedWeights
from asyncrl.weights.manifest import combined_checksum, model_tensors

RECIPE = "smollm2-uppercase"
STEPS = 3  # 15 s each on two cores
SHARE = 0.02
CONTROL_S = 0.2
LIMIT_S = 60.0
"""Of the control, which takes two seconds."""

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 16,
    "max_position_embeddings": 4096,
}


def measure(*, quick: bool, say: Say) -> Measured:
    """`quick` changes nothing: a few steps of a real model are what it takes."""
    slowed = asyncio.run(control())
    say(f"pause, control: of {CONTROL_S} s, the meter sees {slowed['paused_s']:.3f} and tokens {slowed['gap_s']:.3f}")
    try:
        ensure_smollm2()  # made once per machine and cached
    except BuiltinModelError as error:
        say(str(error))
        return Measured(rows=[slowed], targets=targets(None, slowed))
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as parent:
        folder = Path(parent) / "run"
        settings = {"run.max_steps": STEPS, "eval.at_start": False, "eval.at_end": False}
        found = train(folder, {"run.name": "bench-weights-pause", **settings}, recipe=RECIPE)
        row = paused(surviving_steps(read_metrics(folder / "metrics.jsonl")))
    say(
        f"pause, {RECIPE}: {1e3 * row['paused_s']:.1f} ms of a step of {found.step_s:.1f} s; "
        f"staging takes {1e3 * row['staged_s']:.0f} ms beside it"
    )
    return Measured(rows=[row, slowed], targets=targets(row, slowed))


def paused(steps: list[dict[str, Any]]) -> Row:
    """The longest pause that a step's record knows of, over the median step; seconds."""
    longest, step_s = max(step["weights/paused_s"] for step in steps), median(step["step_s"] for step in steps)
    staged = max(step["weights/staged_s"] for step in steps)
    activations = sum(step["weights/paused_s"] > 0 for step in steps)
    return {
        "kind": "pause",
        "recipe": RECIPE,
        "activations": activations,
        "paused_s": longest,
        "staged_s": staged,
        "step_s": step_s,
        "share": longest / step_s if activations else None,
    }


def targets(row: Row | None, control: Row) -> list[Target]:
    """row None: not measured."""
    return [
        Target(f"{RECIPE}: decoding pause of a step", None if row is None else row["share"], SHARE, "lower"),
        Target("control: seconds of pause that the meter sees", control["paused_s"], CONTROL_S, "higher"),
        Target("control: longest gap between two tokens", control["gap_s"], CONTROL_S, "higher"),
    ]


async def control() -> Row:
    """A running request on a tiny random model, and an exchange under it that takes CONTROL_S."""
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    activate = LiveModel.activate

    def slowed(self: LiveModel, exchanged: Callable[[], None] = lambda: None) -> Any:
        time.sleep(CONTROL_S)
        return activate(self, exchanged)

    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        model.save_pretrained(folder)
        engine = TransformersEngine(
            "control", Path(folder), slots=1, max_length=None, dtype="float32", attn="auto", trust_remote_code=False
        )
        request = Request("r", "r", "r", (1, 2, 3), Sampling(max_tokens=4000), seed=0)
        async with asyncio.timeout(LIMIT_S):
            await engine.start()
            try:
                await _give(engine, model, version=0)
                before = engine.paused_s
                running = asyncio.ensure_future(engine.generate(request))
                gaps = asyncio.ensure_future(_longest_gap(engine, running))
                await _progressed(engine)
                with mock.patch.object(LiveModel, "activate", slowed):
                    await _give(engine, model, version=1)
                await _progressed(engine)
                engine.abort(["r"])
                await running
                return {"kind": "control", "paused_s": engine.paused_s - before, "gap_s": await gaps}
            finally:
                await engine.close()


async def _give(engine: TransformersEngine, model: Qwen3ForCausalLM, *, version: int) -> None:
    tensors, tied = model_tensors(model)
    copies = {name: tensor.clone() for name, tensor in tensors}
    await engine.stage(StagedWeights(Weights(1, version), copies, tied, combined_checksum(tensors)))
    await engine.activate()


async def _progressed(engine: TransformersEngine) -> None:
    """A few tokens more."""
    goal = engine.progress("r") + 5
    while engine.progress("r") < goal:  # noqa: ASYNC110 - polled by contract; LIMIT_S bounds it
        await asyncio.sleep(0.001)


async def _longest_gap(engine: Any, running: asyncio.Future[Any]) -> float:
    """Seconds without a token of the running request, at most; from its first one on."""
    longest, at, tokens = 0.0, time.perf_counter(), 0
    while not running.done():
        await asyncio.sleep(0.0005)
        now, found = time.perf_counter(), engine.progress("r")
        if found != tokens or tokens == 0:
            longest = max(longest, now - at) if tokens else 0.0
            at, tokens = now, found
    return longest
