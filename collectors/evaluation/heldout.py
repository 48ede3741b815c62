"""An evaluation as the learner asks for it: the first n held-out rows, answered by one set of weights, scored.

    request: {"id", "weights": [lineage, version], "prompts": n, "samples": answers per row,
              "sampling": what is other than in rollouts, "pass_above", "difficulty": column or null}
    result:  {"id", "weights", "sampling", "n": answers, "success": mean reward of the scored ones or None, "unscored",
              "answers": [entry, ...]}

One entry an answer:

    task, row_id, sample    whose row it answers; sample: 0 ... samples - 1
    seed, version           what it was drawn with, and by which version
    prompt, answer          of an episode of several turns the last ones; `messages` is the conversation then
    expected                the row's answer
    reward, parts           None: unscored, then `failure` says why, else "". parts: by name
    wrong                   class of what is wrong with a scored answer, "" if nothing is
    detail                  of `failure` or `wrong`, for a person
    read                    what the verifier took for the answer, by which votes are counted; "": its whole text
    finish_reason, tokens   tokens: sampled, of all turns
    latency_s               of its requests, at the engine, other requests' share of it included; None: nothing sampled
    difficulty              the row's value in the column that the request names, if it does
    verifier_s              that its verifiers computed; None: one was killed, or none was asked

Rewards are those of the task, without what the recipe adds for training: shaping, scale and clip. Both are JSON,
without NaN.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from asyncrl.buffers.concurrency import all_or_nothing
from asyncrl.collectors.again import play
from asyncrl.collectors.engines.base import Sampling
from asyncrl.collectors.episode import Episode, EpisodeLost, Played, Player, Sampler
from asyncrl.collectors.evaluation.paced import Paced
from asyncrl.collectors.fleet import CollectorError
from asyncrl.collectors.rollout import Prompt, PromptError, Prompts
from asyncrl.staleness import Weights
from asyncrl.tasks.base import Split


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A request, taken apart. `split`: whose rows, a learner asks for held-out ones only; of `train`, the rows of the
    first tickets. sampling: fields of `Sampling`. difficulty: a key of `Row.info`."""

    id: str
    weights: Weights
    prompts: int
    samples: int
    split: Split = "heldout"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    pass_above: float = 0.0
    difficulty: str | None = None

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> Evaluation:
        lineage, version = request["weights"]
        return cls(
            str(request["id"]),
            Weights(lineage, version),
            int(request["prompts"]),
            int(request["samples"]),
            sampling=request.get("sampling", {}),
            pass_above=float(request.get("pass_above", 0.0)),
            difficulty=request.get("difficulty"),
        )


async def evaluate(
    evaluation: Evaluation,
    *,
    prompts: Prompts,
    player: Player,
    sampler: Sampler,
    sampling: Sampling,
    run: str,
    at_once: int,
    on_played: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Answer and score; all episodes are played at once, with up to `at_once` requests at the engines. Seeds are a
    function of run, row and sample, not of the weights, so that before and after differ by the weights alone.
    `sampling`: of rollouts, of which the evaluation may set some fields otherwise. `on_played` hears how many episodes
    were played.

    The caller keeps the weights as they are until this returns. Raises CollectorError if an answer has tokens of other
    ones after all, and what `player.play` raises.
    """

    sampling = replace(sampling, **evaluation.sampling)
    paced = Paced(sampler, at_once=at_once)
    played_so_far = 0

    async def answer(index: int, prompt: Prompt | PromptError, sample: int) -> dict[str, Any]:
        about = {"task": prompt.task, "sample": sample, "version": evaluation.weights.version}
        if (column := evaluation.difficulty) is not None:
            about["difficulty"] = None if isinstance(prompt, PromptError) else prompt.row.info.get(column)
        if isinstance(prompt, PromptError):
            return _unplayed(about, f"{evaluation.split}-{index}", prompt.reason, str(prompt))
        episode = Episode(
            prompt,
            group=f"{evaluation.id}/{index}",
            run=f"{run}/{evaluation.split}",
            ordinal=index,
            attempt=0,
            member=sample,
            sampling=sampling,
        )
        nonlocal played_so_far
        try:
            played = await play(episode, player, paced)
        except EpisodeLost as lost:
            return _unplayed(about, prompt.row.id, lost.reason, str(lost), prompt)
        finally:
            played_so_far += 1
            on_played(played_so_far)
        spans = [span for turn in played.turns for span in turn.completion.spans]
        if strangers := {span.weights for span in spans} - {evaluation.weights}:
            raise CollectorError(f"evaluation {evaluation.id}: an answer has tokens of {sorted(map(tuple, strangers))}")
        text = prompts.read(played.turns[-1].completion.token_ids.tolist())
        return _entry(about, prompt, played, text, seconds=paced.seconds[played.turns[-1].request.session])

    asked: list[Prompt | PromptError] = []
    for index in range(_rows(evaluation, prompts)):
        try:
            asked.append(prompts.heldout(index) if evaluation.split == "heldout" else prompts.train(index))
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
        "sampling": {name: value for name, value in asdict(sampling).items() if name != "stop_token_ids"},
        "n": len(answers),
        "success": sum(rewards) / len(rewards) if rewards else None,
        "unscored": len(answers) - len(rewards),
        "answers": answers,
    }


def wrong_of(entry: Mapping[str, Any]) -> str:
    """The class of what is wrong with a scored answer, "" if nothing is. Runs of before this version kept it under
    `failure`, which an answer with a reward has none of."""
    wrong: str = entry.get("wrong") or ("" if entry["reward"] is None else entry["failure"])
    return wrong


def _rows(evaluation: Evaluation, prompts: Prompts) -> int:
    if evaluation.split == "heldout":
        return min(evaluation.prompts, prompts.heldout_rows)
    return evaluation.prompts


def _entry(about: Mapping[str, Any], prompt: Prompt, played: Played, text: str, *, seconds: float) -> dict[str, Any]:
    score = played.score
    tokens = sum(len(turn.completion.token_ids) for turn in played.turns)
    entry = {
        **about,
        "row_id": prompt.row.id,
        "seed": played.turns[0].request.seed,
        "prompt": prompt.text,
        "answer": text,
        "expected": prompt.row.answer,
        "reward": score.outcome if math.isfinite(score.outcome) else None,  # shaping is for training
        "parts": score.parts,
        "failure": score.failure,
        "wrong": score.wrong,
        "detail": score.detail,
        "read": score.read,
        "finish_reason": played.finish_reason,
        "tokens": tokens,
        "latency_s": seconds if tokens else None,
        "verifier_s": score.seconds if math.isfinite(score.seconds) else None,
    }
    return {**entry, "messages": list(played.messages)} if played.messages else entry


def _unplayed(
    about: Mapping[str, Any], row_id: str, failure: str, detail: str, prompt: Prompt | None = None
) -> dict[str, Any]:
    """The entry of a row that the model was not, or not to the end, asked about."""
    return {
        **about,
        "row_id": row_id,
        "seed": None,
        "prompt": "" if prompt is None else prompt.text,
        "answer": "",
        "expected": None if prompt is None else prompt.row.answer,
        "reward": None,
        "parts": {},
        "failure": failure,
        "wrong": "",
        "detail": detail,
        "read": "",
        "finish_reason": "",
        "tokens": 0,
        "latency_s": None,
        "verifier_s": None,
    }
