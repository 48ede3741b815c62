"""The reference is the weights that the run started from, whatever the learner has become since."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from asyncrl.config.objective import Objective
from asyncrl.config.recipe import Learner, Lora, Model, Recipe
from asyncrl.learners.checkpoint import Checkpoint, load
from asyncrl.learners.diagnostics import step_metrics
from asyncrl.learners.frozen import frozen_logprobs
from asyncrl.learners.model import ModelError, load_model, load_tokenizer
from asyncrl.learners.trainer import Trainer
from asyncrl.learners.writing import save
from asyncrl.schema import to_batch
from asyncrl.staleness import Weights

RECIPE = Recipe(
    objective=Objective(preset="grpo", beta=0.05),
    learner=Learner(learning_rate=1e-2, warmup_steps=0, max_tokens_per_microbatch=30),
)
ADAPTED = replace(RECIPE, model=Model(lora=Lora(r=4, alpha=8)))


@pytest.fixture(scope="module")
def groups(model_path: Path, make_row: Any, make_group: Any, draw: Any) -> list[Any]:
    """Sampled by the initial weights."""
    model = load_model(model_path, "float32", "eager")
    generator = torch.Generator().manual_seed(0)
    found = []
    for ticket in range(3):
        rows = []
        for member in range(4):
            completion, logprobs = draw(model, [1, 2 + ticket], 5, generator)
            rows.append(make_row([1, 2 + ticket], completion, logprobs, reward=float(member % 2), member=member))
        found.append(to_batch(make_group(rows, ticket=ticket)))
    return found


def train(trainer: Trainer, groups: list[Any], *, version: int) -> dict[str, Any]:
    """A step, and its metrics."""
    step = trainer.prepare(groups, version=version)
    seen, _ = trainer.train(step)
    return step_metrics(step.packed, step.batch, step.worth, seen, first=step.first, update="keep")


def trained(recipe: Recipe, path: Path, groups: list[Any]) -> tuple[Trainer, list[dict[str, Any]]]:
    """A learner after three steps over the same groups."""
    recipe = replace(recipe, buffer=replace(recipe.buffer, max_trajectory_age=3))
    trainer = Trainer.load(recipe, path, None)
    return trainer, [train(trainer, groups, version=version) for version in range(3)]


def saved(trainer: Trainer, path: Path, folder: Path) -> Checkpoint:
    return load(
        save(
            folder,
            model=trainer.whole,
            tokenizer=load_tokenizer(path),
            training={"optimizer": trainer.optimizer.state_dict()},
            weights=Weights(1, 3),
            forks={1: (0, 0)},
            trained=[],
            tokens=0,
            start=trainer.start,
        )
    )


def reference_logprobs(trainer: Trainer, groups: list[Any]) -> torch.Tensor:
    batch = trainer.prepare(groups, version=0).batch
    assert trainer.reference is not None
    with trainer.reference.in_place():
        return frozen_logprobs(trainer.model, batch, batch.trained, temperature=1.0, max_tokens=30)


@pytest.mark.parametrize("recipe", [RECIPE, ADAPTED], ids=["whole", "adapter"])
def test_the_divergence_is_exactly_nothing_at_the_start_and_then_is_not(
    model_path: Path, groups: list[Any], recipe: Recipe
) -> None:
    _, found = trained(recipe, model_path, groups)
    assert found[0]["kl_reference"] == 0.0
    assert min(metrics["kl_reference"] for metrics in found[1:]) > 0.01
    assert all(0 < metrics["entropy"] < math.log(24) for metrics in found)


@pytest.mark.parametrize("recipe", [RECIPE, ADAPTED], ids=["whole", "adapter"])
def test_the_model_has_its_own_weights_again_also_when_a_pass_fails(
    model_path: Path, groups: list[Any], recipe: Recipe
) -> None:
    trainer, _ = trained(recipe, model_path, groups)
    own = {name: (p.detach().clone(), p.requires_grad) for name, p in trainer.model.named_parameters()}
    batch = trainer.prepare(groups, version=3).batch

    def logprobs() -> torch.Tensor:
        return frozen_logprobs(trainer.model, batch, batch.trained, temperature=1.0, max_tokens=30)

    before = logprobs()
    assert trainer.reference is not None
    inside = []

    def failing_pass() -> None:
        inside.append(logprobs())
        raise RuntimeError("a pass that fails")

    with suppress(RuntimeError), trainer.reference.in_place():
        failing_pass()
    assert not torch.equal(inside[0][batch.trained], before[batch.trained])
    assert torch.equal(logprobs()[batch.trained], before[batch.trained])
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, own[name][0])
        assert p.requires_grad == own[name][1]


@pytest.mark.parametrize("recipe", [RECIPE, ADAPTED], ids=["whole", "adapter"])
def test_a_resumed_learner_has_the_reference_that_the_run_began_with(
    model_path: Path, groups: list[Any], tmp_path: Path, recipe: Recipe
) -> None:
    """Bit for bit, and so are the steps that follow. Control: the weights that it resumes are others."""
    trainer, _ = trained(recipe, model_path, groups)
    checkpoint = saved(trainer, model_path, tmp_path)
    again = Trainer.load(trainer.recipe, model_path, checkpoint)
    mine, found = reference_logprobs(trainer, groups), reference_logprobs(again, groups)
    batch = trainer.prepare(groups, version=0).batch
    assert torch.equal(found[batch.trained], mine[batch.trained])
    own = frozen_logprobs(again.model, batch, batch.trained, temperature=1.0, max_tokens=30)
    assert not torch.allclose(own[batch.trained], mine[batch.trained], atol=1e-2)
    assert again.start == trainer.start
    one, other = (train(learner, groups, version=3) for learner in (trainer, again))
    assert one == other
    assert one["kl_reference"] > 0


def test_another_model_in_the_place_of_the_first_is_refused(
    model_path: Path, groups: list[Any], tmp_path: Path
) -> None:
    trainer, _ = trained(RECIPE, model_path, groups)
    checkpoint = saved(trainer, model_path, tmp_path)
    with pytest.raises(
        ModelError, match=r"has the checksum \w+; the run started from weights whose checksum is \w+"
    ) as e:
        Trainer.load(RECIPE, checkpoint.folder, checkpoint)  # what was resumed, say by a link that was moved
    assert trainer.start in str(e.value)


def test_a_checkpoint_of_a_run_without_a_reference_cannot_go_on_with_one(
    model_path: Path, groups: list[Any], tmp_path: Path
) -> None:
    trainer, _ = trained(replace(RECIPE, objective=Objective(preset="grpo")), model_path, groups)
    assert trainer.reference is None
    assert trainer.start == ""
    checkpoint = saved(trainer, model_path, tmp_path)
    assert checkpoint.manifest.start == ""
    with pytest.raises(ModelError, match=r"which .* does not say"):
        Trainer.load(RECIPE, model_path, checkpoint)


def test_an_adapters_reference_takes_no_memory_and_a_whole_models_as_much_as_the_model(
    model_path: Path, groups: list[Any]
) -> None:
    adapted, whole = (Trainer.load(recipe, model_path, None) for recipe in (ADAPTED, RECIPE))
    assert adapted.reference is not None
    assert whole.reference is not None
    assert (adapted.reference.nbytes, adapted.start) == (0, "")
    assert whole.reference.nbytes == sum(p.nbytes for p in whole.model.parameters())


def test_a_large_beta_holds_the_policy_near_the_reference(model_path: Path, groups: list[Any]) -> None:
    def far(beta: float) -> float:
        objective = Objective(preset="grpo", beta=beta)
        recipe = replace(RECIPE, objective=objective, learner=replace(RECIPE.learner, learning_rate=3e-3))
        recipe = replace(recipe, buffer=replace(recipe.buffer, max_trajectory_age=9))
        trainer = Trainer.load(recipe, model_path, None)
        return [train(trainer, groups, version=version)["kl_reference"] for version in range(10)][-1]

    assert far(1.0) < far(1e-3) / 2


def test_an_entropy_bonus_keeps_the_policy_less_sure(model_path: Path, groups: list[Any]) -> None:
    def sure(coefficient: float) -> float:
        recipe = replace(RECIPE, objective=Objective(preset="grpo", entropy=coefficient))
        return float(trained(recipe, model_path, groups)[1][-1]["entropy"])

    assert sure(0.5) > sure(0.0) + 0.05


def test_a_token_that_the_reference_gives_no_number_is_left_out_and_counted(
    model_path: Path, groups: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer.load(RECIPE, model_path, None)
    batch = trainer.prepare(groups, version=0).batch
    at = int(batch.trained.nonzero()[0])

    def broken(*args: Any, **options: Any) -> torch.Tensor:
        found = frozen_logprobs(*args, **options)
        found[at] = torch.nan
        return found

    monkeypatch.setattr("asyncrl.learners.trainer.frozen_logprobs", broken)
    seen, updates = trainer.train(trainer.prepare(groups, version=0))
    assert (seen.nonfinite, seen.tokens) == (1, batch.tokens - 1)
    assert not seen.included[at]
    assert math.isfinite(updates.grad_norm)
