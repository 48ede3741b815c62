"""What reward models take, by plan: against one that is loaded, and where each of them lies."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.errors import RecipeError
from asyncrl.config.loading import load_recipe
from asyncrl.config.recipe import Recipe
from asyncrl.config.rewards import RewardModel
from asyncrl.learners.shapes import Shapes, of_config, shapes_of
from asyncrl.rewards.reward_model_scores import RewardScores
from asyncrl.runtime.planner import DoesNotFit, Plan, look, plan
from asyncrl.runtime.reward_model_memory import parameters, reward_model_shapes
from asyncrl.runtime.room import Machine, other
from tests.commands import Ended
from tests.rewards import reward_models

GIB = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reward_models.make(tmp_path_factory.mktemp("reward-model"))


def recipe(tmp_path: Path, *parts: dict[str, Any], **sections: dict[str, Any]) -> Recipe:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2?", "answer": "4"}\n' * 20)
    rewards = [{"type": "reward-model", **part} for part in parts]
    task = {"type": "single-turn", "data": {"train": str(tmp_path / "rows.jsonl")}, "rewards": rewards}
    return load_recipe("tiny-reverse", sections={"task": task, **sections}).recipe


def planned(settings: Recipe, there: Machine, scoring: dict[str, Shapes | str] | None = None, **keys: Any) -> Plan:
    shapes = shapes_of(settings.model.path, None)
    found = reward_model_shapes(settings) if scoring is None else scoring
    return plan(settings, shapes, there, **{"collects": True, **keys}, scoring=found)


def sizes(of: Plan, where: str) -> dict[str, tuple[int, int]]:
    return {part.what: part.span() for part in of.parts if part.where == where}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_its_weights_are_those_of_one_that_is_loaded(folder: Path, tmp_path: Path, dtype: str) -> None:
    part = RewardModel(path=str(folder), dtype=dtype)
    model = RewardScores(part)._model
    loaded = sum(one.nbytes for one in model.parameters())
    answered = model(input_ids=torch.tensor([[4, 5]]))
    assert [name for name in answered if name != "logits"] == [], "keys and values are kept for nobody, nor planned"
    found = sizes(planned(recipe(tmp_path, {"path": str(folder), "dtype": dtype}), other(8 * GIB, [])), "reward-model")
    assert found[f"weights, {dtype}"] == (loaded, loaded)


def test_without_safetensors_they_follow_from_the_configuration(folder: Path) -> None:
    loaded = sum(one.numel() for one in RewardScores(RewardModel(path=str(folder)))._model.parameters())
    shapes = shapes_of("a folder", folder)
    assert not isinstance(shapes, str)
    config = {"model_type": "llama", "vocab_size": shapes.vocabulary, "hidden_size": 16, "intermediate_size": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    by_formula = of_config({**config, **heads})
    assert not isinstance(by_formula, str)
    assert parameters(shapes) == parameters(by_formula) == loaded


def test_a_language_models_head_is_not_loaded(tmp_path: Path) -> None:
    folder = reward_models.make(tmp_path / "causal", causal=True)
    shapes = shapes_of("a folder", folder)
    assert not isinstance(shapes, str)
    assert parameters(shapes) == shapes.parameters - shapes.vocabulary * shapes.hidden + shapes.hidden


def test_larger_batches_take_more_and_an_answer_alone_is_the_least(folder: Path, tmp_path: Path) -> None:
    def batch(tokens: int) -> tuple[int, int]:
        part = {"path": str(folder), "max_length": 1024, "max_tokens_per_batch": tokens}
        return sizes(planned(recipe(tmp_path, part), other(8 * GIB, [])), "reward-model")[f"a batch of {tokens} tokens"]

    (least, most), (same, twice) = batch(2048), batch(4096)
    assert 0 < least == same < most
    assert twice == 2 * most


def test_each_is_on_the_gpu_that_its_process_sees_under_that_number(folder: Path, tmp_path: Path) -> None:
    devices = {"first": "cuda", "second": "cuda:1", "none": "cpu"}
    parts = [{"name": name, "path": str(folder), "device": device} for name, device in devices.items()]
    engines = {"engine": {"type": "vllm", "gpu_memory_utilization": 0.5}, "engines": 2, "devices": [2, 3]}
    here = recipe(tmp_path, *parts, collector=engines, learner={"devices": [0]})
    found = planned(here, other(64 * GIB, [24 * GIB] * 4))
    assert {part.where: part.gpu for part in found.parts if part.what == "weights, float32"} == {
        "learner": None,
        "first": 2,
        "second": 3,
        "none": None,
    }
    of_gpus = {need.name: need for need in found.needs}
    assert of_gpus["each of GPUs 2, 3"].certain == 12 * GIB + sizes(found, "first")["weights, float32"][0]
    line = next(line for line in found.table().splitlines() if line.startswith("second ") and "weights" in line)
    assert line.endswith("GPU 3")

    server = {"engine": {"type": "vllm-server", "url": "http://127.0.0.1:8000"}}
    alone = planned(recipe(tmp_path, parts[1], collector=server), other(64 * GIB, [24 * GIB] * 4), neighbours=0)
    assert [need.name for need in alone.needs if "GPU" in need.name] == ["GPU 1"]


def test_a_device_that_the_collector_does_not_see_is_refused_before_anything_starts(
    folder: Path, tmp_path: Path
) -> None:
    one = recipe(tmp_path, {"path": str(folder), "device": "cuda:1"})
    with pytest.raises(RecipeError, match=r"task\.rewards\[0\]\.device is cuda:1, but the collector sees 1 GPU"):
        planned(one, other(64 * GIB, [24 * GIB]))
    planned(one, other(64 * GIB, [24 * GIB]), collects=False)


def test_one_that_does_not_fit_is_refused_with_its_keys(tmp_path: Path) -> None:
    large = of_config(
        {
            "model_type": "llama",
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        }
    )
    settings = recipe(tmp_path, {"path": "someone/a-reward-model"})
    with pytest.raises(DoesNotFit) as refused:
        planned(settings, other(16 * GIB, []), {"task.rewards[0]": large}).check()
    assert "The largest part: weights, float32 (reward-model), 28.0 GiB" in str(refused.value)
    assert "What makes it less: task.rewards[0].dtype, task.rewards[0].path" in str(refused.value)
    planned(settings, other(64 * GIB, []), {"task.rewards[0]": large}).check()


def test_one_that_is_not_here_is_named_and_nothing_is_refused_for_it(tmp_path: Path) -> None:
    found = planned(recipe(tmp_path, {"path": "someone/a-reward-model"}), other(8 * GIB, []))
    assert found.check() == ""
    assert found.line().endswith("; not planned: reward-model: the model is not on this machine")
    assert found.line() in found.table()
    assert list(sizes(found, "reward-model")) == ["process"]


@pytest.mark.asyncio
async def test_a_run_looks_at_them_where_a_collector_is(folder: Path, tmp_path: Path) -> None:
    settings = recipe(tmp_path, {"path": str(folder)})
    assert "weights, float32" in sizes(await look(settings, None, collects=True), "reward-model")
    assert sizes(await look(settings, None, collects=False), "reward-model") == {}


def test_the_command_has_their_rows(folder: Path, tmp_path: Path, called: Callable[..., Ended]) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"extends: tiny-reverse\ntask: {{rewards: [{{type: reward-model, role: constraint, path: {folder}}}]}}\n"
    )
    machine = ("--gpus", "0", "--memory", "8GiB")
    said = called("plan", str(tmp_path / "mine.yaml"), *machine)
    assert (said.returncode, said.stderr) == (0, "")
    assert re.search(r"^reward-model +weights, float32 +0 MiB$", said.stdout, re.M), said.stdout
    learner = called("plan", str(tmp_path / "mine.yaml"), *machine, "--of", "learner")
    assert "reward-model" not in learner.stdout


def test_a_judge_takes_nothing_here(tmp_path: Path) -> None:
    judge = {"type": "judge", "url": "http://127.0.0.1:8000/v1", "model": "m"}
    without, having = (
        planned(recipe(tmp_path, *parts), other(8 * GIB, [])) for parts in ([{"type": "exact"}], [judge])
    )
    assert without.parts == having.parts
