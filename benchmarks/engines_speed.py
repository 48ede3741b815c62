"""Tokens per second: requests that join and leave at every step, against `generate()` over batches of them.

Both sides sample the same model for the same prompts, one thread, 32 at once. Every answer has a length of its own,
log-normal (cv 1), which the engine gets as `max_tokens` and `generate()` as the longest of its batch, where it stops;
only the tokens that were asked for count. The sides take turns.

Control: answers of one length. Then a batch wastes nothing, and what is left of the ratio is how fast a step is; if
that reached the target, the target would say nothing about batching.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from asyncrl.benchmarks.engines_served import answers, requests, served
from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.collectors.engines.base import Request, Sampling
from asyncrl.collectors.engines.simulated import relative_length
from asyncrl.config.recipe import Collector, Recipe, TransformersEngine
from asyncrl.learners.tiny import ensure_tiny

TARGET = 3.0
PROMPTS, SLOTS = 256, 32
MEAN_TOKENS = 48
CV = 1.0


def lengths(cv: float) -> list[int]:
    """Tokens of each answer."""
    return [max(1, round(MEAN_TOKENS * relative_length(0, n, 0, cv))) for n in range(PROMPTS)]


def measure(*, quick: bool, say: Say) -> Measured:
    """Rows: `log-normal`, and the control `equal`."""
    path, turns, threads = ensure_tiny(0), 1 if quick else 5, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        row = compared(path, "log-normal", lengths(CV), turns=turns, say=say)
        control = compared(path, "equal", lengths(0.0), turns=turns, say=say)
    finally:
        torch.set_num_threads(threads)
    return Measured([row, control], targets(row, control))


def targets(row: Row, control: Row) -> list[Target]:
    return [
        Target("transformers engine: tokens/s over those of generate()", row["ratio"], TARGET, "higher"),
        Target("control: the same for answers of one length", control["ratio"], TARGET, "lower"),
    ]


def compared(path: Path, kind: str, wanted: Sequence[int], *, turns: int, say: Say) -> Row:
    """One answer for each wanted number of tokens. Medians over the turns, of tokens a second and of their ratio within
    a turn."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        top_k=0,
        pad_token_id=0,  # no end token: each answer has the length that is wanted
    )
    asked = requests([Sampling(max_tokens=n) for n in wanted], vocabulary=model.config.vocab_size, seed=0)
    tokens = sum(wanted)
    ours, theirs = [], []
    for turn in range(turns + 1):
        times = asyncio.run(_engine_s(path, asked)), _generate_s(model, asked)
        if turn > 0:  # the first one warms both up
            ours.append(times[0])
            theirs.append(times[1])
    row: Row = {
        "part": "speed",
        "kind": kind,
        "prompts": len(asked),
        "slots": SLOTS,
        "tokens": tokens,
        "engine_tokens_s": round(tokens / median(ours)),
        "generate_tokens_s": round(tokens / median(theirs)),
        "ratio": round(median(b / a for a, b in zip(ours, theirs, strict=True)), 2),
    }
    say(f"speed, {kind} lengths: engine {row['engine_tokens_s']} tokens/s, generate() {row['generate_tokens_s']}")
    return row


async def _engine_s(path: Path, asked: Sequence[Request]) -> float:
    """Seconds from the first request to the last answer."""
    recipe = Recipe(collector=Collector(engine=TransformersEngine(slots=SLOTS)))
    async with served(recipe, path) as engine:
        began = time.perf_counter()
        found = await answers(engine, asked)
        seconds = time.perf_counter() - began
    for request, answer in zip(asked, found, strict=True):
        if len(answer.token_ids) != request.sampling.max_tokens:
            raise RuntimeError(f"request {request.id} ended with {answer.finish_reason}: {answer.error}")
    return seconds


def _generate_s(model: PreTrainedModel, asked: Sequence[Request]) -> float:
    """Seconds for batches of SLOTS prompts, in order, each until its longest answer ends."""
    began = time.perf_counter()
    for first in range(0, len(asked), SLOTS):
        batch = asked[first : first + SLOTS]
        width = max(len(request.token_ids) for request in batch)
        padding = [width - len(request.token_ids) for request in batch]
        ids = torch.tensor([[0] * n + list(request.token_ids) for n, request in zip(padding, batch, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in padding])
        longest = max(request.sampling.max_tokens for request in batch)
        found = model.generate(  # type: ignore[operator]  # transformers' types take it for a tensor
            ids, attention_mask=mask, max_new_tokens=longest
        )
        if found.shape[1] != width + longest:
            raise RuntimeError(f"generate() ended after {found.shape[1] - width} of {longest} tokens")
    return time.perf_counter() - began
