from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.errors import RecipeError
from asyncrl.config.identity import recipe_hash
from asyncrl.config.loading import (
    Loaded,
    load_recipe,
    packaged_recipes,
    recipe_from_document,
    stored_document,
)
from asyncrl.config.objective import Objective
from asyncrl.config.recipe import (
    CustomTask,
    Recipe,
    ReverseTask,
    SimulatedEngine,
    SingleTurnTask,
    TransformersEngine,
    to_builtins,
)

Load = Callable[..., Loaded]
Refusal = Callable[..., str]


def test_the_default_recipe_is_the_packaged_tiny_reverse() -> None:
    loaded = load_recipe(None, environ={})
    assert loaded.source == "tiny-reverse"
    assert loaded.recipe == load_recipe("tiny-reverse", environ={}).recipe
    assert loaded.parent_diff == []


def test_the_packaged_default_is_the_structs_defaults_with_the_best_known_preset() -> None:
    assert load_recipe(None, environ={}).recipe == Recipe(objective=Objective(preset="grpo"))


def test_every_packaged_recipe_loads(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    assert "tiny-reverse" in packaged_recipes()
    for name in packaged_recipes():
        load_recipe(name, environ={"REDIS_PASSWORD": "x", "DATA": str(tmp_path)})


def test_an_empty_recipe_is_all_defaults(load: Load) -> None:
    assert load("").recipe == Recipe()
    assert load("run:\nlearner:\n").recipe == Recipe()


def test_a_packaged_name_wins_over_files_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for decoy in (tmp_path / "tiny-reverse.yaml", tmp_path / "configs" / "tiny-reverse.yaml"):
        decoy.parent.mkdir(exist_ok=True)
        decoy.write_text("run: {max_steps: 7}")
    assert load_recipe("tiny-reverse", environ={}).recipe.run.max_steps == 60
    assert load_recipe("./tiny-reverse.yaml", environ={}).recipe.run.max_steps == 7


def test_a_plain_exponent_is_a_number_and_a_date_is_text(load: Load) -> None:
    recipe = load("learner: {learning_rate: 1e-6}\nrun: {name: 2024-01-01}").recipe
    assert recipe.learner.learning_rate == 1e-6
    assert recipe.run.name == "2024-01-01"


def test_flags_win_over_set_which_wins_over_the_recipe(load: Load) -> None:
    text = "buffer: {max_trajectory_age: 2}\nrun: {seed: 1}\nlearner: {ranks: 1}"
    assert load(text).recipe.buffer.max_trajectory_age == 2
    overrides = ["buffer.max_trajectory_age=3", "run.seed=5"]
    assert load(text, overrides=overrides).recipe.buffer.max_trajectory_age == 3
    loaded = load(text, overrides=overrides, flags={"max_trajectory_age": 4})
    assert loaded.recipe.buffer.max_trajectory_age == 4
    assert loaded.recipe.run.seed == 5
    assert load(text, flags={"max-trajectory-age": None}).recipe.buffer.max_trajectory_age == 2


def test_a_recipe_extends_a_path_beside_itself_and_a_packaged_name(load: Load, tmp_path: Path) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "base.yaml").write_text(
        "extends: tiny-reverse\nrun: {max_steps: 9, seed: 3}\nlearner: {betas: [0.5, 0.6]}"
    )
    (folder / "child.yaml").write_text("extends: ./base.yaml\nrun: {seed: 4}")
    loaded = load_recipe("recipes/child.yaml", environ={})
    assert (loaded.recipe.run.max_steps, loaded.recipe.run.seed) == (9, 4)
    assert loaded.recipe.learner.betas == (0.5, 0.6)
    assert loaded.recipe.extends == "./base.yaml"
    assert loaded.parent_diff == ["run.seed"]


def test_the_difference_to_the_parent_names_overrides_too(load: Load) -> None:
    loaded = load("extends: tiny-reverse\nrun: {seed: 4}", flags={"max_trajectory_age": 2})
    assert loaded.parent_diff == ["run.seed", "buffer.max_trajectory_age"]


