"""`asyncrl plan`, and the recipes for machines that run no tests: what they need, on paper."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.loading import packaged_recipes
from tests.commands import Ended

CONFIGS = Path(__file__).parents[2] / "configs"
FOR_GPUS = [name for name in packaged_recipes() if name.startswith("qwen")]
Called = Callable[..., Ended]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_PASSWORD", "x")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def machine_of(name: str) -> list[str]:
    """The options of the command `asyncrl plan` that the recipe's comment shows."""
    (found,) = re.findall(rf"^#\s+asyncrl plan {re.escape(name)} (.+)$", (CONFIGS / f"{name}.yaml").read_text(), re.M)
    return shlex.split(found, comments=True)


def lesser(options: list[str], *, of: str) -> list[str]:
    """The same machine with half of its GPUs, or with GPUs of half the size, or a sixteenth of its memory."""
    (count, size), memory = options[1].rsplit("x", 1) if "x" in options[1] else ("1", options[1]), options[3]
    less = {
        "count": (f"{int(count) // 2}x{size}", memory),
        "size": (f"{count}x{int(size.removesuffix('GiB')) // 2}GiB", memory),
        "memory": (f"{count}x{size}", f"{int(memory.removesuffix('GiB')) // 16}GiB"),
    }
    gpus, memory = less[of]
    return ["--gpus", gpus, "--memory", memory]


@pytest.mark.parametrize("name", FOR_GPUS)
def test_a_recipe_for_gpus_fits_the_machine_that_it_names_and_no_lesser_one(called: Called, name: str) -> None:
    options = machine_of(name)
    done = called("plan", name, *options)
    assert (done.returncode, done.stderr) == (0, "")
    for of in ("count", "size", "memory"):
        refused = called("plan", name, *lesser(options, of=of))
        assert refused.returncode == 2, (of, refused)
        assert refused.stderr.startswith("Error: "), refused.stderr


def test_every_recipe_for_gpus_says_what_it_needs_and_that_it_was_not_run() -> None:
    assert len(FOR_GPUS) == 3
    for name in FOR_GPUS:
        comment = (CONFIGS / f"{name}.yaml").read_text().split("\n", 5)
        assert "Not run here yet" in "".join(comment), name


@pytest.mark.slow
@pytest.mark.parametrize("name", FOR_GPUS)
def test_a_dry_run_of_a_recipe_for_gpus_needs_none_of_what_it_names(called: Called, name: str) -> None:
    nowhere = ("--set", "buffer.url=redis://127.0.0.1:1/0") if "2hosts" in name else ()
    done = called("run", name, "--dry-run", *nowhere)
    assert done.returncode == 0, done
    assert "not here: learner.devices is [0" in done.stderr
    assert bool(nowhere) == ("not here: store redis://127.0.0.1:1/0 is unreachable" in done.stderr)
    assert f"  path: Qwen/Qwen2.5-{'1.5B' if '1.5b' in name else '7B'}-Instruct" in done.stdout


def test_this_machine_is_planned_where_none_is_named(called: Called) -> None:
    done = called("plan")
    assert done.returncode == 0, done
    assert done.stdout.startswith("learner and collector, on a machine with ")
    assert "activations of 4096 tokens" in done.stdout


def test_one_side_is_planned_by_itself_and_both_where_the_store_is_elsewhere(called: Called) -> None:
    machine = ("--gpus", "80GiB", "--memory", "64GiB", "--set", "collector.engine.type=vllm")
    alone = called("plan", "tiny-reverse", *machine, "--of", "collector")
    assert (alone.returncode, alone.stdout.count("received weights")) == (0, 1)
    assert "AdamW" not in alone.stdout
    both = called("plan", "tiny-reverse", *machine, "--set", "buffer.url=redis://a:6379/0")
    assert [line for line in both.stdout.splitlines() if "on a machine" in line] == [
        "learner, on a machine with 1 GPU of 80.0 GiB and 64.0 GiB of memory",
        "collector, on a machine with 1 GPU of 80.0 GiB and 64.0 GiB of memory",
    ]


def test_more_of_what_the_recipe_is_set_to_takes_more(called: Called) -> None:
    machine = ("--gpus", "24GiB", "--memory", "256GiB")
    less = called("plan", "smollm2-uppercase", *machine, "--set", "learner.max_tokens_per_microbatch=1024")
    more = called("plan", "smollm2-uppercase", *machine, "--set", "model.path=Qwen/Qwen2.5-7B-Instruct")
    assert (less.returncode, more.returncode) == (0, 2)
    assert "GPU 0 at least, of 24.0 GiB. The largest part: 2 buffers of cuda-ipc (rank 0), 56.7 GiB" in more.stderr
    assert "What makes it less: weights.transport" in more.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "8x80GiB"], "give its memory too"),
        (["--gpus", "many"], "'many' is not a number of GPUs and their size"),
        (["--gpus", "8x80", "--memory", "1TiB"], "such as 4GiB"),
        (["--memory", "lots"], "such as 4GiB"),
        (["no-such-recipe"], "no-such-recipe"),
    ],
)
def test_a_machine_that_cannot_be_read_is_refused(called: Called, arguments: list[str], said: str) -> None:
    done = called("plan", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
