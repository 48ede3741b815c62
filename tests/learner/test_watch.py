"""What a run's numbers say of a policy that learns what pays: sign by sign, told once, over a resume too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.rewards import Declared
from asyncrl.learners.repetition import WIDTH, repeated, repetition
from asyncrl.learners.watch import WINDOW, Evaluated, Suspicion, Watch, suspicions
from asyncrl.schema import pack, to_batch

NUMBERS = {"exact": Declared(1.0, "outcome"), "long": Declared(2.0, "constraint"), "rude": Declared(1.0, "violation")}
STEPS = 40


def run(**of: tuple[float, float]) -> list[dict[str, Any]]:
    """Steps whose metrics go from the first number to the second, in a straight line with a little scatter."""
    rng = np.random.default_rng(0)
    names = {"reward": "reward/mean", "outcome": "outcome/mean", "length": "length/mean"}
    names |= {"repetition": "length/repetition", "violations": "violations"}
    found = []
    for n in range(STEPS):
        values = {
            names.get(name, f"reward_part/{name}"): start + (end - start) * n / (STEPS - 1) + rng.normal(0, 0.002)
            for name, (start, end) in of.items()
        }
        found.append({"step": n + 1, "reward/mean": 0.5, "length/mean": 20.0, "loss": 1.0, **values})
    return found


def signs(steps: list[dict[str, Any]], *evaluations: tuple[int, float]) -> dict[str, str]:
    held = [Evaluated(version, success, 0.01) for version, success in evaluations]
    return {sign.about: sign.text for sign in suspicions(steps, held, NUMBERS)}


def test_a_run_that_learns_what_was_meant_has_no_sign() -> None:
    honest = run(reward=(0.2, 0.9), outcome=(0.2, 0.9), exact=(0.2, 0.9), length=(20, 30), repetition=(0.05, 0.06))
    assert signs(honest, (0, 0.2), (20, 0.5), (40, 0.88)) == {}


def test_held_out_success_that_falls_while_training_rises_is_told_with_its_numbers() -> None:
    rising = run(reward=(0.2, 0.9), outcome=(0.2, 0.9))
    found = signs(rising, (0, 0.2), (20, 0.55), (40, 0.4))
    assert list(found) == ["watch/heldout"]
    assert "fell from 0.550 (version 20) to 0.400 (version 40)" in found["watch/heldout"]
    assert signs(rising, (0, 0.2), (20, 0.55), (40, 0.53)) == {}, "within what chance does"
    falling = run(reward=(0.9, 0.2), outcome=(0.9, 0.2))
    assert signs(falling, (0, 0.6), (40, 0.3)) == {}, "a run that gets worse at both cheats nobody"


def test_held_out_success_that_stays_while_training_rises_is_told() -> None:
    found = signs(run(reward=(0.2, 0.9), outcome=(0.2, 0.9)), (0, 0.2), (40, 0.25))
    assert "on training rows, and by +0.050 on held-out ones" in found["watch/heldout"]
    assert signs(run(reward=(0.2, 0.9), outcome=(0.2, 0.21)), (0, 0.2), (40, 0.22)) == {}, "no outcome rose"


@pytest.mark.parametrize(("end", "told"), [(39.0, False), (60.0, True), (6.0, True), (16.0, False)])
def test_answers_that_are_twice_as_long_or_short_are_told(end: float, told: bool) -> None:
    assert ("watch/length" in signs(run(length=(20.0, end)))) == told


def test_a_reward_that_rises_by_what_says_nothing_of_right_or_wrong_is_told_with_its_share() -> None:
    hacked = run(reward=(0.2, 0.9), exact=(0.2, 0.25), long=(0.0, 0.35))
    assert "of the reward's rise is the part long" in signs(hacked)["watch/part"]
    fair = run(reward=(0.2, 0.9), exact=(0.2, 0.8), long=(0.0, 0.05))
    assert signs(fair) == {}
    traded = run(reward=(0.2, 0.9), exact=(0.9, 0.5), other=(0.0, 1.1))
    assert "at the cost of exact" in signs(traded)["watch/part"]


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_whose_rise_it_is_is_asked_whatever_the_reward_is_multiplied_by(scale: float) -> None:
    """The reward and its scatter have the task's `reward_scale`, its parts do not."""
    hacked = run(reward=(0.2, 0.9), exact=(0.2, 0.25), long=(0.0, 0.35))
    slight = run(reward=(0.2, 0.25), exact=(0.2, 0.2), long=(0.0, 0.05))
    for step in hacked + slight:
        step |= {"reward/mean": scale * step["reward/mean"], "reward/std": scale * 0.5}
    assert "of the reward's rise is the part long" in signs(hacked)["watch/part"]
    assert signs(slight) == {}, "a tenth of the scatter"