def test_extending_in_a_circle_is_refused(load: Load, refusal: Refusal, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("extends: mine.yaml")
    assert "circle" in refusal("extends: other.yaml")
    assert "circle" in refusal("extends: ./mine.yaml")


def test_another_type_replaces_the_whole_union(load: Load, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("collector: {engine: {type: simulated, token_s: 0.5, slots: 4}}")
    recipe = load("extends: base.yaml\ncollector: {engine: {type: transformers}}").recipe
    assert recipe.collector.engine == TransformersEngine()
    recipe = load("extends: base.yaml\ncollector: {engine: {slots: 8}}").recipe
    assert recipe.collector.engine == SimulatedEngine(token_s=0.5, slots=8)
    for overrides in (
        ["collector.engine.type=simulated", "collector.engine.cv=2.0"],
        ["collector.engine.cv=2.0", "collector.engine.type=simulated"],
    ):
        assert load("", overrides=overrides).recipe.collector.engine == SimulatedEngine(cv=2.0)


def test_each_kind_of_task_loads(load: Load, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").touch()
    assert load("task: {digits: [2, 4]}").recipe.task == ReverseTask(digits=(2, 4))
    task = load("task: {type: single-turn, data: {train: d.jsonl}}").recipe.task
    assert isinstance(task, SingleTurnTask)
    assert task.rewards[0].type == "exact"
    task = load("task: {type: 'my.task:MyTask', args: {n: [1, {a: null}]}}").recipe.task
    assert task == CustomTask(type="my.task:MyTask", args={"n": [1, {"a": None}]})


def test_sizes_are_kept_in_one_form(load: Load) -> None:
    for text in ("4GiB", "4096MiB", "4294967296", "4 GiB"):
        assert load(f"buffer: {{max_bytes: {text}}}").recipe.buffer.max_bytes == "4GiB"


def test_memory_serves_one_process_only(load: Load, refusal: Refusal) -> None:
    assert load("buffer: {url: memory://}", single_process=True).recipe.buffer.url == "memory://"
    assert "inside one process" in refusal("buffer: {url: memory://}")


# --- environment variables


def test_a_whole_reference_takes_its_yaml_meaning_and_a_part_is_text(load: Load) -> None:
    text = 'run: {max_steps: "${STEPS:-5}", name: "n-${STEPS:-x}", output_dir: "$${STEPS}"}'
    run = load(text).recipe.run
    assert (run.max_steps, run.name, run.output_dir) == (5, "n-x", "${STEPS}")
    run = load(text, environ={"STEPS": "7"}).recipe.run
    assert (run.max_steps, run.name) == (7, "n-7")


def test_an_empty_variable_takes_the_default(load: Load) -> None:
    assert load('run: {seed: "${SEED:-5}"}', environ={"SEED": ""}).recipe.run.seed == 5


def test_an_unset_variable_is_named_with_its_key(refusal: Refusal) -> None:
    message = refusal('run: {output_dir: "${HERE}/x"}')
    assert "run.output_dir" in message
    assert "HERE" in message
    assert "export HERE=" in message


def test_a_malformed_reference_is_named_with_its_key(refusal: Refusal) -> None:
    message = refusal('run: {output_dir: "${a b}"}')
    assert "run.output_dir" in message
    assert "${a b}" in message


def test_a_variable_that_only_a_replaced_value_needs_may_be_unset(load: Load) -> None:
    assert load('run: {seed: "${SEED}"}', overrides=["run.seed=3"]).recipe.run.seed == 3


def test_variables_are_read_in_values_not_in_keys(refusal: Refusal) -> None:
    assert "run.${SEED} is not a key" in refusal('run: {"${SEED}": 1}', environ={"SEED": "seed"})


# --- joining a run


def test_a_joining_process_gets_the_same_recipe_without_the_stores_password(load: Load) -> None:
    recipe = load("buffer: {url: 'redis://u:secret@host/0'}\nlearner: {learning_rate: 1e-6}").recipe
    stored = stored_document(recipe)
    assert "secret" not in str(stored)
    joined = recipe_from_document(stored)
    assert to_builtins(joined) == {**to_builtins(recipe), "buffer": stored["buffer"]}


def test_only_local_keys_may_be_set_when_joining(load: Load) -> None:
    stored = stored_document(Recipe())
    joined = recipe_from_document(stored, overrides=["model.path=some/model"])
    assert joined.model.path == "some/model"
    server = "collector: {engine: {type: vllm-server, url: 'http://127.0.0.1:8000'}}"
    there = recipe_from_document(
        stored_document(load(server).recipe), overrides=["collector.engine.url=http://127.0.0.1:8001"]
    )
    assert recipe_hash(there) == recipe_hash(load(server).recipe)
    with pytest.raises(RecipeError, match=r"run\.seed.*model\.path"):
        recipe_from_document(stored, overrides=["run.seed=1"])
