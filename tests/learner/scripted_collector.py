"""A collector by the book, for tests of the learner: one group at a time, each token by a whole forward pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from asyncrl.buffers.base import Buffer, Commit, GroupHeader, Member, Ticket, UnknownMember
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.config.recipe import Recipe
from asyncrl.learners.limits import limits_of
from asyncrl.schema import Group, digest, encode, sampled_tokens, span_weights, to_batch, version_range
from asyncrl.staleness import Weights
from asyncrl.weights.base import WeightsGone
from asyncrl.weights.build import receiver

GROUP_SIZE = 4
COMPLETION = 4
PROMPTS = [[1, 2], [3, 4, 5], [6]]


class StoppingBuffer(MemoryBuffer):
    """Sets `stop` when the commit to version `at` is acknowledged: the learner that made it stops right there, however
    fast or slow the machine is."""

    def __init__(self, recipe: Recipe, *, at: int) -> None:
        super().__init__(recipe.run.name, limits_of(recipe, max_length=64))
        self.at = at
        self.stop = asyncio.Event()

    async def commit(self, lineage: int, step: int, *, skipped: bool = False) -> Commit:
        commit = await super().commit(lineage, step, skipped=skipped)
        if commit.version == self.at:
            self.stop.set()
        return commit


def reward_of(completion: list[int]) -> float:
    """Share of even tokens: something that a random model can learn within a few steps."""
    return sum(token % 2 == 0 for token in completion) / len(completion)


class ScriptedCollector:
    """`run` until the run has ended. `lag`: serve every (lag + 1)-th version only, so that tokens of age > 0 arise."""

    def __init__(
        self,
        buffer: Buffer,
        model_path: Path,
        *,
        sample: Callable[..., tuple[list[int], list[float]]],
        make_row: Callable[..., Any],
        make_group: Callable[..., Group],
        lag: int = 0,
        reward: Callable[[list[int]], float] = reward_of,
    ) -> None:
        self.buffer, self.lag, self.reward = buffer, lag, reward
        self.sample, self.make_row, self.make_group = sample, make_row, make_group
        self.model = AutoModelForCausalLM.from_pretrained(model_path).eval()
        self.member = Member("scripted", "1")
        self.serving: Weights | None = None
        self.checksum = ""
        self.generator = torch.Generator().manual_seed(0)
        self.served: dict[Weights, dict[str, torch.Tensor]] = {}
        self.sequence = 0

    async def run(self) -> None:
        await self.buffer.join(self.member, {})
        while True:
            try:
                beat = await self.buffer.beat(
                    self.member, serving=self.serving, checksum=self.checksum, progress={}, info={}
                )
            except UnknownMember:
                await self.buffer.join(self.member, {})
                continue
            if beat.phase == "ended":
                return
            asked = None if beat.evaluation is None else Weights(*beat.evaluation["weights"])
            known = asked is not None and asked in (self.serving, beat.announced)  # it may be asked for before it comes
            if known and await self.buffer.claim_evaluation(self.member, beat.evaluation["id"]):
                if self.serving != Weights(*beat.evaluation["weights"]):
                    await self.activate()
                await self.evaluate(beat.evaluation)
                continue
            if beat.announced is not None and self.wants(beat.announced):
                await self.activate()
                continue
            if self.serving is None:
                await self.buffer.nudge(self.member, 1.0)
                continue
            # The same number until it is answered: a ticket granted just after the wait ended is still ours.
            tickets = await self.buffer.tickets(self.member, seq=self.sequence, want=1, wait_s=0.2)
            for ticket in tickets:
                await self.collect(ticket)
            self.sequence += bool(tickets)

    def wants(self, announced: Weights) -> bool:
        if self.serving is None or announced.lineage != self.serving.lineage:
            return True
        return announced.version > self.serving.version + self.lag

    async def activate(self) -> None:
        found = await self.buffer.announcement()
        assert found is not None
        weights, document = found
        offer = document["offers"][0]
        try:
            staged = await asyncio.to_thread(receiver(offer).stage, offer, deadline_s=10.0)
        except WeightsGone:  # newer ones took their place meanwhile, or their learner has ended: a later beat tells
            return
        self.model.load_state_dict(dict(staged.tensors), strict=False)
        self.model.tie_weights()
        self.serving, self.checksum = weights, staged.checksum
        self.served[weights] = {name: tensor.clone() for name, tensor in staged.tensors.items()}

    async def collect(self, ticket: Ticket) -> None:
        assert self.serving is not None
        prompt = PROMPTS[ticket.ordinal % len(PROMPTS)]
        rows = []
        for member in range(GROUP_SIZE):
            completion, logprobs = self.sample(self.model, prompt, COMPLETION - member % 2, self.generator)
            reward = self.reward(completion)
            rows.append(self.make_row(prompt, completion, logprobs, reward=reward, weights=self.serving, member=member))
        group = self.make_group(rows, ticket=ticket.ordinal, attempt=ticket.attempt, lineage=self.serving.lineage)
        payload, batch = encode(group), to_batch(group)
        oldest, newest = version_range(batch)
        header = GroupHeader(
            ordinal=ticket.ordinal,
            attempt=ticket.attempt,
            weights=self.serving,
            oldest=oldest,
            newest=newest,
            spans=span_weights(batch),
            tokens=sampled_tokens(batch),
            seconds=0.01,
            digest=digest(payload),
        )
        await self.buffer.put(self.member, header, payload)

    async def evaluate(self, request: dict[str, Any]) -> None:
        answers = []
        for n in range(request["prompts"]):
            prompt = PROMPTS[n % len(PROMPTS)]
            completion, _ = self.sample(self.model, prompt, COMPLETION, self.generator)
            answers.append(
                {
                    "row_id": f"heldout-{n}",
                    "prompt": str(prompt),
                    "answer": str(completion),
                    "expected": "even",
                    "reward": reward_of(completion),
                }
            )
        success = sum(answer["reward"] for answer in answers) / len(answers)
        await self.buffer.report_evaluation(
            request["id"],
            {
                "id": request["id"],
                "weights": request["weights"],
                "n": len(answers),
                "success": success,
                "unscored": 0,
                "answers": answers,
                "time": time.time(),
            },
        )
