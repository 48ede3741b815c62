"""The gradient of a step is the objective's, for every preset, and depends on nothing else: not on how a batch is cut
into micro-batches, packed, padded, dealt to ranks, in which order it came, or whether an answer came in segments.
Without one of the guards of that, a comparison below fails: which is tested too."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config.objective import Objective, Preset
from asyncrl.config.recipe import Recipe
from asyncrl.learners import forward, shares, step
from asyncrl.learners.batch import Batch, Microbatch, Whole, microbatches
from asyncrl.learners.model import load_model
from asyncrl.schema import to_batch
from asyncrl.staleness import Weights
from tests.learner.step_gradients import CLOSE, LONGEST, gradient, in_segments, padded, portion, prepared, restricted

PRESETS = get_args(Preset)
REWARDS = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.5], [0.0, np.nan, 1.0], [2.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 1.0]]


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    """`test_oracle`, for the objective written answer by answer."""
    spec = importlib.util.spec_from_file_location("oracle", Path(__file__).with_name("test_oracle.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["oracle"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(model_path: Path) -> Any:
    return load_model(model_path, "float32", "auto")


@pytest.fixture(scope="module")
def groups(make_row: Any, make_group: Any) -> list[Any]:
    """Six groups of two versions, with answers of 1 to 8 tokens."""
    generator = np.random.default_rng(3)
    found = []
    for ticket, rewards in enumerate(REWARDS):
        rows = []
        for member, reward in enumerate(rewards):
            n = int(generator.integers(1, LONGEST + 1))
            rows.append(
                make_row(
                    [1, 2, 3],
                    generator.integers(0, 24, n).tolist(),
                    generator.normal(-3, 0.4, n).tolist(),
                    reward=reward,
                    weights=Weights(1, ticket % 2),
                    member=member,
                )
            )
        found.append(to_batch(make_group(rows, ticket=ticket)))
    return found


# --- what it does not depend on ---------------------------------------------------------------------------------------

Check = Callable[[Any, ModuleType, Objective, list[Any], pytest.MonkeyPatch], None]


def micro_batches(model: Any, oracle: ModuleType, objective: Objective, groups: list[Any], _: Any) -> None:
    whole = gradient(model, objective, groups)
    for max_tokens in (17, 40):
        torch.testing.assert_close(gradient(model, objective, groups, max_tokens), whole, **CLOSE)


def packing_order(
    model: Any, oracle: ModuleType, objective: Objective, groups: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last row first, in every micro-batch, and the last micro-batch first."""
    whole = gradient(model, objective, groups, 40)

    def turned(batch: Batch, among: NDArray[np.bool_], budget: int) -> list[Microbatch]:
        found = []
        for micro in microbatches(batch, among, budget)[::-1]:
            lengths = micro.cu_seqlens.diff().tolist()
            rows = torch.split(micro.positions, lengths)[::-1]
            found.append(Microbatch(torch.cat(rows), torch.tensor([0, *np.cumsum(lengths[::-1])])))
        return found

    monkeypatch.setattr(step, "microbatches", turned)
    torch.testing.assert_close(gradient(model, objective, groups, 40), whole, **CLOSE)


