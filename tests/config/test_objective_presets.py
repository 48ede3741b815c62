"""A preset fills what a recipe leaves out of `objective`, and the resolved recipe says all of it."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from asyncrl.config.checks import check
from asyncrl.config.convert import convert
from asyncrl.config.objective import (
    DppoTv,
    NoWeight,
    Objective,
    Preset,
    SequenceTis,
    TokenTis,
    TruncatedMask,
)
from asyncrl.config.recipe import Buffer, Recipe
from asyncrl.config.resolved import resolved_yaml
from asyncrl.config.yaml_text import parse


def objective(**keys: Any) -> Objective:
    return convert({"objective": keys}).objective


@pytest.mark.parametrize("preset", get_args(Preset))
def test_every_preset_is_sound_complete_and_the_same_when_it_is_read_back(preset: Any) -> None:
    recipe = convert({"objective": {"preset": preset}})
    check(recipe)
    missing = [name for name in recipe.objective.__struct_fields__ if getattr(recipe.objective, name) is None]
    assert set(missing) <= {"dual_clip", *(("epsilon", "epsilon_high") if preset == "rloo" else ())}
    shown = parse(resolved_yaml(recipe))
    assert convert(shown) == recipe
    assert shown["objective"]["advantage"] == recipe.objective.advantage


@pytest.mark.parametrize(("age", "preset"), [(0, "grpo"), (1, "async"), (8, "async")])
def test_the_preset_that_nobody_named_follows_from_the_age(age: int, preset: Any) -> None:
    text = {"buffer": {"max_trajectory_age": age}}
    found = convert(text).objective
    assert found == convert({**text, "objective": {"preset": preset}}).objective
    assert found.preset == preset
    kept = convert({**text, "objective": {"aggregation": "sequence", "mask": [], "preset": None}}).objective
    assert kept == convert({"objective": {"preset": preset, "aggregation": "sequence", "mask": []}}).objective
    assert Recipe().objective == convert({"buffer": {"max_trajectory_age": 1}}).objective


def test_a_recipe_that_is_kept_stays_what_it_was_at_another_age() -> None:
    asynchronous = convert({})
    synchronous = msgspec.structs.replace(asynchronous, buffer=Buffer(max_trajectory_age=0))
    assert synchronous.objective == asynchronous.objective


def test_grpo_has_the_clip_of_dapo() -> None:
    found = objective(preset="grpo")
    assert (found.preset, found.advantage, found.surrogate) == ("grpo", "group-mean-std", "ppo-clip")
    assert (found.epsilon, found.epsilon_high, found.aggregation) == (0.2, 0.28, "token")
    assert (found.importance_weight, found.mask) == (NoWeight(), [])


def test_a_key_that_is_given_replaces_the_presets_and_leaves_the_others() -> None:
    found = objective(preset="async", aggregation="sequence", epsilon_high=1.0)
    plain = objective(preset="async")
    assert (found.aggregation, found.epsilon_high) == ("sequence", 1.0)
    assert msgspec.structs.replace(found, aggregation="token", epsilon_high=4.0) == plain
    assert objective(preset="async", mask=[]).mask == []


def test_clip_and_weight_follow_the_surrogate_that_is_given() -> None:
    assert objective(preset="dr-grpo").epsilon_high == 0.2
    assert objective(preset="dr-grpo", surrogate="cispo").epsilon_high == 4.0
    bare = objective(preset="grpo", surrogate="reinforce")
    assert (bare.epsilon, bare.importance_weight) == (None, TokenTis())
    assert objective(preset="rloo").importance_weight == SequenceTis()
    assert objective(preset="rloo", surrogate="ppo-clip").importance_weight == NoWeight()


def test_with_two_ratios_the_engines_mismatch_is_weighed_unless_it_is_said_otherwise() -> None:
    assert objective(proximal="behaviour-version").importance_weight == TokenTis(cap=2.0)
    without = objective(proximal="behaviour-version", importance_weight={"type": "none"})
    assert without.importance_weight == NoWeight()


def test_one_mask_may_be_written_without_a_list() -> None:
    assert objective(mask={"type": "truncated"}).mask == [TruncatedMask()]
    assert objective(mask={"type": "dppo-tv"}) == objective(mask=[{"type": "dppo-tv", "threshold": 0.2}])
    assert objective(mask=[{"type": "dppo-tv"}, {"type": "truncated"}]).mask == [DppoTv(), TruncatedMask()]


def test_a_preset_does_not_share_its_list_of_masks() -> None:
    first = objective(preset="async").mask
    assert first is not None
    first.clear()
    assert objective(preset="async").mask


def test_an_objective_that_compares_nothing_takes_groups_of_one() -> None:
    check(convert({"objective": {"preset": "rloo", "advantage": "raw"}, "collector": {"group_size": 1}}))
