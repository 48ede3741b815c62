"""Episodes of several turns in the record: a real model, a real environment, a collector, a buffer."""

from __future__ import annotations

import json
import shutil
import string

import pytest
import torch

from asyncrl.learners.tiny_tokenizer import CHAT_TEMPLATE, build_tokenizer
from asyncrl.schema import pack
from tests.collector.real import MAX_LENGTH, check_logprobs, versions_of

pytestmark = pytest.mark.asyncio
torch.set_num_threads(1)

TALK = """
from asyncrl.environments.base import Step
from asyncrl.tasks.base import Row

class Talk:
    def environment(self):
        self.turns = 0
        return self

    def rows(self, split):
        return [Row(f"row-{n}", f"hello {n}") for n in range(4)]

    def reset(self, row, seed):
        return None

    def step(self, answer):
        self.turns += 1
        return Step([{"role": "user", "content": f"and {self.turns}?"}], done=self.turns == 3, reward=self.turns)

    def close(self):
        pass
"""


@pytest.mark.parametrize("forgets", [True, False], ids=["rewrites old turns", "only appends"])
async def test_turns_are_trained_in_the_context_they_were_sampled_in_also_where_a_template_rewrites_it(
    kit, model_path, publisher, tmp_path, monkeypatch, forgets
):
    (tmp_path / "talk_of_a_test.py").write_text(TALK)
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "model"
    shutil.copytree(model_path, folder)
    tokenizer = build_tokenizer(MAX_LENGTH)
    if forgets:  # of all answers but the last message
        tokenizer.chat_template = CHAT_TEMPLATE.replace(
            "message['content']", "('..' if message['role'] == 'assistant' else message['content'])"
        )
    tokenizer.save_pretrained(folder)
    # Noise seldom ends by itself: here every letter and digit ends it.
    sampling = {"max_tokens": 12, "stop": [*string.ascii_letters, *string.digits]}
    recipe = kit.recipe(
        collector={"engine": {"type": "transformers"}, "sampling": sampling, "group_size": 3},
        learner={"groups_per_step": 2},
        task={"type": "talk_of_a_test:Talk"},
    )
    buffer = kit.buffer(recipe)
    kept, publish = versions_of(folder, publisher)
    learner = kit.learner(buffer, publish)
    async with kit.collecting(recipe, buffer, model_path=folder):
        await learner.start()
        for _ in range(2):
            await learner.step()
    several = 0
    for batches in learner.batches.values():
        packed = pack(batches)
        check_logprobs(packed, kept)  # of each row by itself: what stands before a token is what it was sampled after
        rows = packed.table.to_pylist()
        members = {(row["ticket"], row["member"]) for row in rows}
        assert len(members) == 6
        for ticket, member in members:
            segments = [row for row in rows if (row["ticket"], row["member"]) == (ticket, member)]
            turns = json.loads(segments[0]["info"])["turns"]
            several += turns > 1
            assert len(segments) == (turns if forgets else 1)
            assert [row["segment"] for row in segments] == list(range(len(segments)))
            given = [reward for row in segments for reward in row["turn_rewards"]]
            assert given == [1.0, 2.0, 3.0][:turns]
            assert {row["reward"] for row in segments} == {sum(given)}
    assert several
