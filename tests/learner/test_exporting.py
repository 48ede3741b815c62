"""What is exported of a run is, tensor by tensor, what the run announced and what its rows were sampled by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.loading import Loaded
from asyncrl.config.recipe import (
    Buffer,
    Checkpoint,
    Collector,
    Eval,
    Learner,
    Lora,
    Model,
    Objective,
    Recipe,
    Run,
    to_builtins,
)
from asyncrl.learners.exporting import Form
from asyncrl.learners.service import learn
from asyncrl.learners.writing import save
from asyncrl.runtime.export import ExportFailed, export, find_source
from asyncrl.runtime.folder import describe
from asyncrl.schema import Trajectory
from asyncrl.staleness import Weights

LIMIT_S = 60.0
STEPS = 3


def recipe_of(path: Path, *, lora: Lora | None, dtype: Any) -> Recipe:
    return Recipe(
        run=Run(name="exported", max_steps=STEPS),
        model=Model(path=str(path), lora=lora, dtype=dtype),
        buffer=Buffer(max_trajectory_age=0),
        collector=Collector(group_size=4),
        learner=Learner(
            groups_per_step=3, learning_rate=3e-2, warmup_steps=1, checkpoint=Checkpoint(every_steps=1, keep_last=9)
        ),
        objective=Objective(preset="grpo"),
        eval=Eval(at_start=False, at_end=False),
    )


@pytest.fixture
def trained(
    tmp_path: Path,
    model_path: Path,
    draw: Callable[..., Any],
    make_row: Callable[..., Any],
    make_group: Callable[..., Any],
    scripted: Any,
) -> Callable[..., Any]:
    """Train a run in its own folder; what it had announced at its end."""

    async def train(recipe: Recipe) -> tuple[Path, dict[str, Any]]:
        run = tmp_path / "run"
        run.mkdir()
        describe(run, Loaded(to_builtins(recipe), "test", [], recipe, names_preset=True))
        buffer = scripted.StoppingBuffer(recipe, at=99)

        def stamped(*sampled: Any, **named: Any) -> Trajectory:
            row = make_row(*sampled, **named)
            return replace(row, spans=tuple(replace(span, checksum=worker.checksum) for span in row.spans))

        worker = scripted.ScriptedCollector(buffer, model_path, sample=draw, make_row=stamped, make_group=make_group)
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            group.create_task(worker.run())
            group.create_task(learn(recipe, buffer, run_dir=run, model_path=model_path, resume=None, stop=buffer.stop))
        _, announced = await buffer.announcement()
        return run, announced

    return train


def exported(run: Path, form: Form, version: int | None = None) -> Any:
    source = find_source(str(run), version)
    return export(source, form, dtype=None, output=run.parent / f"{form}-{version}", on_phase=lambda _: None)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("lora", "dtype"),
    [(None, "float32"), (Lora(r=4, alpha=8.0), "bfloat16")],
)
async def test_the_last_version_has_the_checksum_that_was_announced(
    trained: Callable[..., Any], model_path: Path, lora: Lora | None, dtype: str
) -> None:
    run, announced = await trained(recipe_of(model_path, lora=lora, dtype=dtype))
    whole = exported(run, "hf").document
    assert (whole.lineage, whole.version, whole.dtype) == (1, STEPS, dtype)
    assert whole.manifest.served == announced["checksums"][f"1/{STEPS}"]
    assert len(set(announced["checksums"].values())) == len(announced["checksums"]) > 1, "each version has its own"
    if lora is not None:
        assert exported(run, "adapter").document.manifest.served == whole.manifest.checksum
        assert exported(run, "merged").document.manifest == whole.manifest


@pytest.mark.asyncio
async def test_a_version_that_rows_were_sampled_by_must_have_the_checksum_they_carry(
    trained: Callable[..., Any], model_path: Path
) -> None:
    run, announced = await trained(recipe_of(model_path, lora=None, dtype="float32"))
    done = exported(run, "hf", STEPS - 1)  # at age 0 the last step trained rows of the version before
    assert done.stamped
    assert "Rows that the run trained carry the same one" in (done.folder / "README.md").read_text()
    assert done.document.manifest.served == announced["checksums"][f"1/{STEPS - 1}"]
    assert not exported(run, "hf", STEPS).stamped
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / f"version-{STEPS - 1:06d}")
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    save(
        run / "checkpoints",
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(model_path),
        training={"optimizer": {}},
        weights=Weights(1, STEPS - 1),
        forks={1: (0, 0)},
        trained=[],
        tokens=0,
    )
    source = find_source(str(run), STEPS - 1)
    with pytest.raises(ExportFailed, match="were sampled by this version with"):
        export(source, "hf", dtype=None, output=run.parent / "other", on_phase=lambda _: None)
    assert not (run.parent / "other").exists()
    assert not export(source, "hf", dtype="bfloat16", output=run.parent / "other", on_phase=lambda _: None).stamped
