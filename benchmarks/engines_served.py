"""An engine as a recipe's collector makes it, serving a model's own weights, and a crowd of requests for it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from asyncrl.collectors.engines.base import Completion, Engine, Request, Sampling, request_seed
from asyncrl.collectors.evaluation.standalone import own_weights
from asyncrl.collectors.fleet import engine_makers
from asyncrl.config.recipe import Recipe
from asyncrl.staleness import Weights

LIMIT_S = 600.0
"""For anything an engine is asked to do here, on a machine that is busy."""


@asynccontextmanager
async def served(recipe: Recipe, path: Path) -> AsyncIterator[Engine]:
    """The recipe's engine with the weights of the model in `path`."""
    engine = engine_makers(recipe, "bench", path)[0]()
    async with asyncio.timeout(LIMIT_S):
        await engine.start()
        try:
            await engine.stage(await asyncio.to_thread(own_weights, recipe, path, Weights(0, 0)))
            await engine.activate()
            yield engine
        finally:
            await engine.close()


def requests(samplings: Sequence[Sampling], *, vocabulary: int, seed: int) -> list[Request]:
    """One for each, with prompts of 4 to 16 random tokens."""
    made = []
    for n, sampling in enumerate(samplings):
        rng = random.Random(f"{seed}/{n}")
        prompt = tuple(rng.randrange(vocabulary) for _ in range(rng.randint(4, 16)))
        made.append(Request(f"r{n}", f"r{n}", f"r{n}", prompt, sampling, request_seed("bench", n, seed, 0, 0)))
    return made


async def answers(engine: Engine, asked: Sequence[Request]) -> list[Completion]:
    """All at once; the engine queues what its slots do not take."""
    return await asyncio.gather(*(engine.generate(request) for request in asked))
