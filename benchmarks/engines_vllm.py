"""The vLLM engine in processes of its own: what its adapter costs, and its log-probs beside the learner's.

The adapter's own CPU seconds, of those of the process with vLLM's client in it, which prepares requests and takes
answers apart; the processes that compute the model are not counted. Two parts make up the adapter's:

- for each part of an answer (nearly every token), from when vLLM's generator hands it over to when it is asked for the
  next: the adapter waits for nothing between. The clock is in a generator around vLLM's; what the two cost by
  themselves is what another one around them measures less, and is taken off. What takes half a millisecond was
  interrupted and counts as the median;
- for each request, all before its first part and after its last: the thread's CPU time for answers of one token that
  come out of a list, the median of several turns. The share of the event loop in that counts as the adapter's.

Control: the same with an adapter that looks at every token a thousand times. A measurement that did not see that would
see nothing.

Where vLLM is not installed nothing is measured, and no target is met.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from asyncrl.benchmarks.engines_mismatch import TARGET as MISMATCH
from asyncrl.benchmarks.engines_mismatch import mismatch
from asyncrl.benchmarks.engines_served import answers, requests, served
from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.collectors.engines.base import Request, Sampling
from asyncrl.collectors.engines.streamed import Running, StreamedEngine
from asyncrl.collectors.engines.vllm_request import VllmAnswer
from asyncrl.config.recipe import Collector, Recipe, VllmEngine
from asyncrl.learners.tiny import ensure_tiny

if TYPE_CHECKING:
    from vllm import RequestOutput

SHARE = 0.05
SLOTS, TOKENS = 64, 256
INTERRUPTED_S = 0.0005
"""What took longer was taken from the processor, or waited for memory to be collected."""

REPLAYS = 5


def measure(*, quick: bool, say: Say) -> Measured:
    """Rows: the adapter's share and its control; the mismatch in float32 and bfloat16."""
    path = ensure_tiny(0)
    if importlib.util.find_spec("vllm") is None:
        say("vllm: not run, vLLM is not installed")
        row: Row = {"part": "vllm", "kind": "not run", "why": "vLLM is not installed (docs/engines.md)"}
        return Measured([row], targets(None, None, None))
    prompts = 256 if quick else 1024
    share = adapter_share(path, "adapter", prompts=prompts, say=say)
    control = adapter_share(path, "control", prompts=prompts, say=say)
    engine = VllmEngine(max_num_seqs=SLOTS, kv_cache_memory_bytes="256MiB")
    exact = mismatch(path, engine, "float32", prompts=SLOTS, say=say)
    half = mismatch(path, engine, "bfloat16", prompts=SLOTS, say=say)
    return Measured([share, control, exact, half], targets(share["share"], control["share"], exact["largest"]))


def targets(share: float | None, control: float | None, largest: float | None) -> list[Target]:
    return [
        Target("vLLM engine: the adapter's CPU seconds, of the process's", share, SHARE, "lower"),
        Target("control: the same of an adapter that looks at every token a thousand times", control, SHARE, "higher"),
        Target("vLLM engine: largest log-prob mismatch, float32", largest, MISMATCH, "lower"),
    ]


def adapter_share(path: Path, kind: str, *, prompts: int, say: Say) -> Row:
    """Over the sampling of all answers; starts and activations are left out."""
    recipe = Recipe(collector=Collector(engine=VllmEngine(max_num_seqs=SLOTS, kv_cache_memory_bytes="256MiB")))
    with adapter(kind):
        process_s, parts, hop_s, requests_s = asyncio.run(_sampled(recipe, path, prompts))
    usual = median(parts)
    parts_s = sum(usual if part > INTERRUPTED_S else part for part in parts) - hop_s * len(parts)
    row: Row = {
        "part": "vllm",
        "kind": kind,
        "slots": SLOTS,
        "tokens": prompts * TOKENS,
        "process_cpu_s": round(process_s, 3),
        "parts_cpu_s": round(parts_s, 3),
        "clock_cpu_s": round(hop_s * len(parts), 3),
        "requests_cpu_s": round(requests_s, 3),
        "share": round((parts_s + requests_s) / process_s, 4),
    }
    say(f"vllm, {kind}: {row['share']:.1%} of {process_s:.2f} CPU seconds are the adapter's")
    return row