def sharing(
    model: Any, oracle: ModuleType, objective: Objective, groups: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What members begin with computed once, and the head for trained tokens alone; against all of it for each row."""
    found = gradient(model, objective, groups)
    predictions = step.token_predictions

    def each_alone(*arguments: Any, **named: Any) -> Any:
        return predictions(*arguments, **{**named, "share_prefixes": False, "asked": None})

    monkeypatch.setattr(step, "token_predictions", each_alone)
    torch.testing.assert_close(found, gradient(model, objective, groups), **CLOSE)


def padding(model: Any, oracle: ModuleType, objective: Objective, groups: list[Any], _: Any) -> None:
    torch.testing.assert_close(gradient(model, objective, groups), padded(model, oracle, objective, groups), **CLOSE)


def ranks(model: Any, oracle: ModuleType, objective: Objective, groups: list[Any], _: Any) -> None:
    """Shares of 3, 2 and 1 groups; `test_ranks.py` has real processes."""
    whole, (batch, worth) = gradient(model, objective, groups), prepared(objective, groups)
    added, units = torch.zeros_like(whole), 0
    for share in ([0, 2, 5], [1, 3], [4]):
        own, _ = prepared(objective, [groups[n] for n in share])
        found, counted = portion(model, objective, (own, worth[np.isin(batch.groups, share)]), 25)
        added, units = added + found, units + counted
    torch.testing.assert_close(added / units, whole, **CLOSE)


def arrival_order(model: Any, oracle: ModuleType, objective: Objective, groups: list[Any], _: Any) -> None:
    whole = gradient(model, objective, groups)
    torch.testing.assert_close(gradient(model, objective, [groups[n] for n in (2, 0, 5, 1, 4, 3)]), whole, **CLOSE)


def partial_last_window(model: Any, oracle: ModuleType, objective: Objective, groups: list[Any], _: Any) -> None:
    """A last micro-batch of one row beside a full one, and a step of fewer groups than the others have."""
    batch, _ = prepared(objective, groups)
    rows = np.ones(len(batch.groups), np.bool_)
    budget = next(n for n in range(30, 10**3) if len(microbatches(batch, rows, n)[-1].cu_seqlens) == 2)
    torch.testing.assert_close(gradient(model, objective, groups, budget), gradient(model, objective, groups), **CLOSE)
    few = groups[:4]
    torch.testing.assert_close(gradient(model, objective, few, budget), padded(model, oracle, objective, few), **CLOSE)


def segments(model: Any, oracle: ModuleType, objective: Objective, groups: list[Any], _: Any) -> None:
    """Answers in two segments, the second of which repeats the first as its history: in one micro-batch, in several,
    and each in its own, where each is asked for what is in the others."""
    whole, cut = gradient(model, objective, groups), [in_segments(group) for group in groups]
    assert sum(group.num_rows for group in cut) > sum(group.num_rows for group in groups) + 8
    for max_tokens in (10**6, 40, 1):
        torch.testing.assert_close(gradient(model, objective, cut, max_tokens), whole, **CLOSE)


WAYS: tuple[Check, ...] = (
    micro_batches,
    packing_order,
    sharing,
    padding,
    ranks,
    arrival_order,
    partial_last_window,
    segments,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_gradient_of_a_step_does_not_depend_on(
    model: Any, oracle: ModuleType, groups: list[Any], monkeypatch: pytest.MonkeyPatch, preset: Preset, way: Check
) -> None:
    objective = Objective(preset=preset)
    assert gradient(model, objective, groups).abs().max() > 1e-3
    way(model, oracle, objective, groups, monkeypatch)


@pytest.mark.parametrize(
    "way", [micro_batches, packing_order, sharing, padding, ranks, segments], ids=lambda way: way.__name__
)
@pytest.mark.parametrize("preset", PRESETS)
def test_nor_where_tokens_were_drawn_between_some_of_the_vocabulary(
    model: Any, oracle: ModuleType, groups: list[Any], monkeypatch: pytest.MonkeyPatch, preset: Preset, way: Check
) -> None:
    """`padding` compares with the formula over the same tokens."""
    way(model, oracle, Objective(preset=preset), [restricted(group) for group in groups], monkeypatch)


# --- and would, without its guards ------------------------------------------------------------------------------------


def without_correction(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ratio is 1, whichever weights sampled."""
    terms_of = module.terms_of

    def uncorrected(
        objective: Objective, current: Tensor, behaviour: Tensor, anchor: Tensor, *rest: Any, **named: Any
    ) -> Any:
        return terms_of(objective, current, current.detach(), current.detach(), *rest, **named)

    monkeypatch.setattr(module, "terms_of", uncorrected)


@pytest.mark.parametrize("preset", PRESETS)
def test_control_with_the_correction_removed_the_gradient_is_not_the_objectives(
    model: Any, oracle: ModuleType, groups: list[Any], monkeypatch: pytest.MonkeyPatch, preset: Preset
) -> None:
    without_correction(step, monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        padding(model, oracle, Objective(preset=preset), groups, monkeypatch)


@pytest.mark.parametrize("preset", PRESETS)
def test_control_with_the_correction_removed_the_oracle_disagrees_wherever_weights_have_moved(
    toy: ModuleType, oracle: ModuleType, monkeypatch: pytest.MonkeyPatch, preset: Preset
) -> None:
    without_correction(toy, monkeypatch)
    oracle.test_the_gradient_is_that_of_the_formula(toy, preset, 0)
    with pytest.raises(AssertionError, match="not close"):
        oracle.test_the_gradient_is_that_of_the_formula(toy, preset, 4)


@pytest.mark.parametrize("preset", PRESETS)
def test_control_where_rows_share_what_is_not_alike_it_is_seen(
    model: Any, oracle: ModuleType, groups: list[Any], monkeypatch: pytest.MonkeyPatch, preset: Preset
) -> None:
    shared = forward.shared_prefixes
    monkeypatch.setattr(forward, "shared_prefixes", lambda ids, lengths: shared(torch.zeros_like(ids), lengths))
    with pytest.raises(AssertionError, match="not close"):
        sharing(model, oracle, Objective(preset=preset), groups, monkeypatch)


@pytest.mark.parametrize("preset", PRESETS)
def test_control_with_a_denominator_of_its_own_for_each_micro_batch_the_cut_is_seen(
    model: Any, oracle: ModuleType, groups: list[Any], monkeypatch: pytest.MonkeyPatch, preset: Preset
) -> None:
    token_sum = step.token_sum

    def local(losses: Tensor, trained: Tensor) -> Tensor:
        return token_sum(losses, trained) / trained.sum().clamp(min=1)

    monkeypatch.setattr(step, "token_sum", local)
    for way in (micro_batches, ranks):
        with pytest.raises(AssertionError, match="not close"):
            way(model, oracle, Objective(preset=preset), groups, monkeypatch)


@pytest.mark.parametrize("preset", PRESETS)
def test_control_with_a_denominator_of_its_own_for_each_portion_the_oracle_disagrees(
    toy: ModuleType, oracle: ModuleType, monkeypatch: pytest.MonkeyPatch, preset: Preset
) -> None:
    gradient_of_toy = toy.gradient

    def local(objective: Objective, answers: Any, *, portions: int = 1, **_: Any) -> Tensor:
        # 4: fifteen answers in equal portions have equal denominators where answers are counted.
        found: Tensor = gradient_of_toy(objective, answers, portions=4 if portions > 1 else 1, local=portions > 1)
        return found

    monkeypatch.setattr(toy, "gradient", local)
    with pytest.raises(AssertionError, match="not close"):
        oracle.test_neither_portions_nor_their_order_change_the_gradient(toy, preset)


@pytest.mark.parametrize("preset", PRESETS)
def test_control_with_advantages_by_arrival_the_order_of_arrival_is_seen(
    model: Any, oracle: ModuleType, groups: list[Any], monkeypatch: pytest.MonkeyPatch, preset: Preset
) -> None:
    """Rows compared with the four that came together, whichever prompt they answer."""
    compared = shares.compared

    def by_arrival(packed: Any, recipe: Recipe) -> Any:
        return compared(replace(packed, groups=np.arange(len(packed.groups)) // 4), recipe)

    monkeypatch.setattr(shares, "compared", by_arrival)
    with pytest.raises(AssertionError, match="not close"):
        arrival_order(model, oracle, Objective(preset=preset), groups, monkeypatch)


@pytest.mark.parametrize("preset", PRESETS)
def test_control_with_segments_taken_for_answers_they_are_seen(
    model: Any, oracle: ModuleType, groups: list[Any], monkeypatch: pytest.MonkeyPatch, preset: Preset
) -> None:
    pack = shares.pack

    def by_rows(batches: Any) -> Any:
        packed = pack(batches)
        return replace(packed, answers=np.arange(len(packed.answers)))

    monkeypatch.setattr(shares, "pack", by_rows)
    with pytest.raises(AssertionError, match="not close"):
        segments(model, oracle, Objective(preset=preset), groups, monkeypatch)


@pytest.mark.parametrize("preset", ["gspo", "rloo"])
def test_control_with_only_what_is_in_a_micro_batch_an_answer_in_several_is_not_whole(
    model: Any, oracle: ModuleType, groups: list[Any], monkeypatch: pytest.MonkeyPatch, preset: Preset
) -> None:
    def only_own(_: Batch, micro: Microbatch) -> Whole:
        return Whole(micro.positions, micro.cu_seqlens, None)

    monkeypatch.setattr(step, "whole_answers", only_own)
    with pytest.raises(AssertionError, match="not close"):
        segments(model, oracle, Objective(preset=preset), groups, monkeypatch)


def test_a_model_that_does_not_pack_takes_segments_one_by_one_to_the_same_gradient(
    model_path: Path, oracle: ModuleType, groups: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_model(model_path, "float32", "eager")
    segments(plain, oracle, Objective(preset="gspo"), groups, monkeypatch)


@pytest.mark.parametrize("preset", PRESETS)
def test_control_with_the_sampling_masks_ignored_the_gradient_is_not_the_objectives(
    model: Any, oracle: ModuleType, groups: list[Any], monkeypatch: pytest.MonkeyPatch, preset: Preset
) -> None:
    monkeypatch.setattr(Batch, "support_of", lambda *_: None)
    with pytest.raises(AssertionError, match="not close"):
        padding(model, oracle, Objective(preset=preset), [restricted(group) for group in groups], monkeypatch)
