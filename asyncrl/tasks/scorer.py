"""A task inside a verifier process. Imports little: a killed process is replaced at the cost of these imports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from asyncrl.config.convert import convert
from asyncrl.config.recipe import AgentTask, MixtureTask, SingleTask, mixed_tasks
from asyncrl.config.rewards import part_name
from asyncrl.rewards.base import Finding, Verifier
from asyncrl.rewards.build import REMOTE, verifier
from asyncrl.rewards.parts import Verdict, joined, judge
from asyncrl.rewards.worker import Scorer
from asyncrl.tasks.base import Answer, Row, Task
from asyncrl.tasks.build import construct
from asyncrl.tasks.conversing import converses
from asyncrl.tasks.mixture import own_id, task_of, together

TURNS = "turns"
"""The reward part with the sum of what an environment gave turn by turn."""


def scorer(task: dict[str, Any], seed: int, max_tokens: int, max_turns: int = 1) -> Scorer:
    """The scores of the recipe's task. task: the section, as plain values; max_tokens: that an answer may have;
    max_turns: answers of an episode that may have several."""
    config = convert({"task": task}).task
    if isinstance(config, MixtureTask):
        mixed = mixed_tasks(config).items()
        return MixtureScorer({name: _scorer(one, seed, max_tokens, max_turns) for name, one in mixed})
    return _scorer(config, seed, max_tokens, max_turns)


def _scorer(config: SingleTask, seed: int, max_tokens: int, max_turns: int) -> TaskScorer:
    task = construct(config, seed=seed)
    most = max_tokens * (max_turns if converses(task) else 1)
    parts = {part_name(part): part for part in config.rewards if not isinstance(part, REMOTE)}
    return TaskScorer(
        task,
        {name: verifier(part, max_tokens=most) for name, part in parts.items()},
        limited=frozenset(name for name, part in parts.items() if part.timeout_s is not None),
        replaced=replaced(config),
        elsewhere=any(isinstance(part, REMOTE) or part.timeout_s is not None for part in config.rewards),
    )


def replaced(task: SingleTask) -> frozenset[str]:
    """The parts that are not asked where an agent gives a reward itself: those that say what is right."""
    own = isinstance(task, AgentTask)
    return frozenset(part_name(part) for part in task.rewards if own and part.role == "outcome")


class MixtureScorer:
    """The scorers of several tasks: each row goes to that of its own, as that one made it. Implements `Scorer`."""

    def __init__(self, scorers: Mapping[str, TaskScorer]) -> None:
        self._scorers = scorers

    def score(self, row: dict[str, Any], answer: dict[str, Any]) -> object:
        return self._of(row).score({**row, "id": own_id(row["id"])}, answer)

    def verify(self, part: str, row: dict[str, Any], answer: dict[str, Any]) -> object:
        return self._of(row).verify(part, {**row, "id": own_id(row["id"])}, answer)

    def part_weights(self) -> Mapping[str, float]:
        return together({name: scorer.part_weights() for name, scorer in self._scorers.items()})

    def _of(self, row: Mapping[str, Any]) -> TaskScorer:
        return self._scorers[task_of(row["id"])]


class TaskScorer:
    """A task and the recipe's verifiers behind plain dicts (`asyncrl.rewards.worker.Scorer`).

    An answer has the fields of `Answer`. An episode's may have `parts`, its environment's own score, which stands for
    the task's; and `turns`: the sum of its rewards by turn, None if it gave none.

    limited: verifiers with a limit of their own, which are called by themselves. replaced: verifiers that are not
    asked where the answer brings `parts`. elsewhere: parts are made outside of `score`, which may then make none.
    """

    def __init__(
        self,
        task: Task,
        verifiers: Mapping[str, Verifier],
        *,
        limited: frozenset[str] = frozenset(),
        replaced: frozenset[str] = frozenset(),
        elsewhere: bool = False,
    ) -> None:
        self._task = task
        self._verifiers = verifiers
        self._limited = limited
        self._replaced = replaced
        self._elsewhere = elsewhere

    def score(self, row: dict[str, Any], answer: dict[str, Any]) -> object:
        """The task's own score and the verifiers without a limit of their own."""
        brought = answer.get("parts")
        own: object = brought
        if own is None:
            own = self._task.score(
                Row(**row),
                Answer(answer["text"], tuple(answer["token_ids"]), answer["finish_reason"], answer.get("messages", ())),
            )
        aside = self._limited if brought is None else self._limited | self._replaced
        asked = [verifier for name, verifier in self._verifiers.items() if name not in aside]
        if TURNS not in answer and not asked and not (own == {} and self._elsewhere):
            return own
        verdict = Verdict({}) if own == {} else judge(own)
        if verdict.failure:  # unscored: what is added is no reward by itself
            return own
        if TURNS in answer:
            if TURNS in verdict.parts:
                raise ValueError(
                    f"score returned a part {TURNS!r}, which is the sum of the turns' rewards: rename yours"
                )
            # Where a score says what an episode is worth, no reward by turn is none earned; else nothing was said.
            turns = 0.0 if answer[TURNS] is None and verdict.parts else answer[TURNS]
            verdict = replace(verdict, parts={**verdict.parts, TURNS: turns})
            if turns is None:
                return verdict.parts
        return joined([verdict, *(judge(verifier.verify(row, answer)) for verifier in asked)])

    def verify(self, part: str, row: dict[str, Any], answer: dict[str, Any]) -> Finding:
        """One verifier by itself."""
        return self._verifiers[part].verify(row, answer)

    def part_weights(self) -> Mapping[str, float]:
        return self._task.part_weights()
