"""`bench staleness`: its lag is a lag, arms that are run once are alike, and each target can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from asyncrl.benchmarks import staleness
from asyncrl.benchmarks.journal import Journal
from asyncrl.benchmarks.staleness import ARMS, LAGS, RATES, SEEDS, Outcome, Setting
from asyncrl.benchmarks.staleness_run import Sampler, Trace, train
from asyncrl.config.checks import check
from asyncrl.config.convert import convert
from asyncrl.config.recipe import Recipe
from asyncrl.learners.batch import BoundBroken
from asyncrl.learners.forward import token_logprobs
from asyncrl.learners.step import accumulate
from asyncrl.learners.tiny import ensure_tiny
from asyncrl.learners.trainer import Trainer
from asyncrl.schema import to_batch


@pytest.fixture(scope="module")
def model_path() -> Path:
    return ensure_tiny(0)


def recipe_of(arm: str, *, lag: int, steps: int = 1, seed: int = 0) -> Recipe:
    """As it is run, but for fewer answers."""
    document = Setting(arm, lag, 2e-3, seed=seed, steps=steps).recipe()
    document["learner"]["groups_per_step"] = 6
    recipe = convert(document)
    check(recipe)
    return recipe


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.whole.state_dict().items()}


def test_answers_are_those_of_the_version_that_they_say_with_the_logprobs_that_it_gives(model_path: Path) -> None:
    """Trained with a lag of 1, looked at from outside: each version's weights, asked again, gave what is recorded."""
    recipe = recipe_of("ppo", lag=1)
    trainer, sampler = Trainer.load(recipe, model_path, None), Sampler(recipe, model_path)
    kept = [weights_of(trainer)]
    for version in range(3):
        sampled_by = max(0, version - 1)
        groups = [to_batch(g) for g in sampler.sample(kept[sampled_by], version=sampled_by, step=version)]
        step = trainer.prepare(groups, version=version)
        assert set(step.batch.ages[step.batch.trained].tolist()) == {version - sampled_by}
        of_version = Trainer.load(recipe, model_path, None)
        of_version.whole.load_state_dict(kept[sampled_by])
        with torch.no_grad():
            found = token_logprobs(of_version.model, step.batch.token_ids, step.batch.cu_seqlens)
        error = (found - step.batch.behaviour)[step.batch.trained].abs().max()
        assert float(error) < 1e-4
        trainer.train(step)
        kept.append(weights_of(trainer))
    with torch.no_grad():
        newest = token_logprobs(trainer.model, step.batch.token_ids, step.batch.cu_seqlens)
    assert float((newest - step.batch.behaviour)[step.batch.trained].abs().max()) > 1e-2, "control: weights that differ"


def test_arms_of_a_seed_share_prompts_and_draws_and_another_seed_has_its_own(model_path: Path) -> None:
    def first(arm: str, seed: int) -> list[Any]:
        recipe = recipe_of(arm, lag=4, seed=seed)
        weights = weights_of(Trainer.load(recipe, model_path, None))
        groups = Sampler(recipe, model_path).sample(weights, version=0, step=3)
        return [(g.row_id, row.token_ids.tolist(), row.reward) for g in groups for row in g.trajectories]

    assert first("none", 1) == first("async", 1)
    assert first("none", 1) != first("none", 2)


def test_the_same_run_twice_gives_the_same_trace_and_a_lag_another(model_path: Path) -> None:
    found = train(recipe_of("none", lag=1, steps=3), model_path)
    assert found == train(recipe_of("none", lag=1, steps=3), model_path)
    other = train(recipe_of("none", lag=2, steps=3), model_path)
    assert found.ess[0] == pytest.approx(1.0)
    assert found.rewards[:2] == other.rewards[:2], "before there is a version that old, both sample by version 0"
    assert found.rewards[2:] != other.rewards[2:]


def test_a_sampler_older_than_its_lag_is_refused(model_path: Path) -> None:
    recipe = recipe_of("ppo", lag=1)
    trainer = Trainer.load(recipe, model_path, None)
    groups = Sampler(recipe, model_path).sample(weights_of(trainer), version=0, step=2)
    with pytest.raises(BoundBroken, match="age 2, max_trajectory_age is 1"):
        trainer.prepare([to_batch(group) for group in groups], version=2)