def test_whose_rise_it_is_is_asked_of_each_task_of_a_mixture_by_itself() -> None:
    """A part of one task stands beside outcomes of others, of which it takes no share: as one reward they would add up
    to more than there is."""
    of = {
        **{"reward/mean": (0.2, 0.6), "reward_part/exact": (0.2, 0.6), "reward_part/long": (-0.8, -0.3)},
        **{"reward/mean/a": (0.2, 0.6), "reward_part/a/exact": (0.2, 0.6), "reward/std/a": (0.5, 0.5)},
        **{"reward_part/a/rude": (0.0, 0.0)},
        **{"reward/mean/b": (-0.4, 0.6), "reward_part/b/exact": (0.4, 0.9), "reward_part/b/long": (-0.8, -0.3)},
    }
    steps = run(**of)
    for step in steps:
        step |= {key.removeprefix("reward_part/"): step.pop(key) for key in list(step) if "part/reward" in key}
    tasks = {"a": {"exact": NUMBERS["exact"], "rude": NUMBERS["rude"]}, "b": {"long": Declared(1.0, "constraint")}}
    assert suspicions(steps, [], NUMBERS, tasks) == []
    whole = [{key: value for key, value in step.items() if "/a" not in key and "/b" not in key} for step in steps]
    assert "part long" in signs(whole)["watch/part"], "control: taken for one reward, most would be of `long`"
    (sign,) = suspicions(steps, [], NUMBERS, {**tasks, "b": {"long": NUMBERS["long"]}})
    assert (sign.about, "of the reward's rise is the part long" in sign.text) == ("watch/part/b", True)
    watch = Watch(NUMBERS, {**tasks, "b": {"long": NUMBERS["long"]}})
    assert [sign.about for step in steps for sign in watch.see(step, [])] == ["watch/part/b"]


def test_violations_and_repetition_that_grow_are_told() -> None:
    assert list(signs(run(violations=(0.0, 0.1)))) == ["watch/violations"]
    assert list(signs(run(repetition=(0.1, 0.5)))) == ["watch/repetition"]
    assert signs(run(violations=(0.1, 0.1), repetition=(0.5, 0.5))) == {}


def test_a_step_in_which_nothing_was_scored_does_not_end_the_watch_over_held_out_rows() -> None:
    rising = run(reward=(0.2, 0.9), outcome=(0.2, 0.9))
    rising[17] = {"step": 18, "reward/mean": None, "outcome/mean": None, "length/mean": 20.0}
    assert "fell from 0.550" in signs(rising, (0, 0.2), (20, 0.55), (40, 0.4))["watch/heldout"]
    assert "on training rows" in signs(rising, (0, 0.2), (40, 0.25))["watch/heldout"]


def told(steps: Iterator[dict[str, Any]]) -> set[str]:
    watch = Watch(NUMBERS)
    return {sign.about for step in steps for sign in watch.see(step, [])}


def scattered(seed: int, *, answers: int) -> Iterator[dict[str, Any]]:
    """Steps of so many answers each, to which nothing happens but chance: half are right, a third has a part that says
    nothing of it, one in ten violates a rule."""
    rng = np.random.default_rng(seed)
    for n in range(400):
        exact, long, rude = (rng.binomial(answers, share) / answers for share in (0.5, 0.3, 0.1))
        yield {
            "step": n + 1,
            **{"reward/mean": exact + 2 * long - rude, "reward/std": 1.1, "outcome/mean": exact, "length/mean": 20.0},
            **{"reward_part/exact": exact, "reward_part/long": long, "reward_part/rude": -rude, "violations": rude},
        }


@pytest.mark.parametrize("answers", [8, 128])
def test_a_run_to_which_nothing_happens_has_no_sign(answers: int) -> None:
    assert sum(bool(told(scattered(seed, answers=answers))) for seed in range(12)) <= 1


