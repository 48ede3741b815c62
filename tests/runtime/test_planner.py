"""What a run takes of the memory there is, by plan: sums by hand, what is refused, what is warned of, what passes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.devices import Placement
from asyncrl.config.errors import RecipeError
from asyncrl.config.loading import load_recipe
from asyncrl.config.recipe import Recipe
from asyncrl.learners.shapes import Shapes, of_config, shapes_of
from asyncrl.learners.tiny_tokenizer import build_tokenizer
from asyncrl.runtime import room
from asyncrl.runtime.planner import DoesNotFit, Plan, plan
from asyncrl.runtime.room import Machine, Room, host

GIB = 1 << 30
ROOT = Path(__file__).parents[2]
RECIPES = [
    *(path for path in sorted((ROOT / "configs").glob("*.yaml")) if not path.stem.startswith("qwen")),
    *sorted((ROOT / "examples").glob("*/r*.yaml")),
]
"""Those for a machine without a GPU; `tests/cli/test_plan.py` has the others."""

LARGE = of_config(
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
"""Llama 3 8B: 8,030,261,248 parameters."""


def recipe(**sections: dict[str, Any]) -> Recipe:
    return load_recipe("tiny-reverse", sections=sections).recipe


def machine(gib: float, *, shared: float | None = None, gpus: tuple[float, ...] = (), free: float = 1.0) -> Machine:
    def some(size: float) -> Room:
        return Room(int(size * GIB), int(size * free * GIB))

    return Machine(some(gib), some(gib if shared is None else shared), tuple(some(size) for size in gpus))


def shapes(path: str = "builtin:smollm2-135m") -> Shapes:
    found = shapes_of(path, None)
    assert not isinstance(found, str)
    return found


def sizes(planned: Plan) -> dict[tuple[str, str], int]:
    """Bytes of what is certain, by place and name, of all alike."""
    return {(part.where, part.what): part.span()[1] for part in planned.parts if part.certain}


def test_what_is_certain_is_the_sum_by_hand() -> None:
    p = 134_515_008
    planned = plan(recipe(model={"dtype": "bfloat16"}), shapes(), machine(64), collects=True)
    assert sizes(planned) == {
        ("learner", "weights, float32"): 4 * p,
        ("learner", "gradients"): 4 * p,
        ("learner", "AdamW's moments"): 8 * p,
        ("learner", "a checkpoint's snapshot"): 12 * p,
        ("shared memory", "versions of the weights"): 2 * 2 * p,
    }


def test_an_adapter_is_what_is_trained_and_may_be_what_travels() -> None:
    base, adapter = 134_515_008, 4_884_480  # r = 16, as docs/lora.md says
    lora = {"path": "builtin:smollm2-135m", "lora": {"r": 16}}
    merged = sizes(plan(recipe(model=lora), shapes(), machine(64), collects=True))
    alone = sizes(plan(recipe(model=lora, weights={"lora": "adapter"}), shapes(), machine(64), collects=True))
    assert merged["learner", "weights, float32"] == 4 * (base + adapter)
    assert merged["learner", "AdamW's moments"] == 8 * adapter
    assert merged["shared memory", "versions of the weights"] == 2 * 4 * base
    assert alone["shared memory", "versions of the weights"] == 2 * 4 * adapter
    assert alone["engine", "base, float32"] == 4 * base


def test_ranks_share_all_but_the_copy_that_is_whole() -> None:
    found = sizes(plan(recipe(learner={"ranks": 2}), shapes(), machine(64), collects=False))
    assert found["each rank", "gradients"] == 4 * 134_515_008
    assert found["rank 0", "whole weights"] == 4 * 134_515_008
    assert found["rank 0", "a checkpoint's snapshot"] == 12 * 134_515_008


def test_a_checkpoint_that_training_waits_for_needs_no_snapshot() -> None:
    adapter = {"path": "builtin:smollm2-135m", "lora": {"r": 16}}
    found = sizes(plan(recipe(model=adapter), shapes(), machine(64), collects=False))
    assert found["learner", "a checkpoint's snapshot"] == 12 * 4_884_480
    waits = sizes(plan(recipe(learner={"checkpoint": {"async_save": False}}), shapes(), machine(64), collects=False))
    assert ("learner", "a checkpoint's snapshot") not in waits


def test_kept_versions_and_a_reference_are_counted() -> None:
    planned = plan(
        recipe(
            model={"dtype": "bfloat16"},
            buffer={"max_trajectory_age": 4},
            objective={"preset": "async", "proximal": "behaviour-version", "beta": 1e-3},
        ),
        shapes(),
        machine(64),
        collects=False,
    )
    spans = {part.what: part.span() for part in planned.parts}
    assert spans["newest version, kept"] == (2 * 134_515_008,) * 2
    assert spans["older versions"] == (0, 4 * 2 * 134_515_008)
    assert spans["reference"] == (4 * 134_515_008,) * 2


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_recipe_that_comes_with_it_is_refused_on_four_gibibytes(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "heldout.jsonl"):  # what the examples' own scripts write
        Path(name).touch()
    for folder in re.findall(r"path: (\./\S+)", path.read_text()):
        Path(folder).mkdir(parents=True)
    assert plan(load_recipe(str(path)).recipe, shapes("builtin:tiny"), machine(3.8), collects=True).check() == ""
    # Those that continue a larger model, too: without the snapshot, which takes 1.5 GiB of it.
    settings = load_recipe(str(path), overrides=["learner.checkpoint.async_save=false"]).recipe
    plan(settings, shapes("builtin:smollm2-135m"), machine(3.8), collects=True).check()


def test_what_cannot_fit_is_refused_with_its_largest_part_and_what_lowers_it() -> None:
    planned = plan(recipe(), LARGE, machine(64), collects=True)
    with pytest.raises(DoesNotFit) as refused:
        planned.check()
    lines = str(refused.value).splitlines()
    assert len(lines) == 2
    assert "269.2 GiB of the machine's memory at least, of 64.0 GiB" in lines[0]
    assert "a checkpoint's snapshot (learner), 89.7 GiB" in lines[0]
    assert "learner.checkpoint.async_save, model.lora" in lines[1]


def test_estimates_alone_refuse_nothing_and_warn() -> None:
    long = recipe(learner={"max_tokens_per_microbatch": 1_000_000, "groups_per_step": 4096})
    planned = plan(long, shapes(), machine(8), collects=True)
    assert planned.needs[0].most > 100 * GIB
    assert planned.check().startswith("warning: the machine's memory may run out: ")


def test_memory_that_others_hold_is_warned_of_and_not_refused() -> None:
    assert plan(recipe(), shapes(), machine(64, free=0.01), collects=True).check().count("warning: ") == 2
    assert plan(recipe(), shapes(), machine(64), collects=True).check() == ""


def test_shared_memory_must_hold_two_versions() -> None:
    with pytest.raises(DoesNotFit, match=r"1\.0 GiB of /dev/shm at least, of 64 MiB.*\n.*model\.dtype"):
        plan(recipe(), shapes(), machine(64, shared=1 / 16), collects=True).check()


def test_an_engine_and_a_learner_share_one_gpu() -> None:
    def of(share: float) -> Plan:
        engine = {"type": "vllm", "gpu_memory_utilization": share}
        settings = recipe(model={"dtype": "bfloat16"}, collector={"engine": engine})
        return plan(settings, LARGE, machine(512, gpus=(141,)), collects=True)

    with pytest.raises(DoesNotFit, match=r"of GPU 0 at least, of 141\.0 GiB.*0\.9 of the GPU \(vLLM engine\)"):
        of(0.9).check()
    with pytest.raises(DoesNotFit, match=r"15\.1 GiB of what a vLLM engine takes of its GPU at least, of 14\.1 GiB"):
        of(0.1).check()
    of(0.12).check()


def test_ranks_have_a_gpu_each() -> None:
    planned = plan(
        recipe(model={"dtype": "bfloat16"}, learner={"ranks": 8}), LARGE, machine(512, gpus=(80,) * 8), collects=False
    )
    planned.check()
    gpu = next(need for need in planned.needs if need.name.startswith("each of GPUs 0, 1, 2"))
    assert gpu.certain == pytest.approx(16 * 8_030_261_248 / 8, rel=1e-6)


def test_each_gpu_has_what_is_placed_on_it() -> None:
    settings = recipe(
        model={"dtype": "bfloat16"},
        learner={"ranks": 2, "devices": [2, 3]},
        collector={"engines": 4, "devices": [0, 1], "engine": {"type": "vllm", "gpu_memory_utilization": 0.4}},
    )
    planned = plan(settings, LARGE, machine(512, gpus=(80, 80, 141, 141)), collects=True)
    found = {need.name: (need.certain / GIB, need.room.total // GIB) for need in planned.needs}
    assert found["each of GPUs 0, 1"] == (pytest.approx(2 * 0.4 * 80), 80)
    assert found["each of GPUs 2, 3"] == (pytest.approx(16 * 8_030_261_248 / 2 / GIB), 141)
    assert "each of GPUs 2, 3" in next(line for line in planned.table().splitlines() if "AdamW" in line)
    with pytest.raises(RecipeError, match="this machine has 3 GPUs"):
        plan(settings, LARGE, machine(512, gpus=(80, 80, 141)), collects=True)


def test_ranks_on_other_hosts_take_nothing_here() -> None:
    settings = recipe(learner={"ranks": 4}, model={"dtype": "bfloat16"})
    two, four = (
        plan(settings, LARGE, machine(512, gpus=(80,) * 4), collects=False, neighbours=here) for here in (2, None)
    )
    assert two.placement.ranks == (0, 1)
    assert four.placement.ranks == (0, 1, 2, 3)
    share = sizes(two)["each rank", "gradients"]
    assert sizes(four)["each rank", "gradients"] == 2 * share


def test_a_collector_alone_has_the_weights_it_received_and_its_engines() -> None:
    settings = recipe(collector={"engine": {"type": "vllm"}}, buffer={"url": "redis://a:6379/0"})
    planned = plan(settings, LARGE, machine(64, gpus=(80,)), collects=True, neighbours=0)
    assert planned.placement == Placement((), (0,))
    assert sizes(planned) == {
        ("collector", "received weights"): 4 * 8_030_261_248,
        ("shared memory", "copy for vLLM"): 4 * 8_030_261_248,
        ("vLLM engine", "0.9 of the GPU"): int(0.9 * 80 * GIB),
    }


def test_an_engine_that_takes_weights_on_the_learners_gpu_makes_it_keep_two_versions_there() -> None:
    def buffers(transport: str, gpus: int) -> int:
        settings = recipe(model={"dtype": "bfloat16"}, weights={"transport": transport})
        found = sizes(plan(settings, shapes(), machine(64, gpus=(80,) * gpus), collects=True))
        return found.get(("rank 0", "2 buffers of cuda-ipc"), 0)

    assert buffers("auto", 1) == buffers("cuda-ipc", 1) == 2 * 2 * 134_515_008
    assert buffers("shm", 1) == buffers("auto", 2) == 0


def test_what_is_estimated_refuses_a_machine_that_is_yet_to_be_had() -> None:
    long = recipe(learner={"max_tokens_per_microbatch": 1_000_000, "groups_per_step": 4096})
    planned = plan(long, shapes(), machine(8), collects=True)
    assert planned.check().startswith("warning: ")
    with pytest.raises(DoesNotFit, match=r"by estimate, of 8\.0 GiB. The largest part: activations of 1000000 tokens"):
        planned.check(by_estimate=True)


def test_servers_and_simulated_engines_take_nothing_here() -> None:
    for engine in ({"type": "simulated"}, {"type": "vllm-server", "url": "http://127.0.0.1:8000"}):
        planned = plan(recipe(collector={"engine": engine}), shapes(), machine(64), collects=True)
        assert {part.where for part in planned.parts} == {"learner", "shared memory"}


def test_a_model_that_is_not_known_is_never_refused() -> None:
    planned = plan(recipe(), "config.json has no hidden_size", machine(0.001), collects=True)
    assert planned.check() == ""
    assert planned.line() == "memory: not planned, config.json has no hidden_size"


def test_a_control_group_is_the_limit_and_so_is_one_above_it(tmp_path: Path) -> None:
    own, group = tmp_path / "own", tmp_path / "cgroup"
    (group / "pod" / "job").mkdir(parents=True)
    own.write_text("0::/pod/job\n")
    (group / "pod" / "job" / "memory.max").write_text("max\n")
    unlimited = host(group, own)
    (group / "pod" / "memory.max").write_text(f"{1 << 20}\n")
    limited = host(group, own)
    assert unlimited.total - limited.total > 1 << 20
    assert limited.free == 1 << 20
    (group / "memory").mkdir()
    (group / "memory" / "memory.limit_in_bytes").write_text(f"{1 << 19}\n")
    own.write_text("5:memory:/\n0::/\n")  # version 1
    assert host(group, own).free == 1 << 19


@pytest.mark.asyncio
async def test_this_machine_has_memory() -> None:
    there = await room.machine()
    assert there.host.total >= there.host.free > 0


@pytest.mark.slow
@pytest.mark.asyncio
async def test_torch_says_what_each_gpu_has() -> None:
    found = await room.gpus()
    assert len(found) == torch.cuda.device_count()  # 0 on most machines that run this
    assert all(gpu.total >= gpu.free > 0 for gpu in found)


def test_what_cannot_fit_ends_before_anything_starts_and_a_dry_run_says_so(tmp_path: Path, called) -> None:
    model = tmp_path / "model"
    build_tokenizer(512).save_pretrained(model)
    config = {"hidden_size": 1 << 20, "intermediate_size": 1 << 22, "num_hidden_layers": 1000}
    heads = {"num_attention_heads": 1 << 13, "vocab_size": 1 << 17}
    (model / "config.json").write_text(json.dumps({"model_type": "llama", **config, **heads}))
    (model / "model.safetensors").write_bytes(b"never read")
    done = called("run", "--set", f"model.path={model}")
    assert done.returncode == 2, done
    assert done.stderr.startswith("Error: this run does not fit: it needs "), done.stderr
    assert "model.lora" in done.stderr
    assert len(done.stderr.splitlines()) == 2
    dry = called("run", "--set", f"model.path={model}", "--dry-run")
    assert dry.returncode == 0, dry
    assert dry.stderr == done.stderr.replace("Error: ", "not here: ")
    assert "# learner" in dry.stdout
    assert not (tmp_path / "runs").exists()