def test_without_a_lag_arms_that_are_run_once_have_one_gradient(model_path: Path) -> None:
    recipe = recipe_of("none", lag=0)
    trainer = Trainer.load(recipe, model_path, None)
    step = trainer.prepare(
        [to_batch(group) for group in Sampler(recipe, model_path).sample(weights_of(trainer), version=0, step=0)],
        version=0,
    )

    def gradient(arm: str) -> torch.Tensor:
        objective = recipe_of(arm, lag=0).objective
        # What `proximal: behaviour-version` takes the ratio to, where the versions are those of now.
        own = token_logprobs(trainer.model, step.batch.token_ids, step.batch.cu_seqlens).detach()
        proximal = own if objective.proximal == "behaviour-version" else None
        trainer.model.zero_grad()
        accumulate(
            trainer.model,
            step.batch,
            step.worth.values,
            objective=objective,
            temperature=1.0,
            max_tokens=4096,
            proximal=proximal,
        )
        return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])

    def apart(arm: str, expected: torch.Tensor) -> float:
        return float((gradient(arm) - expected).abs().max() / expected.abs().max())

    shared = [arm for arm in ARMS if Setting(arm, 0, 1e-3, 0).alike.arm == "none"]
    assert shared == ["none", "ppo", "tis", "decoupled", "cispo", "dppo"]
    plain = gradient("none")
    assert max(apart(arm, plain) for arm in shared) < 1e-4
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.2)
    assert apart("ppo", gradient("none")) > 1e-2, "control: where the ratio is not 1 they differ"


def test_only_lagless_arms_with_the_same_advantage_are_run_once() -> None:
    grid = staleness.grid()
    assert len(grid) == len(set(grid)) == len(ARMS) * len(LAGS) * len(RATES) * len(SEEDS) == 350
    assert len({setting.alike for setting in grid}) == 300
    shared = {setting.arm for setting in grid if setting.alike != setting}
    advantages = {arm: recipe_of(arm, lag=0).objective.advantage for arm in ARMS}
    assert {advantages[arm] for arm in shared} == {advantages["none"]}
    assert all(setting.lag == 0 for setting in grid if setting.alike != setting)


def outcome(setting: Setting) -> Outcome:
    """Numbers like those that are measured, a function of the setting."""
    loss = {"none": 0.055, "ppo": 0.01, "async": 0.004}.get(setting.arm, 0.02) * setting.lag
    reward = 0.95 - loss * setting.learning_rate / 1e-3 + 0.01 * (setting.seed - 2)
    return Outcome(reward, 20 + setting.lag if reward > 0.7 else None, 1 - loss, 1 - 2 * loss)


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Journal:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))
    return Journal("x")


def measured(settings: list[Setting]) -> list[dict[str, Any]]:
    rows = [staleness.run_row(setting, outcome(setting.alike)) for setting in settings]
    return [*rows, *staleness.mean_rows(rows)]


def test_the_quick_rows_are_what_the_targets_need() -> None:
    means = [row for row in measured(staleness.needed()) if row["kind"] == "mean"]
    assert len(staleness.needed()) == 30
    found = staleness.targets(means)
    assert [target.met for target in found] == [True] * 4
    whole = [row for row in measured(staleness.grid()) if row["kind"] == "mean"]
    assert staleness.targets(whole) == found


@pytest.mark.parametrize(
    ("arm", "lag", "rate", "missed"),
    [("ppo", 8, 2e-3, "ppo less that of none"), ("async", 4, 1e-3, "lag 4"), ("async", 8, 1e-3, "lag 8: reward of")],
)
def test_each_target_is_missed_where_its_arm_learns_no_better_than_without_a_correction(
    arm: str, lag: int, rate: float, missed: str
) -> None:
    means = [row for row in measured(staleness.needed()) if row["kind"] == "mean"]
    for row in means:
        if (row["arm"], row["lag"], row["learning_rate"]) == (arm, lag, rate):
            row["reward_end"] = 0.1
    assert [missed in target.name for target in staleness.targets(means) if not target.met] == [True]


def test_the_control_is_missed_where_nothing_is_lost_without_a_correction() -> None:
    means = [row for row in measured(staleness.needed()) if row["kind"] == "mean"]
    for row in means:
        if (row["arm"], row["learning_rate"]) == ("none", 1e-3):
            row["reward_end"] = 0.94
    (missed,) = [target for target in staleness.targets(means) if not target.met]
    assert missed.name.startswith("control")