def test_a_lower_bar_would_be_met_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: at two standard errors most of these runs have signs."""
    monkeypatch.setattr("asyncrl.learners.watch.SURE_OF_STEPS", 2.0)
    monkeypatch.setattr("asyncrl.learners.watch.LEAST_RISE", 0.0)
    assert sum(bool(told(scattered(seed, answers=8))) for seed in range(6)) >= 4


def test_a_sign_is_told_once_and_again_only_after_it_was_away() -> None:
    steps = run(length=(20, 100))
    watch = Watch(NUMBERS)
    told = [(step["step"], sign.about) for step in steps for sign in watch.see(step, [])]
    assert [about for _, about in told] == ["watch/length"]
    first = told[0][0]

    def at(n: int, length: float) -> list[Suspicion]:
        return watch.see({"step": n, "reward/mean": 0.5, "length/mean": length}, [])

    assert not any(at(n, 20.0) for n in range(STEPS + 1, STEPS + 3 * WINDOW))
    again = [n for n in range(STEPS + 3 * WINDOW, STEPS + 5 * WINDOW) if at(n, 100.0)]
    assert len(again) == 1
    assert again[0] > first


def test_a_resumed_run_goes_on_from_what_its_metrics_have_and_tells_nothing_twice() -> None:
    steps = run(length=(20, 100))
    whole, records = Watch(NUMBERS), []
    for step in steps:
        records.append(step)
        for sign in whole.see(step, []):
            records.append({"event": "warning", "about": sign.about, "text": sign.text, "version": step["step"]})
    assert sum("event" in record for record in records) == 1
    resumed = Watch(NUMBERS)
    resumed.resume([{"event": "start", "version": 0}, *records, {"step": 99, "length/mean": 1.0}], version=STEPS)
    assert resumed.steps == whole.steps, "and nothing of steps after the checkpoint"
    assert resumed.see({**steps[-1], "step": STEPS + 1}, []) == []


def test_an_older_runs_metrics_and_steps_without_numbers_are_no_error() -> None:
    bare = [{"step": n, "reward/mean": None, "length/mean": 3.0, "reward_part/exact": 0.1} for n in range(30)]
    assert suspicions(bare, [Evaluated(0, 0.1, 0.1), Evaluated(30, 0.9, 0.1)], NUMBERS) == []


@given(st.lists(st.fixed_dictionaries({"step": st.integers(0, 99)}, optional={
    "reward/mean": st.none() | st.floats(-1e6, 1e6),
    "outcome/mean": st.none() | st.floats(-1e6, 1e6),
    "length/mean": st.floats(0, 1e6),
    "length/repetition": st.none() | st.floats(0, 1),
    "violations": st.floats(0, 1),
    "reward_part/exact": st.floats(-1e6, 1e6),
    "reward_part/long": st.floats(-1e6, 1e6),
}), max_size=50), st.lists(st.tuples(st.integers(0, 99), st.floats(-10, 10)), max_size=5))  # fmt: skip
def test_whatever_a_run_measured_its_signs_are_sentences(
    steps: list[dict[str, Any]], held: list[tuple[int, float]]
) -> None:
    ordered = sorted({step["step"]: step for step in steps}.values(), key=lambda step: step["step"])
    evaluations = [Evaluated(version, success, 0.1) for version, success in sorted(dict(held).items())]
    for sign in suspicions(ordered, evaluations, NUMBERS):
        assert sign.about.startswith("watch/")
        assert "nan" not in sign.text


def test_an_evaluations_error_is_over_prompts_and_one_without_scores_is_none() -> None:
    answers = [{"row_id": row, "reward": reward} for row, reward in (("a", 1.0), ("a", 0.0), ("b", 1.0), ("c", None))]
    found = Evaluated.of(7, answers)
    assert found == Evaluated(7, 0.75, 0.25 / math.sqrt(2))
    assert Evaluated.of(7, [{"row_id": "a", "reward": None}]) is None


@given(st.lists(st.integers(0, 5), max_size=60))
def test_repetition_is_the_share_of_grams_that_were_there_before(tokens: list[int]) -> None:
    def grams() -> Iterator[tuple[int, ...]]:
        return (tuple(tokens[n : n + WIDTH]) for n in range(len(tokens) - WIDTH + 1))

    total = max(0, len(tokens) - WIDTH + 1)
    expected = None if total < 2 else 1 - len(set(grams())) / total
    assert repeated(np.array(tokens, np.int32)) == (expected if expected is None else pytest.approx(expected))


def test_repetition_looks_at_sampled_tokens_alone(make_row, make_group) -> None:
    loop, plain = [7, 8, 9, 7] * 10, list(range(40))
    rows = [make_row(loop, plain, [-1.0] * 40, reward=1.0), make_row(plain, loop, [-1.0] * 40, reward=0.0, member=1)]
    packed = pack([to_batch(make_group(rows))])
    assert repetition(packed) == pytest.approx(repeated(np.array(loop, np.int32)) / 2)
