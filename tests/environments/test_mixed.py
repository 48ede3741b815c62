"""A mixture of tasks that are played differently: one answer, tools, an environment, agents; each as if alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from asyncrl.collectors.engines.base import Completion, Request, Span
from asyncrl.collectors.episode import Episode, Played, Player
from asyncrl.collectors.playing import task_parts
from asyncrl.collectors.rollout import Prompt, TaskPrompts, sampling_of
from asyncrl.config.convert import convert
from asyncrl.learners.tiny import tiny_config
from asyncrl.learners.tiny_tokenizer import build_tokenizer
from asyncrl.rewards.pool import VerifierError
from asyncrl.staleness import Weights

pytestmark = pytest.mark.asyncio
torch.set_num_threads(1)

LIMIT_S = 60.0
TOKENS = 60

TASKS = '''
from asyncrl.environments.base import Step
from asyncrl.tasks.base import Row

def twice(n: int) -> int:
    """Twice a number.

    Args:
        n: The number.
    """
    return 2 * n

class Tooled:
    tools = [twice]
    def rows(self, split): return [Row(f"{split}/0", "2*2", answer="4")]
    def score(self, row, answer):
        return {"right": float((answer.text, row.id) == (row.answer, "train/0"))}
    def part_weights(self): return {"right": 0.5}

class Guess:
    def reset(self, row, seed):
        self.row = row
        return [{"role": "user", "content": f"guess {row.id}"}]
    def step(self, answer):
        if answer.text == self.row.answer:
            return Step(done=True, reward=1.0)
        return Step([{"role": "user", "content": "no"}], reward=-0.25)

class Game:
    def rows(self, split): return [Row("only", "a game", answer="5")]
    def environment(self): return Guess()
'''

AGENT = """
async def run(row, endpoint):
    async with endpoint.client() as client:
        messages = [{"role": "user", "content": row.prompt}]
        reply = await client.chat.completions.create(model="policy", messages=messages)
    return {"named": float(row.id == "rows.jsonl:1"), "said": float(reply.choices[0].message.content == row.answer)}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer and configuration; nothing samples from it here."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(1000)
    config = tiny_config(tokenizer)
    config.max_position_embeddings = 1000
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Says:
    """A sampler that gives each request the next of its texts."""

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        self._tokenizer, self._texts = tokenizer, list(texts)
        self.prompts: list[str] = []

    async def generate(self, request: Request) -> Completion:
        self.prompts.append(self._tokenizer.decode(list(request.token_ids)))
        ids = [*self._tokenizer.encode(self._texts.pop(0), add_special_tokens=False), self._tokenizer.eos_token_id]
        spans = (Span(Weights(1, 0), 0, len(ids), ""),)
        zeros = np.zeros(len(ids))
        return Completion(np.array(ids, np.int32), zeros.astype(np.float32), zeros.astype(np.int32), spans, "stop")

    def partial(self, request_id: str) -> Completion | None:
        return None

    def listen(self, request_id: str, heard: Callable[[], None]) -> None:
        return None


class Table:
    """A started player of the mixture, and the first prompt of each of its tasks."""

    def __init__(self, recipe: Any, prompts: TaskPrompts, player: Player) -> None:
        self._recipe, self._prompts, self._player = recipe, prompts, player
        first = [prompts.train(ordinal) for ordinal in range(len(prompts.tasks))]
        self.prompts: dict[str, Prompt] = {prompt.task: prompt for prompt in first}

    async def play(self, name: str, *texts: str) -> tuple[Played, Says]:
        sampling = sampling_of(self._recipe, self._prompts.stop_token_ids)
        sampler = Says(self._prompts.tokenizer, *texts)
        episode = Episode(self.prompts[name], f"{name}.0", "test", 0, 0, 0, sampling)
        async with asyncio.timeout(LIMIT_S):
            return await self._player.play(episode, sampler), sampler


@asynccontextmanager
async def playing(model: Path, *tasks: dict[str, Any], **collector: Any) -> AsyncIterator[Table]:
    recipe = convert(
        {
            "task": {"type": "mixture", "tasks": list(tasks)},
            "collector": {"sampling": {"max_tokens": TOKENS}, **collector},
        }
    )
    prompts, player = await asyncio.to_thread(task_parts, recipe, model)
    assert isinstance(prompts, TaskPrompts)
    try:
        async with asyncio.timeout(LIMIT_S):
            await player.start()
        yield Table(recipe, prompts, player)
    finally:
        await player.close()