async def _sampled(recipe: Recipe, path: Path, prompts: int) -> tuple[float, Sequence[float], float, float]:
    """CPU seconds of the process, those of the adapter for each part, those of the clock for each, and those of the
    adapter for all requests."""
    asked, short = (requests([Sampling(max_tokens=n)] * prompts, vocabulary=256, seed=2) for n in (TOKENS, 1))
    async with served(recipe, path) as engine:
        assert isinstance(engine, StreamedEngine), "the recipe asks for vLLM"
        with recorded(engine, record := Record()):
            await answers(engine, short)  # they load code, too
            record.seconds.clear()
            record.with_clock.clear()
            began = time.process_time()
            found = await answers(engine, asked)
            process_s = time.process_time() - began
        if wrong := [answer for answer in found if len(answer.token_ids) != TOKENS]:
            raise RuntimeError(f"{len(wrong)} answers are cut: {wrong[0].finish_reason} {wrong[0].error}")
        turns = []
        with replayed(engine, record):
            for _ in range(REPLAYS):
                began = time.thread_time()
                await answers(engine, short)
                turns.append(time.thread_time() - began)
    hop_s = median(record.with_clock) - median(record.seconds)
    clocks_s = 2 * hop_s * len(record.seconds)
    return process_s - clocks_s, record.seconds, hop_s, median(turns)


class Record:
    """seconds: from one part to the call for the next; with_clock: the same around that clock. short: by request, the
    parts of an answer of one token."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.with_clock: list[float] = []
        self.short: dict[str, list[Any]] = {}


@contextmanager
def recorded(engine: StreamedEngine, record: Record) -> Iterator[None]:
    """With every part that vLLM hands over timed."""
    ask = engine._ask

    async def kept(running: Running, request: Request) -> AsyncGenerator[Any, None]:
        parts = record.short[request.id] = []
        async for part in ask(running, request):
            parts.append(part)
            yield part

    def clocked(running: Running, request: Request) -> AsyncGenerator[Any, None]:
        if request.sampling.max_tokens == 1:
            return kept(running, request)
        return timed(timed(ask(running, request), record.with_clock), record.seconds)

    with asking(engine, clocked):
        yield


async def timed(parts: AsyncGenerator[Any, None], seconds: list[float]) -> AsyncGenerator[Any, None]:
    """The parts, with the seconds that whoever takes them keeps each."""
    async with aclosing(parts):
        async for part in parts:
            began = time.perf_counter()
            yield part
            seconds.append(time.perf_counter() - began)


@contextmanager
def replayed(engine: StreamedEngine, record: Record) -> Iterator[None]:
    """With the answers of one token out of the record."""

    async def listed(running: Running, request: Request) -> AsyncGenerator[Any, None]:
        for part in record.short[request.id]:
            yield part

    with asking(engine, listed):
        yield


@contextmanager
def asking(engine: StreamedEngine, ask: Any) -> Iterator[None]:
    """With another way to ask the server."""
    vars(engine)["_ask"] = ask
    try:
        yield
    finally:
        del vars(engine)["_ask"]


@contextmanager
def adapter(kind: str) -> Iterator[None]:
    """The engine's adapter; or, for `control`, one that looks at every token a thousand times."""
    add = VllmAnswer.add

    def careful(answer: VllmAnswer, part: RequestOutput) -> int:
        for _ in range(1000 * len(part.outputs[0].token_ids)):
            math.isfinite(0.0)
        return add(answer, part)

    if kind == "control":
        VllmAnswer.add = careful  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        VllmAnswer.add = add  # type: ignore[method-assign]
