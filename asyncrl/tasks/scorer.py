"""A task inside a verifier process. Imports little: a killed process is replaced at the cost of these imports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config.convert import convert
from asyncrl.rewards.parts import judge
from asyncrl.rewards.shaping import Shaper
from asyncrl.tasks.base import Answer, Row, Task
from asyncrl.tasks.build import construct


def scorer(task: dict[str, Any], seed: int, max_tokens: int) -> TaskScorer:
    """The scores of the recipe's task. task: the section, as plain values; max_tokens: that an answer may have."""
    config = convert({"task": task}).task
    return TaskScorer(construct(config, seed=seed), Shaper(config.rewards, max_tokens=max_tokens))


class TaskScorer:
    """A task behind plain dicts (`asyncrl.rewards.worker.Scorer`), and the shaping that the recipe adds to it."""

    def __init__(self, task: Task, shaper: Shaper) -> None:
        self._task = task
        self._shaper = shaper

    def score(self, row: dict[str, Any], answer: dict[str, Any]) -> object:
        text, token_ids, finish_reason = answer["text"], tuple(answer["token_ids"]), answer["finish_reason"]
        own = self._task.score(Row(**row), Answer(text, token_ids, finish_reason))
        if not self._shaper.weights:
            return own
        verdict = judge(own)
        if verdict.failure:  # unscored: shaping alone is no reward
            return own
        if shared := verdict.parts.keys() & self._shaper.weights.keys():
            raise ValueError(
                f"score returned a part {sorted(shared)[0]!r}, and task.rewards has one of that name: rename yours"
            )
        return {**verdict.parts, **self._shaper.parts(text, len(token_ids), finish_reason)}

    def part_weights(self) -> Mapping[str, float]:
        return {**self._task.part_weights(), **self._shaper.weights}
