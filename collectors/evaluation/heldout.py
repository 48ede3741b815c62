"""An evaluation as the learner asks for it: the first n held-out rows, answered by one set of weights, scored.

    request: {"id", "weights": [lineage, version], "prompts": n, "samples": answers per row}
    result:  {"id", "weights", "n": answers, "success": mean reward of the scored ones or None, "unscored",
              "answers": [{"row_id", "prompt", "answer", "expected", "reward" or None, "failure", "finish_reason"}]}

Of an episode of several turns `answer` is the last one, and `messages` the conversation after the row's own.

Rewards are those of the task, without what the recipe adds for training: shaping, scale and clip. Both are JSON,
without NaN.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.buffers.concurrency import all_or_nothing
from asyncrl.collectors.again import play
from asyncrl.collectors.engines.base import Sampling
from asyncrl.collectors.episode import Episode, EpisodeLost, Player, Sampler
from asyncrl.collectors.fleet import CollectorError
from asyncrl.collectors.rollout import Prompt, PromptError, Prompts
from asyncrl.staleness import Weights


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A request, taken apart."""

    id: str
    weights: Weights
    prompts: int
    samples: int

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> Evaluation:
        lineage, version = request["weights"]
        return cls(str(request["id"]), Weights(lineage, version), int(request["prompts"]), int(request["samples"]))


async def evaluate(
    evaluation: Evaluation,
    *,
    prompts: Prompts,
    player: Player,
    sampler: Sampler,
    sampling: Sampling,
    run: str,
    on_played: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Answer and score; all episodes are played at once. Seeds are a function of run, row and sample, not of the
    weights, so that before and after differ by the weights alone. `on_played` hears how many episodes were played.

    The caller keeps the weights as they are until this returns. Raises CollectorError if an answer has tokens of other
    ones after all, and what `player.play` raises.
    """

    played_so_far = 0

    async def answer(index: int, prompt: Prompt | PromptError, sample: int) -> dict[str, Any]:
        if isinstance(prompt, PromptError):
            return _entry(f"heldout-{index}", failure=prompt.reason)
        episode = Episode(
            prompt,
            group=f"{evaluation.id}/{index}",
            run=f"{run}/heldout",
            ordinal=index,
            attempt=0,
            member=sample,
            sampling=sampling,
        )
        nonlocal played_so_far
        try:
            played = await play(episode, player, sampler)
        except EpisodeLost as lost:
            return _entry(prompt.row.id, prompt=prompt, failure=lost.reason)
        finally:
            played_so_far += 1
            on_played(played_so_far)
        spans = [span for turn in played.turns for span in turn.completion.spans]
        if strangers := {span.weights for span in spans} - {evaluation.weights}:
            raise CollectorError(f"evaluation {evaluation.id}: an answer has tokens of {sorted(map(tuple, strangers))}")
        return _entry(
            prompt.row.id,
            prompt=prompt,
            answer=prompts.read(played.turns[-1].completion.token_ids.tolist()),
            reward=played.score.outcome,  # shaping is for training
            failure=played.score.failure or played.score.wrong,
            finish_reason=played.finish_reason,
            messages=played.messages,
        )

    asked: list[Prompt | PromptError] = []
    for index in range(min(evaluation.prompts, prompts.heldout_rows)):
        try:
            asked.append(prompts.heldout(index))
        except PromptError as error:
            asked.append(error)
        # A millisecond each: thousands of rows must not keep heartbeats and signals waiting.
        await asyncio.sleep(0)
    answers = await all_or_nothing(
        answer(index, prompt, sample) for index, prompt in enumerate(asked) for sample in range(evaluation.samples)
    )
    rewards = [entry["reward"] for entry in answers if entry["reward"] is not None]
    return {
        "id": evaluation.id,
        "weights": list(evaluation.weights),
        "n": len(answers),
        "success": sum(rewards) / len(rewards) if rewards else None,
        "unscored": len(answers) - len(rewards),
        "answers": answers,
    }


def _entry(
    row_id: str,
    *,
    prompt: Prompt | None = None,
    answer: str = "",
    reward: float = math.nan,
    failure: str = "",
    finish_reason: str = "",
    messages: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    entry = {
        "row_id": row_id,
        "prompt": "" if prompt is None else prompt.text,
        "answer": answer,
        "expected": None if prompt is None else prompt.row.answer,
        "reward": reward if math.isfinite(reward) else None,
        "failure": failure,
        "finish_reason": finish_reason,
    }
    return {**entry, "messages": list(messages)} if messages else entry
