"""A table to play episodes of several turns on: tools, a game, and a model that says what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.collectors.engines.base import Completion, Request, Span
from asyncrl.collectors.episode import Episode, Played
from asyncrl.collectors.playing import task_parts
from asyncrl.collectors.rollout import TaskPrompts, sampling_of
from asyncrl.collectors.turns import TurnPlayer
from asyncrl.config.convert import convert
from asyncrl.staleness import Weights

LIMIT_S = 60.0
MAX_LENGTH = 400
MOST_TOKENS = 160

TOOLS = """
import os, sys, time
from asyncrl.tasks.base import Row

def add(a: int, b: int) -> int:
    '''Add.

    Args:
        a: One.
        b: Another.
    '''
    return a + b

def fail(how: str) -> str:
    '''Fail.

    Args:
        how: In which way.
    '''
    if how == "raise":
        raise ValueError("no such thing")
    if how == "exit":
        sys.exit(3)
    if how == "die":
        os._exit(3)
    if how == "fork":
        os.fork()
        os._exit(3)
    if how == "print":
        for _ in range(100):
            sys.stdout.write("x" * 50_000)
        return "printed"
    if how == "memory":
        return str(len(bytearray(1 << 40)))
    while how == "hang":
        pass
    return "x" * 100_000

class Sums:
    tools = [add, fail]

    def rows(self, split):
        return [Row("1", "1+2", answer="3")]

    def score(self, row, answer):
        assert len(answer.token_ids) >= len(answer.text)
        return {"right": float(answer.text == row.answer), "said": float(len(answer.messages))}

    def part_weights(self):
        return {"said": 0.0}
"""

GAME = """
import os, time
from asyncrl.environments.base import Step
from asyncrl.tasks.base import Row

LEFT = []

class Guess:
    def __init__(self, scored):
        self.guesses = 0
        if scored:
            self.score = lambda: {"quick": 1.0 / self.guesses}

    def reset(self, row, seed):
        self.fault = row.info.get("fault", "")
        if self.fault == "score raises":
            self.score = lambda: 1 / 0
        if self.fault == "reset raises":
            raise KeyError("no such game")
        if self.fault == "reset hangs":
            time.sleep(1000)
        if self.fault == "no opening":
            return []
        LEFT.append(seed)
        self.secret = row.answer
        return [{"role": "user", "content": f"guess {len(LEFT)}"}]

    def step(self, answer):
        self.guesses += 1
        if self.fault == "step raises":
            raise ZeroDivisionError("in the game")
        if self.fault == "step hangs":
            time.sleep(1000)
        if self.fault == "step dies":
            os._exit(5)
        if self.fault == "no step":
            return "right"
        if self.fault == "reward":
            return Step([{"role": "user", "content": "?"}], reward=float("nan"))
        if self.fault == "nothing said":
            return Step()
        if self.fault == "odd info":
            return Step(done=True, info={"when": float("nan")})
        if self.fault == "unknown role":
            return Step([{"role": "narrator", "content": "?"}])
        if answer.text == self.secret:
            return Step(done=True, reward=1.0, info={"guesses": self.guesses})
        return Step([{"role": "user", "content": "higher" if answer.text < self.secret else "lower"}], reward=-0.25)

    def close(self):
        if self.fault == "close raises":
            raise OSError("at the end")

class Game:
    def __init__(self, scored=False):
        self.scored = scored

    def rows(self, split):
        return [Row("1", "a game", answer="5")]

    def environment(self):
        return Guess(self.scored)
"""


class Script:
    """A sampler that says what it was told, turn by turn. A text that ends with `...` is cut there; None never ends."""

    def __init__(self, tokenizer: Any, texts: Sequence[str | None]) -> None:
        self._tokenizer, self._texts = tokenizer, list(texts)
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        text = self._texts[len(self.requests)]
        self.requests.append(request)
        if text is None:
            await asyncio.get_running_loop().create_future()
        return self._completion(str(text), request.sampling.max_tokens)

    def partial(self, request_id: str) -> Completion | None:
        return self._completion("not yet...")

    def listen(self, request_id: str, heard: Callable[[], None]) -> None:
        return None

    def _completion(self, text: str, most: int = MOST_TOKENS) -> Completion:
        ids = self._tokenizer.encode(text.removesuffix("..."), add_special_tokens=False)
        cut = text.endswith("...") or len(ids) >= most
        ids = ids[:most] if cut else [*ids, self._tokenizer.eos_token_id]
        spans = (Span(Weights(1, 0), 0, len(ids), ""),)
        zeros = np.zeros(len(ids))
        ending = "length" if cut else "stop"
        return Completion(np.array(ids, np.int32), zeros.astype(np.float32), zeros.astype(np.int32), spans, ending)


class Table:
    """A started player, and what plays on it."""

    def __init__(self, recipe: Any, prompts: TaskPrompts, player: TurnPlayer) -> None:
        self.recipe, self.prompts, self.player = recipe, prompts, player
        self.scripts: list[Script] = []

    async def play(self, *texts: str | None, member: int = 0, fault: str = "") -> Played:
        sampling = sampling_of(self.recipe, self.prompts.stop_token_ids)
        prompt = self.prompts.train(0)
        if fault:  # as if the row said so
            prompt = replace(prompt, row=replace(prompt.row, info={"fault": fault}))
        episode = Episode(prompt, "0.0", "test", 0, 0, member, sampling)
        self.scripts.append(Script(self.prompts.tokenizer, texts))
        async with asyncio.timeout(LIMIT_S):
            return await self.player.play(episode, self.scripts[-1])


@asynccontextmanager
async def playing(model: Path, task: dict[str, Any], **collector: Any) -> AsyncIterator[Table]:
    recipe = convert(
        {"task": {"step_timeout_s": 20, **task}, "collector": {"sampling": {"max_tokens": MOST_TOKENS}, **collector}}
    )
    prompts, player = task_parts(recipe, model)
    assert isinstance(prompts, TaskPrompts)
    assert isinstance(player, TurnPlayer)
    try:
        await player.start()
        yield Table(recipe, prompts, player)
    finally:
        await player.close()


def call(name: str, **arguments: Any) -> str:
    return '{"name": "%s", "arguments": %s}' % (name, str(arguments).replace("'", '"'))  # noqa: UP031


async def begun(zygote: Any) -> None:
    """Until there is a process of an episode."""
    async with asyncio.timeout(LIMIT_S):
        while not zygote._made:  # noqa: ASYNC110  # nobody tells of it
            await asyncio.sleep(0.01)


def said(played: Played, role: str = "tool") -> list[str]:
    return [message["content"] for message in played.messages if message["role"] == role]