async def test_each_row_is_played_and_scored_as_its_own_task_is(
    model: Path, write_module: Callable[[str, str], str], tmp_path: Path
) -> None:
    """Environments, tools and agents get rows under their own ids; the record names the task."""
    module = write_module("tasks_of_a_mixture", TASKS)
    agent = {"type": "agent", "agent": f"{write_module('agent_of_a_mixture', AGENT)}:run"}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "say 7", "answer": "7"}) + "\n")
    data = {"train": str(tmp_path / "rows.jsonl"), "heldout": str(tmp_path / "rows.jsonl")}
    length = {"type": "length", "target_tokens": 2, "weight": 1.0}
    tasks = [
        {"name": "plain", "task": {"type": "reverse", "digits": [1, 1], "rewards": [length]}},
        {"name": "tools", "task": {"type": f"{module}:Tooled", "tool_format": "json", "rewards": [length]}},
        {"name": "game", "task": {"type": f"{module}:Game"}},
        {"name": "one", "task": {**agent, "data": data}},
        {"name": "other", "task": {**agent, "data": data}},
    ]
    async with playing(model, *tasks, max_turns=3) as table:
        assert table.prompts["tools"].row.id == "tools/train/0"
        assert table.prompts["tools"].own_row.id == "train/0"

        right = str(table.prompts["plain"].row.answer)
        played, asked = await table.play("plain", right)
        assert played.score.parts == {"exact": 1.0, "length": 0.0}, "two tokens, as asked for"
        assert "twice" not in asked.prompts[0], "control: it is told of no tools but its own"

        played, asked = await table.play("tools", '{"name": "twice", "arguments": {"n": 2}}', "4")
        assert ["twice" in prompt for prompt in asked.prompts] == [True, True]
        assert [message["content"] for message in played.messages if message["role"] == "tool"] == ["4"]
        sampled = sum(len(turn.completion.token_ids) for turn in played.turns)
        assert played.score.parts["right"] == 1.0
        # Of all three answers that an episode may have, and not of one: that is the row's own task's.
        assert played.score.parts["length"] == pytest.approx(-(sampled - 2) / (3 * TOKENS))
        assert played.score.reward == pytest.approx(0.5 + float(played.score.parts["length"] or 0))

        played, asked = await table.play("game", "4", "5")
        assert "guess only" in asked.prompts[0]
        assert (played.score.parts, [turn.reward for turn in played.turns]) == ({"turns": 0.75}, [-0.25, 1.0])

        for name in ("one", "other"):  # which share an endpoint
            played, _ = await table.play(name, "7")
            assert (played.score.parts, played.info) == ({"named": 1.0, "said": 1.0}, {"calls": 1})


async def test_episodes_of_all_tasks_are_seen_while_they_wait(
    model: Path, write_module: Callable[[str, str], str]
) -> None:
    slow = TASKS.replace("def step(self, answer):", "def step(self, answer):\n        import time; time.sleep(1000)")
    module = write_module("slow_of_a_mixture", slow)
    game = {"type": f"{module}:Game", "step_timeout_s": 50}
    async with playing(model, {"task": {"type": "reverse"}}, {"name": "game", "task": game}) as table:
        playing_on = asyncio.ensure_future(table.play("game", "5"))
        async with asyncio.timeout(LIMIT_S):
            while not table._player.answering:  # noqa: ASYNC110  # nobody tells of it
                await asyncio.sleep(0.01)
        assert list(table._player.answering) == ["game.0.0"]
        assert not table._player.scoring
        playing_on.cancel()
        await asyncio.wait({playing_on}, timeout=LIMIT_S)
        assert not table._player.answering


async def test_one_task_that_cannot_be_started_ends_the_start_of_all(
    model: Path, write_module: Callable[[str, str], str]
) -> None:
    module = write_module("broken_of_a_mixture", TASKS)
    tasks = [{"task": {"type": "reverse"}}, {"name": "game", "task": {"type": f"{module}:Game"}}]
    recipe = convert({"task": {"type": "mixture", "tasks": tasks}, "collector": {"sampling": {"max_tokens": 8}}})
    _, player = await asyncio.to_thread(task_parts, recipe, model)
    write_module("broken_of_a_mixture", "import no_such_library")
    try:
        with pytest.raises(VerifierError, match="no_such_library"):
            async with asyncio.timeout(LIMIT_S):
                await player.start()
    finally:
        await player.close()
