"""Log-probs that an engine reports, against those that the learner computes for the same tokens from the same weights.

In float32 both must agree to rounding. In bfloat16 they cannot (`docs/engines.md`, the head under bfloat16): what is
left is reported, without a target.

Control: the learner's log-probs at another temperature than that of the draws. A comparison that did not see that would
see nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from asyncrl.benchmarks.engines_served import answers, requests, served
from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.collectors.engines.base import Completion, Request, Sampling
from asyncrl.config.recipe import Collector, Engine, Model, Recipe, TransformersEngine
from asyncrl.learners.forward import token_logprobs
from asyncrl.learners.model import load_model
from asyncrl.learners.tiny import ensure_tiny
from asyncrl.schema.support import Support

TARGET = 1e-4
TOKENS = 24
SAMPLINGS = (
    Sampling(max_tokens=TOKENS),
    Sampling(max_tokens=TOKENS, temperature=0.7),
    Sampling(max_tokens=TOKENS, temperature=1.3, top_k=20, top_p=0.9),
)
OTHER = 1.1  # times the temperature of the draws, in the control


def measure(*, quick: bool, say: Say) -> Measured:
    """Rows: the transformers engine in float32 and bfloat16, and the control."""
    path, engine = ensure_tiny(0), TransformersEngine(slots=32)
    prompts = 32 if quick else 128
    exact = mismatch(path, engine, "float32", prompts=prompts, say=say)
    half = mismatch(path, engine, "bfloat16", prompts=prompts, say=say)
    control = mismatch(path, engine, "float32", prompts=prompts, say=say, warmer=OTHER)
    return Measured(
        [exact, half, control],
        [
            Target("transformers engine: largest log-prob mismatch, float32", exact["largest"], TARGET, "lower"),
            Target("control: the same at another temperature", control["largest"], TARGET, "higher"),
        ],
    )


def mismatch(
    path: Path, engine: Engine, dtype: Literal["float32", "bfloat16"], *, prompts: int, say: Say, warmer: float = 1.0
) -> Row:
    """Over all sampled tokens, in nats; a third of the answers are truncated. warmer: by what the learner's temperature
    is multiplied."""
    recipe = Recipe(model=Model(dtype=dtype), collector=Collector(engine=engine))
    learner = load_model(path, dtype, "auto")
    samplings = [SAMPLINGS[n % len(SAMPLINGS)] for n in range(prompts)]
    asked = requests(samplings, vocabulary=learner.config.vocab_size, seed=1)
    found = asyncio.run(_sampled(recipe, path, asked))
    differences = []
    for request, answer in zip(asked, found, strict=True):
        sequence = torch.tensor([*request.token_ids, *answer.token_ids.tolist()])
        with torch.inference_mode():
            own = token_logprobs(
                learner,
                sequence,
                torch.tensor([0, len(sequence)]),
                temperature=request.sampling.temperature * warmer,
                support=Support.joined([(None, len(request.token_ids)), (answer.support, len(answer.token_ids))]),
            )
        differences.append(torch.from_numpy(answer.logprobs) - own[len(request.token_ids) :])
    difference = torch.cat(differences)
    row: Row = {
        "part": "mismatch",
        "kind": "control" if warmer != 1 else "engine",
        "engine": engine.type,
        "dtype": dtype,
        "tokens": difference.numel(),
        "largest": float(difference.abs().max()),
        "root_mean_square": float(difference.square().mean().sqrt()),
    }
    say(f"mismatch, {row['kind']}, {dtype}: {row['largest']:.2g} at most, rms {row['root_mean_square']:.2g}")
    return row


async def _sampled(recipe: Recipe, path: Path, asked: Sequence[Request]) -> list[Completion]:
    async with served(recipe, path) as engine:
        return await answers(engine, asked)
