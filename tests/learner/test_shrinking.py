"""A micro-batch that does not fit into memory: the budget is halved once, and the step is as if it had been smaller."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.config.objective import Objective
from asyncrl.config.recipe import Checkpoint, Collector, Eval, Learner, Recipe, Run
from asyncrl.learners import shrinking, step
from asyncrl.learners.batch import split_rows
from asyncrl.learners.model import load_model
from asyncrl.learners.optimize import Optimizer
from asyncrl.learners.recording import read_recording
from asyncrl.learners.replay import Compared, replay
from asyncrl.learners.service import learn
from asyncrl.learners.shares import share_of
from asyncrl.learners.shrinking import FILE, Budget, OutOfMemory, hopeless, is_out_of_memory
from asyncrl.learners.step import train_step
from asyncrl.schema import encode, to_batch
from asyncrl.telemetry.metrics import read_metrics
from asyncrl.telemetry.text import event_line

LIMIT_S = 240.0
RATE = 1e-2
KEEP = Checkpoint(every_steps=1, keep_last=10)
GPU = "CUDA out of memory. Tried to allocate 2.00 GiB."


@given(st.integers(1, 10**5), st.lists(st.integers(1, 10**4), min_size=1, max_size=30), st.booleans())
def test_half_of_a_budget_is_tried_once_and_only_if_micro_batches_get_smaller(
    configured: int, lengths: list[int], before: bool
) -> None:
    budget = configured // 2 if before else configured
    whole, half = (
        max(sum(lengths[row] for row in rows) for rows in split_rows(lengths, tokens))
        for tokens in (budget, budget // 2)
    )
    why = hopeless(configured, budget, whole, half)
    assert bool(why) == (before or half >= whole)


def test_errors_of_the_gpu_and_of_the_cpu_are_told_from_others() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError(GPU))
    assert is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.fixture
def groups(make_row: Callable[..., Any], make_group: Callable[..., Any]) -> list[Any]:
    generator = np.random.default_rng(1)
    groups = []
    for ticket in range(4):
        rows = []
        for member in range(4):
            n = int(generator.integers(4, 9))
            ids, logprobs = generator.integers(0, 24, n).tolist(), generator.normal(-3, 0.5, n).tolist()
            rows.append(make_row([1, 2, 3], ids, logprobs, reward=float(member % 2), member=member))
        groups.append(to_batch(make_group(rows, ticket=ticket)))
    return groups


@pytest.fixture
def run_out(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have the GPU, which tests lack, run out of memory in these passes of all, counted from 0."""

    def run_out(*numbers: int) -> None:
        predict, passes = step.token_predictions, itertools.count()

        def short(*arguments: Any, **options: Any) -> Any:
            predicted = predict(*arguments, **options)
            if next(passes) in numbers:
                raise torch.OutOfMemoryError(GPU)
            return predicted

        monkeypatch.setattr(step, "token_predictions", short)

    return run_out


def weights_after(
    model_path: Path, groups: list[Any], max_tokens: int | Budget, *, aggregation: Any = "token", parts: Any = None
) -> tuple[list[torch.Tensor], float]:
    """And the loss of the second of two steps."""
    recipe = Recipe(objective=Objective(preset="grpo", aggregation=aggregation))
    model = load_model(model_path, "float32", "auto")
    optimizer = Optimizer(model, Learner(learning_rate=RATE, warmup_steps=0))
    batch, worth = share_of(groups, version=1, recipe=recipe)
    options: Any = {"objective": recipe.objective, "temperature": 1.0, "max_tokens": max_tokens, "parts": parts}
    train_step(model, optimizer, batch, worth, **options)
    loss = train_step(model, optimizer, batch, worth, **options).seen.loss
    return [p.detach().clone() for p in model.parameters()], loss


def apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("parts", [None, [[0, 1], [2, 3]]])
@pytest.mark.parametrize("aggregation", ["token", "prompt"])
def test_a_step_that_ran_out_is_the_step_of_half_the_budget(
    model_path: Path, groups: list[Any], run_out: Any, aggregation: Any, parts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected, loss = weights_after(model_path, groups, 20, aggregation=aggregation, parts=parts)
    run_out(1)  # once there are gradients of the first pass
    budget = Budget.of(40)
    found, same = weights_after(model_path, groups, budget, aggregation=aggregation, parts=parts)
    assert budget.tokens == 20
    assert apart(found, expected) == 0.0
    assert same == loss
    assert [record.levelname for record in caplog.records if record.name == shrinking.__name__] == ["WARNING"]
    assert "learner.max_tokens_per_microbatch is 20 for the rest of the run, not 40" in caplog.text


def test_only_the_update_that_ran_out_is_made_again(model_path: Path, groups: list[Any], run_out: Any) -> None:
    parts = [[0, 1], [2, 3]]
    expected, loss = weights_after(model_path, groups, 20, parts=parts)
    run_out(3)  # of the second update: the first has made three
    found, same = weights_after(model_path, groups, Budget.of(40), parts=parts)
    assert apart(found, expected) < RATE / 100  # rounding, which Adam makes larger; an update too many is RATE
    assert same == pytest.approx(loss, abs=1e-6)


def test_gradients_of_passes_that_fitted_must_be_forgotten(
    model_path: Path, groups: list[Any], run_out: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: kept, they count twice."""
    expected, _ = weights_after(model_path, groups, 20)
    run_out(1)
    monkeypatch.setattr(shrinking, "forget_gradients", lambda _: None)
    found, _ = weights_after(model_path, groups, Budget.of(40))
    assert apart(found, expected) > 1e-3


def test_a_second_time_ends_the_run_and_names_the_keys(model_path: Path, groups: list[Any], run_out: Any) -> None:
    run_out(1, 4)
    with pytest.raises(OutOfMemory) as caught:
        weights_after(model_path, groups, Budget.of(40))
    for key in ("learner.max_tokens_per_microbatch", "learner.gradient_checkpointing", "model.lora"):
        assert key in str(caught.value)
    assert "is halved once, and was: 20 instead of 40" in str(caught.value)
    assert GPU in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3


def test_a_row_that_nothing_splits_ends_the_run_at_once(model_path: Path, groups: list[Any], run_out: Any) -> None:
    run_out(0)
    budget = Budget.of(6)  # shorter than the longest row, which goes alone
    with pytest.raises(OutOfMemory, match=r"Half of learner\.max_tokens_per_microbatch, 3, would leave it as large"):
        weights_after(model_path, groups, budget)
    assert budget.tokens == 6


def test_other_errors_pass(model_path: Path, groups: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(step, "token_predictions", broken)
    budget = Budget.of(40)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        weights_after(model_path, groups, budget)
    assert budget.tokens == 40


def test_the_smaller_budget_outlasts_the_process_until_the_recipe_says_another(
    tmp_path: Path, model_path: Path, groups: list[Any], run_out: Any
) -> None:
    run_out(1)
    weights_after(model_path, groups, Budget.of(40, tmp_path))
    assert json.loads((tmp_path / FILE).read_text()) == {"configured": 40, "tokens": 20}
    assert Budget.of(40, tmp_path) == Budget(40, 20, tmp_path)
    assert Budget.of(30, tmp_path) == Budget(30, 30, tmp_path)


@pytest.mark.asyncio
async def test_a_run_says_that_its_micro_batches_are_smaller_and_a_resumed_one_keeps_them(
    tmp_path: Path,
    model_path: Path,
    draw: Callable[..., Any],
    make_row: Callable[..., Any],
    make_group: Callable[..., Any],
    scripted: Any,
    run_out: Callable[..., None],
) -> None:
    recipe = Recipe(
        run=Run(name="short", max_steps=4),
        collector=Collector(group_size=4),
        learner=Learner(groups_per_step=3, max_tokens_per_microbatch=30, checkpoint=KEEP),
        objective=Objective(preset="grpo", entropy=0.01),  # so that every group has a gradient
        eval=Eval(at_start=False, at_end=False),
    )
    buffer = scripted.StoppingBuffer(recipe, at=2)
    collector = scripted.ScriptedCollector(buffer, model_path, sample=draw, make_row=make_row, make_group=make_group)
    options: Any = {"run_dir": tmp_path, "model_path": model_path}
    run_out(5)  # in the second step, which has four passes as the first has
    async with asyncio.timeout(LIMIT_S):
        collecting = asyncio.create_task(collector.run())
        await learn(recipe, buffer, **options, resume=None, stop=buffer.stop)
        await learn(recipe, buffer, **options, resume=tmp_path / "checkpoints", stop=asyncio.Event())
        await collecting
    records = read_metrics(tmp_path / "metrics.jsonl")
    steps = [record for record in records if "step" in record]
    assert [step["tokens_per_microbatch"] for step in steps] == [30, 15, 15, 15]
    events = [record for record in records if record.get("event") == "microbatch"]
    assert [(event["tokens_before"], event["tokens"], event["lineage"]) for event in events] == [
        (30, 15, 1),
        (30, 15, 2),
    ]
    assert events[0]["version"] == 2
    assert event_line(events[0]) == "out of memory: from step 2 on a micro-batch has up to 15 tokens, before 30"

    recording = read_recording(tmp_path, recipe)
    # A replay has the same budgets, and so the same bits. Control: with the recipe's it has others.
    for told, equal in ((recording, True), (replace(recording, budgets={}), False)):
        compared: list[Compared] = []
        replay(told, recipe, model_path, start=1, on_version=compared.append)
        assert len(compared) == 4
        assert all(one.checkpoint for one in compared) is equal


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_where_memory_is_really_short_the_step_is_that_of_half_the_budget(
    tmp_path: Path, make_row: Callable[..., Any], make_group: Callable[..., Any]
) -> None:
    """Under a limit of a process's address space. Control: without a `Budget` the same step fails there."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "groups").mkdir()
    generator = np.random.default_rng(0)
    for ticket in range(8):
        rows = []
        for member in range(16):
            ids = generator.integers(0, 64, 62).tolist()
            rows.append(make_row([ticket, member], ids, [-4.0] * 62, reward=float(member % 2), member=member))
        (tmp_path / "groups" / f"{ticket}.arrow").write_bytes(encode(make_group(rows, ticket=ticket)))
    script = str(Path(__file__).with_name("short_of_memory.py"))
    said = subprocess.check_output([sys.executable, script, str(tmp_path)], timeout=LIMIT_S)
    for told in json.loads(said).values():
        assert "DefaultCPUAllocator: can't allocate memory" in told["unguarded"]
        assert told["tokens"] == 4096
        assert told["apart"] < 1e-6
        assert told["losses"][0] == pytest.approx(told["losses"][1], abs=1e-6)
