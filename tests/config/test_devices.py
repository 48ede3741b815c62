"""Which GPUs ranks and engines compute on: what a recipe may say, what follows where it says nothing, what a process
sees then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncrl.config import devices
from asyncrl.config.devices import Placement, check_devices, collector_devices, visible, with_devices
from asyncrl.config.errors import RecipeError
from asyncrl.config.loading import load_recipe
from asyncrl.config.recipe import Recipe, SimulatedEngine, VllmEngine

Refusal = Callable[..., str]

PLAIN = load_recipe("tiny-reverse").recipe
ENGINES = {"vllm": VllmEngine, "simulated": SimulatedEngine}


def recipe(
    *,
    ranks: int = 1,
    engines: int = 1,
    learner: list[int] | None = None,
    collector: list[int] | None = None,
    **more: str,
) -> Recipe:
    engine = ENGINES[more.get("engine", "vllm")]()
    return replace(
        PLAIN,
        learner=replace(PLAIN.learner, ranks=ranks, devices=learner),
        collector=replace(PLAIN.collector, engines=engines, devices=collector, engine=engine),
        buffer=replace(PLAIN.buffer, url=more.get("url", "embedded")),
    )


def placed(of: Recipe, gpus: int, *, learns: bool = True, collects: bool = True) -> Placement:
    return devices.placed(of, gpus, ranks=of.learner.ranks if learns else 0, collects=collects)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learner: {devices: []}", ("learner.devices is []", "such as [0, 1]")),
        ("learner: {ranks: 2, devices: [1, 1]}", ("learner.devices is [1, 1]", "one GPU twice")),
        ("learner: {devices: [0, 1]}", ("learner.devices is [0, 1]", "learner.ranks 1", "make learner.ranks 2")),
        ("learner: {devices: [-1]}", ("learner.devices is [-1]", "such as [0, 1]")),
        (
            "collector: {engines: 3, devices: [0, 1]}",
            ("collector.devices is [0, 1]", "collector.engines 3", "make collector.engines 2"),
        ),
        ("collector: {devices: [0], engine: {type: simulated}}", ("collector.devices is [0]", "simulated")),
        (
            "{learner: {ranks: 2, devices: [0, 1]}, collector: {engines: 2, devices: [1, 2]}}",
            ("GPU 1 is in both", "the same single one"),
        ),
        (
            "collector: {engine: {type: vllm, tensor_parallel_size: 2}}",
            ("tensor_parallel_size is 2", "Use 1, and more"),
        ),
        (
            "collector: {engine: {type: vllm, extra_args: {tensor_parallel_size: 2}}}",
            ("Write it as collector.engine.tensor_parallel_size",),
        ),
        ("collector: {engine: {type: vllm, extra_args: {device_ids: [1]}}}", ("Write it as collector.devices",)),
    ],
)
def test_devices_that_cannot_be_meant_are_refused(refusal: Refusal, text: str, said: tuple[str, ...]) -> None:
    message = refusal(text)
    assert all(part in message for part in said), message


def test_both_sides_may_share_one_gpu_or_name_the_same_on_two_hosts() -> None:
    assert placed(recipe(learner=[0], collector=[0]), 1) == Placement((0,), (0,))
    both = recipe(ranks=2, engines=2, learner=[0, 1], collector=[0, 1], url="redis://a:6379/0")
    assert placed(both, 2, collects=False) == Placement((0, 1), ())
    assert placed(both, 2, learns=False) == Placement((), (0, 1))
    with pytest.raises(RecipeError, match="GPU 0 is in both"):
        placed(both, 2)


@pytest.mark.parametrize(
    ("ranks", "engines", "gpus", "expected"),
    [
        (1, 1, 0, Placement()),
        (2, 4, 0, Placement()),
        (1, 1, 1, Placement((0,), (0,))),
        (1, 2, 1, Placement((0,), (0, 0))),
        (1, 1, 2, Placement((0,), (1,))),
        (4, 4, 8, Placement((0, 1, 2, 3), (4, 5, 6, 7))),
        (2, 4, 4, Placement((0, 1), (2, 3, 2, 3))),
        (1, 4, 4, Placement((0,), (1, 2, 1, 2))),
    ],
)
def test_ranks_have_the_first_gpus_and_engines_the_rest(
    ranks: int, engines: int, gpus: int, expected: Placement
) -> None:
    assert placed(recipe(ranks=ranks, engines=engines), gpus) == expected


def test_one_side_that_is_named_leaves_the_rest_to_the_other() -> None:
    assert placed(recipe(ranks=2, collector=[0]), 4) == Placement((1, 2), (0,))
    assert placed(recipe(learner=[3], engines=3), 4) == Placement((3,), (0, 1, 2))


def test_an_engine_that_is_a_server_or_simulated_has_no_gpu_here() -> None:
    assert placed(recipe(engine="simulated"), 2) == Placement((0,), ())


def test_a_host_with_too_few_gpus_is_named_with_its_number() -> None:
    with pytest.raises(RecipeError, match=r"learner.devices is \[7\], but this machine has 1 GPU\."):
        placed(recipe(learner=[7]), 1)
    with pytest.raises(RecipeError, match=r"collector.devices is \[0\], but this machine has no GPU\."):
        placed(recipe(collector=[0]), 0)
    with pytest.raises(RecipeError, match=r"learner.ranks is 4, but this machine has 3 GPUs for them"):
        placed(recipe(ranks=4), 3)
    with pytest.raises(RecipeError, match=r"learner.ranks is 4, and this machine has 4 GPUs: none is left"):
        placed(recipe(ranks=4), 4)
    with pytest.raises(RecipeError, match=r"learner.ranks is 1, but this machine has no GPU for them"):
        placed(recipe(engines=2, collector=[0, 1]), 2)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 16))
def test_what_follows_could_have_been_written(ranks: int, engines: int, gpus: int) -> None:
    """A placement, named in a recipe, is that placement again, and loads the GPUs of one side evenly."""
    open_ = recipe(ranks=ranks, engines=engines)
    try:
        found = placed(open_, gpus)
    except RecipeError:
        assert gpus <= ranks
        return
    assert len(set(found.ranks)) == ranks
    assert len({found.engines.count(gpu) for gpu in found.engines}) == 1
    assert gpus == 1 or not set(found.engines) & set(found.ranks)
    named = with_devices(open_, found)
    whole = replace(named, collector=replace(named.collector, devices=collector_devices(found)))
    check_devices(whole)
    assert placed(whole, gpus) == found


def test_numbers_count_among_the_gpus_that_the_process_was_left() -> None:
    assert visible([2, 0], {"CUDA_VISIBLE_DEVICES": "4, 5,6"}) == "6,4"
    with pytest.raises(RecipeError, match=r"CUDA_VISIBLE_DEVICES=4,5, which has 2"):
        visible([2], {"CUDA_VISIBLE_DEVICES": "4,5"})


def test_a_process_and_its_children_are_given_their_gpus() -> None:
    code = (
        "import json, os, subprocess, sys\n"
        "from asyncrl.config.devices import use_only\n"
        "use_only(json.loads(sys.argv[1]))\n"
        "seen = 'import os; print(os.environ.get(\"CUDA_VISIBLE_DEVICES\"))'\n"
        "exec(seen)\n"
        "print(subprocess.check_output([sys.executable, '-c', seen], text=True))"
    )

    def seen(devices: list[int] | None, **given: str) -> list[str]:
        environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        arguments = [sys.executable, "-c", code, json.dumps(devices)]
        return subprocess.check_output(arguments, env={**environ, **given}, text=True, timeout=60).split()

    assert seen([1, 2]) == ["1,2", "1,2"]
    assert seen([1], CUDA_VISIBLE_DEVICES="4,5") == ["5", "5"]
    assert seen(None, CUDA_VISIBLE_DEVICES="4,5") == ["4,5", "4,5"]
    assert seen(None) == ["None", "None"]


def test_devices_are_each_hosts_own_and_no_part_of_what_a_run_is() -> None:
    from asyncrl.config.identity import HOST_LOCAL, recipe_hash

    assert recipe_hash(recipe(learner=[0], collector=[1])) == recipe_hash(recipe())
    assert "collector.devices" in HOST_LOCAL