def test_steps_are_averaged_over_the_runs_that_got_there_and_how_many_did_is_said() -> None:
    rows = measured([Setting("none", 8, 1e-3, seed) for seed in SEEDS] + [Setting("tis", 0, 1e-3, 0)])
    never, alike = (row for row in rows if row["kind"] == "mean")
    assert (never["steps_to_reward"], never["reached"], never["seeds"]) == (None, 0, 5)
    assert (alike["steps_to_reward"], alike["reached"], alike["same_as"]) == (20, 1, "none")
    assert never["reward_end_least"] < never["reward_end"] < never["reward_end_most"]


def test_an_interrupted_benchmark_goes_on_where_it_ended(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [Setting(arm, lag, 1e-3, 0) for arm in ("none", "tis") for lag in (0, 2)]
    ran: list[Setting] = []
    said: list[str] = []

    def some(asked: list[Setting], *, most: int) -> Any:
        for setting in asked[:most]:
            ran.append(setting)
            yield setting, outcome(setting)
        if most < len(asked):
            raise KeyboardInterrupt

    monkeypatch.setattr(staleness, "_finished", lambda asked: some(asked, most=1))
    with pytest.raises(KeyboardInterrupt):
        staleness.run_all(settings, journal, said.append)
    (file,) = journal._path.parent.iterdir()
    with file.open("a") as torn:
        torn.write('[["tis", 2, 0.0')
    monkeypatch.setattr(staleness, "_finished", lambda asked: some(asked, most=9))
    found = staleness.run_all(settings, journal, said.append)
    assert found == {setting: outcome(setting.alike) for setting in settings}
    assert ran == [settings[0], settings[1], settings[3]], "none twice, and lag 0 of tis not at all"
    assert "1 of 3 runs were finished before" in said[1]
    journal.forget()
    assert journal.finished() == {}


def test_what_other_code_measured_is_not_taken(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    journal.add(("a", 1), [0.5])
    assert Journal("x").finished() == {("a", 1): [0.5]}
    monkeypatch.setattr("asyncrl.benchmarks.journal.LIBRARIES", ("numpy",))
    assert Journal("x").finished() == {}


@pytest.mark.slow
def test_runs_in_processes_of_their_own_end_as_they_do_in_this_one(model_path: Path) -> None:
    setting = Setting("async", 1, 1e-3, seed=0, steps=2)
    ((same, found),) = staleness._finished([setting])
    trace = train(convert(setting.recipe()), model_path)
    assert same == setting
    assert found.reward == trace.reward_end == pytest.approx(np.mean(trace.rewards))
    assert (found.ess, found.ess_sequence) == pytest.approx((np.mean(trace.ess), np.mean(trace.ess_sequence)))


def test_a_run_has_learnt_when_its_moving_average_says_so() -> None:
    assert Trace([0.2, *[1.0] * 30], [], []).steps_to_reward == 8
    assert Trace([0.5] * 60, [], []).steps_to_reward is None
    assert Trace([0.0] * 40 + [1.0] * 20, [], []).reward_end == 1.0


def test_the_picture_is_a_png_of_every_arm(tmp_path: Path) -> None:
    rows = measured(staleness.grid())
    staleness.plot(rows, tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG\r\n")
    staleness.plot(measured(staleness.needed()), tmp_path / "some.png")
    assert 10_000 < (tmp_path / "some.png").stat().st_size < (tmp_path / "all.png").stat().st_size


def test_arms_are_recipes_that_say_what_they_are() -> None:
    parts = {arm: recipe_of(arm, lag=8).objective for arm in ARMS}
    assert {arm: found.surrogate for arm, found in parts.items()} == {
        "none": "reinforce",
        "ppo": "ppo-clip",
        "tis": "reinforce",
        "decoupled": "ppo-clip",
        "cispo": "cispo",
        "dppo": "reinforce",
        "async": "cispo",
    }
    assert parts["async"] == convert({"buffer": {"max_trajectory_age": 8}}).objective, "the default at this age"
    assert msgspec.structs.replace(parts["dppo"], mask=[]) == parts["tis"]


def test_each_part_of_async_is_left_out_once_at_the_longest_lag() -> None:
    whole = recipe_of("async", lag=8).objective
    for arm in staleness.PARTS:
        found = recipe_of(arm, lag=8).objective
        differing = [key for key in found.__struct_fields__ if getattr(found, key) != getattr(whole, key)]
        assert len(differing) == 1, arm
    assert {setting.lag for setting in staleness.parts()} == {8}
    assert not set(staleness.parts()) & set(staleness.grid())
