"""From a ticket to requests, from completions to what is handed over: the pure parts of the collector."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest

from asyncrl.buffers.base import Ticket
from asyncrl.buffers.concurrency import all_or_nothing, end_all
from asyncrl.collectors.engines.base import Completion, Sampling, Span
from asyncrl.collectors.episode import Played, Turn, episodes
from asyncrl.collectors.rollout import Prompt, SimulatedPrompts, TaskPrompts
from asyncrl.collectors.scoring import SimulatedScorer, hand_over, unusable
from asyncrl.collectors.segments import trajectories
from asyncrl.collectors.single import SinglePlayer, nothing_sampled
from asyncrl.learners.tiny_tokenizer import build_tokenizer
from asyncrl.rewards.scoring import Score
from asyncrl.schema import decode, digest
from asyncrl.staleness import Weights
from asyncrl.tasks.base import Row
from asyncrl.tasks.prompt_length import PromptLimit
from asyncrl.tasks.reverse import Reverse

PROMPT = Prompt(Row("train-3", "reverse 12", "21"), (7, 8, 9), "t")
TICKET = Ticket(ordinal=4, attempt=1, issued_for=Weights(1, 2), issued=100.0)


def members(ordinal=4, attempt=1, *, run="run/0"):
    return episodes(PROMPT, Sampling(), run=run, ordinal=ordinal, attempt=attempt, group_size=3)


def requests(ordinal=4, attempt=1, *, run="run/0"):
    return [episode.request() for episode in members(ordinal, attempt, run=run)]


def test_another_attempt_is_another_sample_unless_the_draws_are_to_be_the_same():
    def seeds(attempt, *, same_draws):
        one, _ = episodes(
            PROMPT, Sampling(), run="r/0", ordinal=4, attempt=attempt, group_size=2, same_draws=same_draws
        )
        return [episode.request(turn).seed for episode in (one, dataclasses.replace(one, again=1)) for turn in (0, 1)]

    assert len({*seeds(0, same_draws=False), *seeds(1, same_draws=False)}) == 8
    first = seeds(0, same_draws=True)
    assert seeds(1, same_draws=True) == first
    assert first[:2] == first[2:]
    assert first[:2] == seeds(0, same_draws=False)[:2], "the draws of a run that is not disturbed"


def completion(*spans: tuple[int, int], reason="stop"):
    """One stretch per (version, tokens)."""
    stretches, at = [], 0
    for version, tokens in spans:
        stretches.append(Span(Weights(1, version), at, at + tokens, f"{version:02x}"))
        at += tokens
    return Completion(
        token_ids=np.arange(at, dtype=np.int32),
        logprobs=np.full(at, -0.5, np.float32),
        versions=np.repeat(np.array([v for v, _ in spans], np.int32), [n for _, n in spans]),
        spans=tuple(stretches),
        finish_reason=reason,
        first_token=101.0,
        done=102.0,
    )


def row(answer, score=None, member=0):
    turn = Turn(requests()[member], answer)
    (made,) = trajectories(Played((turn,), score or Score({"exact": 1.0}, 1.0, ""), 103.0, answer.finish_reason))
    return made


def unscored(failure):
    return Score({"exact": None}, math.nan, failure)


def hand(rows):
    return hand_over(
        TICKET, rows, prompt=PROMPT, collector="c", engine="c/0", sampling={"temperature": 1.0}, seconds=1.5
    )


def test_seeds_and_ids_are_functions_of_run_ticket_attempt_and_member():
    assert requests() == requests()
    everything = [*requests(), *requests(attempt=2), *requests(ordinal=5)]
    assert len({request.seed for request in everything}) == len({request.id for request in everything}) == 9
    assert {r.seed for r in requests(run="run/1")}.isdisjoint({r.seed for r in requests()})
    assert [(r.ticket, r.member, r.group) for r in requests()] == [(4, member, "4.1") for member in range(3)]


def test_a_group_is_handed_over_with_what_its_payload_says():
    rows = [row(completion((2, 3), (3, 1)), member=0), row(completion((3, 2)), unscored("verifier_nan"), member=1)]
    header, payload = hand(rows)
    batch = decode(payload)
    assert header.digest == digest(payload)
    assert (header.ordinal, header.attempt, header.weights) == (4, 1, (1, 3))
    assert (header.oldest, header.newest, header.tokens, header.length) == (2, 3, 6, 3.0)
    assert header.spans == ((1, 2), (1, 3))
    assert (header.reward, header.seconds) == (1.0, 1.5)
    assert batch.column("token_ids")[0].as_py() == [7, 8, 9, 0, 1, 2, 3]
    assert batch.column("loss_mask")[0].as_py() == [0, 0, 0, 1, 1, 1, 1]
    assert batch.column("versions")[0].as_py() == [-1, -1, -1, 2, 2, 2, 3]
    assert batch.column("logprobs")[0].as_py() == [0, 0, 0, -0.5, -0.5, -0.5, -0.5]
    assert [(s["version"], s["start"], s["end"], s["checksum"]) for s in batch.column("spans")[0].as_py()] == [
        (2, 3, 6, "02"),
        (3, 6, 7, "03"),
    ]
    assert batch.column("failure").to_pylist() == ["", "verifier_nan"]
    assert batch.column("sampling")[1].as_py()["seed"] == requests()[1].seed


def test_an_answer_without_end_token_and_an_empty_one_are_rows_like_others():
    rows = [row(completion((2, 2), reason="length"), member=0), row(completion(reason="length"), member=1)]
    assert unusable(rows, min_members=2, filtering=False) is None
    _, payload = hand(rows)
    batch = decode(payload)
    assert batch.column("finish_reason").to_pylist() == ["length", "length"]
    assert batch.column("token_ids")[1].as_py() == [7, 8, 9]


def test_a_group_that_teaches_nothing_is_named_after_its_most_common_failure():
    rows = [row(completion((2, 1)), unscored(f"verifier_{kind}")) for kind in ("nan", "raised", "raised")]
    assert unusable(rows, min_members=None, filtering=False) == ("data", "unscored/verifier_raised")
    assert unusable([*rows, row(completion((2, 1)))], min_members=None, filtering=False) is None
    assert unusable([row(completion()), row(completion())], min_members=None, filtering=False) == ("data", "empty")


def test_a_group_needs_as_many_scored_members_as_the_recipe_says():
    good, refused = row(completion((2, 1))), row(nothing_sampled("too long"), unscored("request_refused"))
    slow, cut = row(completion((2, 1)), unscored("verifier_timeout")), row(completion((2, 1), reason="abort"))
    assert unusable([good, good, refused, slow], min_members=2, filtering=False) is None
    assert unusable([good, slow, refused, slow], min_members=2, filtering=False) == (
        "data",
        "too_few_members/verifier_timeout",
    )
    aborted = dataclasses.replace(cut, reward=math.nan, failure="engine_aborted")
    assert unusable([good, good, aborted], min_members=2, filtering=False) is None
    assert unusable([good, aborted, slow], min_members=2, filtering=False) == ("infrastructure", "engine_aborted")


def in_segments(row, count):
    return [dataclasses.replace(row, segment=n) for n in range(count)]


def test_a_member_counts_once_however_many_segments_it_has():
    """Control: the same rows as members of their own are enough of them, and have another mean."""
    good = in_segments(row(completion((2, 2))), 3)
    slow = [row(completion((2, 1)), unscored("verifier_timeout"), member=1)]
    assert unusable([*good, *slow], min_members=2, filtering=False) == ("data", "too_few_members/verifier_timeout")
    assert unusable([dataclasses.replace(row, segment=0) for row in good], min_members=2, filtering=False) is None
    late = in_segments(row(completion((2, 1)), unscored("verifier_nan")), 3)
    reason = unusable([*late, *slow, *slow], min_members=None, filtering=False)
    assert reason == ("data", "unscored/verifier_timeout")
    wrong = [row(completion((2, 3)), Score({"exact": 0.0}, 0.0, ""), member=1)]
    header, payload = hand([*good, *wrong])
    assert (header.reward, header.tokens, header.length) == (0.5, 9, 4.5)
    assert decode(payload).column("segment").to_pylist() == [0, 1, 2, 0]


def test_a_group_whose_rewards_are_all_equal_is_filtered_where_the_recipe_says_so():
    right, wrong = row(completion((2, 1))), row(completion((2, 1)), Score({"exact": 0.0}, 0.0, ""))
    late = row(completion((2, 1)), unscored("verifier_timeout"))
    for group in ([right, right, late], [wrong, wrong], [right, late]):
        assert unusable(group, min_members=None, filtering=True) == ("filtered", "zero_variance")
        assert unusable(group, min_members=None, filtering=False) is None
    assert unusable([right, wrong, late], min_members=2, filtering=True) is None


def test_the_filter_looks_at_the_outcome_and_not_at_what_shaping_made_of_it():
    """As DAPO does. Control: by the rewards alone, answers that are all right would be kept for their lengths."""
    short, long = (row(completion((2, 1)), Score({"exact": 1.0}, reward, "", plain=1.0)) for reward in (1.0, 0.5))
    wrong = row(completion((2, 1)), Score({"exact": 0.0}, -0.5, "", plain=0.0))
    assert unusable([short, long], min_members=None, filtering=True) == ("filtered", "zero_variance")
    bare = [dataclasses.replace(answer, info={}) for answer in (short, long)]
    assert unusable(bare, min_members=None, filtering=True) is None
    assert unusable([short, wrong], min_members=None, filtering=True) is None
    level = row(completion((2, 1)), Score({"exact": 0.0}, 0.5, "", plain=0.0))
    assert unusable([long, level], min_members=None, filtering=True) == ("filtered", "zero_variance")
    assert long.info == {"outcome": 1.0}
    assert "outcome" not in row(completion((2, 1))).info


@pytest.mark.asyncio
@pytest.mark.parametrize(("reason", "failure"), [("error", "engine_error"), ("abort", "engine_aborted"), ("stop", "")])
async def test_an_answer_the_engine_gave_up_on_is_not_scored(reason, failure):
    class Answers:
        async def generate(self, request):
            return completion((2, 1), reason=reason)

    played = await SinglePlayer(SimulatedScorer()).play(members()[0], Answers())
    assert math.isnan(played.score.reward) == bool(failure)
    assert (played.score.failure, played.finish_reason) == (failure, reason)


@pytest.mark.asyncio
async def test_a_request_the_engine_refuses_is_a_failure_with_its_reason():
    class Refuses:
        async def generate(self, request):
            raise ValueError("too long")

    played = await SinglePlayer(SimulatedScorer()).play(members()[0], Refuses())
    assert played.score.failure == "request_refused"
    (made,) = trajectories(played)
    assert (made.finish_reason, made.info, made.prompt_length) == (
        "error",
        {"error": "too long"},
        len(PROMPT.token_ids),
    )


@pytest.mark.asyncio
async def test_simulated_rewards_are_zeros_and_ones_by_ticket_and_member():
    prompt = SimulatedPrompts().train(0)

    async def rewards():
        return [
            (await SimulatedScorer().score(prompt, completion((0, 1)), ticket=ticket, member=member)).reward
            for ticket in range(20)
            for member in range(4)
        ]

    first = await rewards()
    assert set(first) == {0.0, 1.0}
    assert 20 < sum(first) < 60
    assert first == await rewards()


def test_the_end_token_is_no_part_of_an_answer_but_a_mark_inside_is():
    tokenizer = build_tokenizer(48)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    task = Reverse((2, 2))
    prompts = TaskPrompts(
        task,
        PromptLimit.of(tokenizer, own=48, given=None),
        train_row=task.rows("train").__getitem__,
        stop_token_ids=(end,),
    )
    assert prompts.read([ord("4"), ord("2"), end]) == "42"
    assert prompts.read([end]) == ""
    assert prompts.read([]) == ""
    assert prompts.read([ord("4"), pad, ord("2")]) == "4<|pad|>2"


@pytest.mark.asyncio
async def test_the_first_failure_ends_the_others_before_it_is_raised():
    ended = []

    async def waits():
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(True)

    async def fails():
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await all_or_nothing([waits(), fails(), waits()])
    assert ended == [True, True]
    assert await all_or_nothing([]) == []


@pytest.mark.asyncio
async def test_a_task_that_swallows_a_cancellation_is_cancelled_again():
    swallowed = []

    async def swallows():
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            swallowed.append(True)
        await asyncio.sleep(30)

    task = asyncio.ensure_future(swallows())
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await end_all([task])
    assert task.cancelled()
    assert swallowed == [True]


def test_a_simulated_collector_needs_neither_torch_nor_transformers():
    code = (
        "import sys; import asyncrl.collectors.service, asyncrl.collectors.engines.simulated; "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
