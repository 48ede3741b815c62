"""A task inside a verifier process. Imports little: a killed process is replaced at the cost of these imports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config.convert import convert
from asyncrl.rewards.parts import Verdict, judge
from asyncrl.rewards.shaping import Shaper
from asyncrl.tasks.base import Answer, Row, Task
from asyncrl.tasks.build import construct

TURNS = "turns"
"""The reward part with the sum of what an environment gave turn by turn."""


def scorer(task: dict[str, Any], seed: int, max_tokens: int) -> TaskScorer:
    """The scores of the recipe's task. task: the section, as plain values; max_tokens: that an answer may have."""
    config = convert({"task": task}).task
    return TaskScorer(construct(config, seed=seed), Shaper(config.rewards, max_tokens=max_tokens))


class TaskScorer:
    """A task behind plain dicts (`asyncrl.rewards.worker.Scorer`), and the shaping that the recipe adds to it.

    An answer has the fields of `Answer`. An episode's may have `parts`, its environment's own score, which stands for
    the task's; and `turns`: the sum of its rewards by turn, None if it gave none.
    """

    def __init__(self, task: Task, shaper: Shaper) -> None:
        self._task = task
        self._shaper = shaper

    def score(self, row: dict[str, Any], answer: dict[str, Any]) -> object:
        text, token_ids, finish_reason = answer["text"], tuple(answer["token_ids"]), answer["finish_reason"]
        if (own := answer.get("parts")) is None:
            own = self._task.score(Row(**row), Answer(text, token_ids, finish_reason, answer.get("messages", ())))
        shaping = self._shaper.weights
        if TURNS not in answer and not shaping:
            return own
        verdict = Verdict({}) if own == {} else judge(own)
        if verdict.failure:  # unscored: what is added is no reward by itself
            return own
        parts = verdict.parts
        if TURNS in answer:
            if TURNS in parts:
                raise ValueError(
                    f"score returned a part {TURNS!r}, which is the sum of the turns' rewards: rename yours"
                )
            # Where a score says what an episode is worth, no reward by turn is none earned; else nothing was said.
            parts = {**parts, TURNS: 0.0 if answer[TURNS] is None and parts else answer[TURNS]}
            if parts[TURNS] is None:
                return parts
        if shared := parts.keys() & shaping.keys():
            raise ValueError(
                f"score returned a part {sorted(shared)[0]!r}, and task.rewards has one of that name: rename yours"
            )
        return {**parts, **self._shaper.parts(text, len(token_ids), finish_reason)}

    def part_weights(self) -> Mapping[str, float]:
        return {**self._task.part_weights(), **self._shaper.weights}
