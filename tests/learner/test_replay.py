"""A recorded run, resumed once, trained again from its archive: equal bit for bit, and what was changed is named."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.recipe import Buffer, Checkpoint, Collector, Eval, Learner, Objective, Recipe, Run, SamplingConfig
from asyncrl.learners.checkpoint import load
from asyncrl.learners.model import load_tokenizer
from asyncrl.learners.recording import ReplayError, read_recording
from asyncrl.learners.replay import Compared, Replayed, replay
from asyncrl.learners.service import learn
from asyncrl.learners.trainer import Trainer
from asyncrl.staleness import Weights
from asyncrl.telemetry.metrics import read_metrics, surviving_steps

RECIPE = Recipe(
    run=Run(name="replayed", max_steps=6),
    buffer=Buffer(max_trajectory_age=1),
    objective=Objective(preset="grpo"),
    collector=Collector(group_size=4, sampling=SamplingConfig(max_tokens=4)),
    learner=Learner(
        groups_per_step=3,
        learning_rate=1e-2,
        max_tokens_per_microbatch=24,
        checkpoint=Checkpoint(every_steps=2, keep_last=10),
    ),
    eval=Eval(at_start=False, at_end=False),
)
SEVERAL = msgspec.structs.replace(RECIPE, learner=msgspec.structs.replace(RECIPE.learner, updates_per_step=2))
ASKING = msgspec.structs.replace(RECIPE, objective=Objective(preset="grpo", proximal="behaviour-version"))
FORK = 3  # where the learner stopped and a second one went on


@pytest.fixture(scope="module")
def record(
    model_path: Path,
    draw: Callable[..., Any],
    make_row: Callable[..., Any],
    make_group: Callable[..., Any],
    scripted: Any,
) -> Callable[[Path, Recipe, Recipe], None]:
    """A run of six steps in this folder, tokens of age 0 and 1, checkpoints of versions 2, 3 (lineage 1), 4, 6 (2);
    trained by the one recipe until `FORK`, resumed by the other."""

    def record(folder: Path, first: Recipe, second: Recipe) -> None:
        buffer = scripted.StoppingBuffer(first, at=FORK)
        worker = scripted.ScriptedCollector(
            buffer, model_path, sample=draw, make_row=make_row, make_group=make_group, lag=1
        )

        def stamped(*arguments: Any, **named: Any) -> Any:
            row = make_row(*arguments, **named)
            return replace(row, spans=tuple(replace(span, checksum=worker.checksum) for span in row.spans))

        worker.make_row = stamped

        async def together() -> None:
            async with asyncio.timeout(60):
                collecting = asyncio.create_task(worker.run())
                await learn(first, buffer, run_dir=folder, model_path=model_path, resume=None, stop=buffer.stop)
                await learn(
                    second,
                    buffer,
                    run_dir=folder,
                    model_path=model_path,
                    resume=folder / "checkpoints",
                    stop=asyncio.Event(),
                )
                await collecting

        asyncio.run(together())

    return record


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, record: Callable[[Path, Recipe, Recipe], None]) -> Path:
    """The folder of a run by `RECIPE`."""
    folder = tmp_path_factory.mktemp("recorded")
    record(folder, RECIPE, RECIPE)
    return folder


@pytest.fixture
def again(recorded: Path, model_path: Path, tmp_path: Path) -> Callable[..., tuple[list[Compared], Replayed]]:
    """Replay a copy of the run that `change` was applied to."""

    def run(
        change: Callable[[Path], None] = lambda folder: None, *, start: int = 0, recipe: Recipe = RECIPE
    ) -> tuple[list[Compared], Replayed]:
        folder = tmp_path / "run"
        shutil.copytree(recorded, folder)
        change(folder)
        seen: list[Compared] = []
        replayed = replay(read_recording(folder, recipe), recipe, model_path, start=start, on_version=seen.append)
        return seen, replayed

    return run


def part_of(folder: Path, lineage: int, step: int) -> Path:
    return folder / "archive" / f"step-{lineage:04d}-{step:06d}.parquet"


def rewrite(path: Path, name: str, change: Callable[[np.ndarray[Any, Any]], None]) -> None:
    """Change the values of a per-token column in place of the file."""
    table = pq.read_table(path)
    column = table[name].combine_chunks()
    values = column.values.to_numpy().copy()
    change(values)
    changed = pa.ListArray.from_arrays(column.offsets, pa.array(values)).cast(column.type)
    pq.write_table(table.set_column(table.schema.get_field_index(name), table.schema.field(name), changed), path)


def test_every_version_of_a_resumed_run_comes_out_bit_for_bit(again: Any) -> None:
    seen, replayed = again()
    assert [compared.version for compared in seen] == list(range(7))
    assert all(compared.equal for compared in seen if compared.equal is not None)
    assert [compared.version for compared in seen if compared.checkpoint] == [2, 3, 4, 6]
    assert all(compared.apart == 0.0 for compared in seen if compared.checkpoint)
    assert sum(bool(compared.stamps) for compared in seen) >= 3
    assert replayed.weights == Weights(2, 6)


def test_steps_of_several_updates_come_out_bit_for_bit_and_of_one_do_not(
    record: Callable[[Path, Recipe, Recipe], None], model_path: Path, tmp_path: Path
) -> None:
    record(tmp_path, SEVERAL, SEVERAL)
    seen: list[Compared] = []
    replay(read_recording(tmp_path, SEVERAL), SEVERAL, model_path, start=0, on_version=seen.append)
    assert [compared.version for compared in seen] == list(range(7))
    assert all(compared.equal for compared in seen if compared.equal is not None)
    assert [compared.version for compared in seen if compared.checkpoint] == [2, 3, 4, 6]

    # Negative control: the same groups, each step trained in one update.
    start_events(tmp_path, lambda event: event["settings"].update({"learner.updates_per_step": 1}))
    wrong: list[Compared] = []
    replay(read_recording(tmp_path, RECIPE), RECIPE, model_path, start=0, on_version=wrong.append)
    assert [compared.version for compared in wrong if compared.checkpoint is False] == [2, 3, 4, 6]


def test_a_resumed_run_may_make_another_number_of_updates_and_its_replay_names_the_key(
    record: Callable[[Path, Recipe, Recipe], None], tmp_path: Path
) -> None:
    record(tmp_path, RECIPE, SEVERAL)
    steps = surviving_steps(read_metrics(tmp_path / "metrics.jsonl"))
    assert [(step["updates"], step["updates_skipped"]) for step in steps] == [(1, 0)] * 3 + [(2, 0)] * 3
    state = load(tmp_path / "checkpoints" / "version-000006").training_state()["optimizer"]
    assert (state["updates"], state["steps"]) == (9, 6)
    with pytest.raises(ReplayError, match=r"lineage 2 had trained by it: learner.updates_per_step is 1, it was 2"):
        read_recording(tmp_path, RECIPE)


def test_a_run_that_asked_earlier_versions_comes_out_bit_for_bit_from_where_a_learner_started(
    record: Callable[[Path, Recipe, Recipe], None], model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, ASKING, ASKING)
    steps = surviving_steps(read_metrics(tmp_path / "metrics.jsonl"))
    # The second learner has none of the versions before the checkpoint it began with.
    assert [step["step"] for step in steps if step["proximal/behaviour_tokens"]] == [FORK + 1]
    assert all(step["proximal/bytes"] > 0 for step in steps)
    asked = [step for step in steps if step["step"] != FORK + 1]
    assert all(step["mismatch/max"] < 1e-5 for step in asked)
    assert any(abs(step["staleness/mean"] - 1) > 1e-3 for step in asked)

    def compared(start: int) -> list[Compared]:
        seen: list[Compared] = []
        replay(read_recording(tmp_path, ASKING), ASKING, model_path, start=start, on_version=seen.append)
        return seen

    for start in (0, FORK):
        assert [of.version for of in compared(start) if of.checkpoint] == [v for v in (2, 3, 4, 6) if v >= start]
    with pytest.raises(ReplayError, match=r"asked versions before it.*\n.*: 0, 3$"):
        compared(2)

    # Negative control: a replay that remembers what the second learner could not know makes other steps.
    monkeypatch.setattr(Trainer, "restart", lambda trainer, version: None)
    assert [of.version for of in compared(0) if of.checkpoint is False] == [4, 6]


def test_a_replay_can_start_from_a_checkpoint_when_older_parts_are_gone(again: Any) -> None:
    seen, _ = again(lambda folder: part_of(folder, 1, 0).unlink(), start=2)
    assert [compared.version for compared in seen] == [2, 3, 4, 5, 6]
    assert all(compared.equal is not False for compared in seen)
    assert seen[-1].checkpoint


def test_what_is_written_is_the_runs_own_last_checkpoint(again: Any, model_path: Path, tmp_path: Path) -> None:
    _, replayed = again()
    written = load(replayed.save(tmp_path / "out", tokenizer=load_tokenizer(model_path)))
    own = load(tmp_path / "run" / "checkpoints" / "version-000006")
    assert written.weights == own.weights
    assert (written.manifest.forks, written.manifest.tokens) == (own.manifest.forks, own.manifest.tokens)
    models = [AutoModelForCausalLM.from_pretrained(checkpoint.folder).state_dict() for checkpoint in (written, own)]
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())
    moments = [checkpoint.training_state()["optimizer"]["adam"]["state"] for checkpoint in (written, own)]
    assert all(torch.equal(value, moments[1][n][name]) for n, of in moments[0].items() for name, value in of.items())


@pytest.mark.parametrize(("column", "step"), [("logprobs", (1, 1)), ("token_ids", (2, 4))])
def test_one_changed_bit_of_one_token_is_seen_at_the_next_version(
    again: Any, recorded: Path, column: str, step: tuple[int, int]
) -> None:
    """Negative control: the comparison must be able to fail, and where it fails first must be right."""

    def flip(values: np.ndarray[Any, Any]) -> None:
        sampled = pq.read_table(part_of(recorded, *step))["loss_mask"].combine_chunks().values.to_numpy() == 1
        at = int(np.flatnonzero(sampled)[5])
        values.view(np.uint32)[at] ^= 1 << (16 if column == "logprobs" else 0)

    seen, _ = again(lambda folder: rewrite(part_of(folder, *step), column, flip))
    before = [compared.equal for compared in seen if compared.version <= step[1]]
    after = [compared for compared in seen if compared.version > step[1] and compared.equal is not None]
    assert False not in before
    assert after
    assert not any(compared.equal for compared in after)
    assert all(compared.apart for compared in after if compared.checkpoint is False)


def test_groups_in_another_order_are_another_step(again: Any) -> None:
    """Negative control: the order of a batch decides the order of sums."""

    def reverse(folder: Path) -> None:
        path = part_of(folder, 1, 0)
        table = pq.read_table(path)
        tickets = list(dict.fromkeys(table["ticket"].to_pylist()))[::-1]
        parts = [table.filter(pa.compute.equal(table["ticket"], ticket)) for ticket in tickets]
        pq.write_table(pa.concat_tables(parts), path)

    seen, _ = again(reverse)
    assert False in [compared.equal for compared in seen]


def test_other_initial_weights_are_named_before_anything_is_trained(
    again: Any, model_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(ReplayError, match="gives other weights than those the run began with"):
        replay(
            read_recording(again()[1].recording.folder, RECIPE),
            RECIPE,
            tmp_path / "run" / "checkpoints" / "version-000002",
            start=0,
            on_version=lambda compared: None,
        )


def start_events(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record.get("event") == "start":
            change(record)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize(
    ("change", "start", "message"),
    [
        (
            lambda folder: part_of(folder, 1, 1).unlink(),
            0,
            "no part of lineage 1 step 1; --from 2 replays from the checkpoint after it",
        ),
        (lambda folder: part_of(folder, 2, 5).unlink(), 0, "no part of lineage 2 step 5$"),
        (lambda folder: None, 5, r"no checkpoint of version 5 to start from; it has: 2, 3, 4, 6"),
        (lambda folder: None, 6, "has trained no step from version 6 on"),
        (lambda folder: (folder / "metrics.jsonl").unlink(), 0, "tells of no learner's start"),
        (lambda folder: start_events(folder, lambda record: record.pop("settings")), 0, "an older asyncrl wrote it"),
        (
            lambda folder: rewrite(part_of(folder, 1, 0), "loss_mask", lambda values: values.fill(1)),
            0,
            "step-0001-000000.parquet: ",
        ),
    ],
)
def test_what_cannot_be_replayed_is_named(again: Any, change: Any, start: int, message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        again(change, start=start)


def test_a_recipe_that_was_changed_afterwards_is_named_key_by_key(again: Any) -> None:
    learner = msgspec.structs.replace(RECIPE.learner, learning_rate=2e-2)
    with pytest.raises(ReplayError, match=r"changed after lineage 1 .*: learner.learning_rate is 0.02, it was 0.01"):
        again(recipe=msgspec.structs.replace(RECIPE, learner=learner))


def test_what_does_not_decide_a_steps_bits_may_differ(again: Any) -> None:
    learner = msgspec.structs.replace(RECIPE.learner, groups_per_step=9, checkpoint=Checkpoint(every_steps=1))
    run = msgspec.structs.replace(RECIPE.run, max_steps=600)
    seen, _ = again(recipe=msgspec.structs.replace(RECIPE, learner=learner, run=run))
    assert seen[-1].checkpoint


def test_another_torch_and_several_ranks_are_noted(again: Any) -> None:
    def change(record: dict[str, Any]) -> None:
        record["machine"] |= {"torch": "1.0", "ranks": 2} if record["lineage"] == 2 else {}

    notes = again(lambda folder: start_events(folder, change))[1].recording.notes
    assert notes[0] == "run.deterministic was false: the same bits are not promised"
    assert notes[1].startswith("lineage 2 was trained by another machine (ranks 2, here 1, torch 1.0, here ")
    assert len(notes) == 2
