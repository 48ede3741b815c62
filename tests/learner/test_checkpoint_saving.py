"""Checkpoints written beside training: what is on the disk is the step's state, however far training has gone since."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config.recipe import Learner, Lora, Model, Objective, Recipe
from asyncrl.learners import writing
from asyncrl.learners.checkpoint import CheckpointError, find_resumable, load, survey
from asyncrl.learners.lora import ADAPTER
from asyncrl.learners.model import load_tokenizer
from asyncrl.learners.saving import Failed, Saved, Saver
from asyncrl.learners.snapshot import Copies, Keep, Snapshot, live, state_of
from asyncrl.learners.trainer import Trainer
from asyncrl.learners.writing import write
from asyncrl.staleness import Weights

LIMIT_S = 60.0
RECIPE = Recipe(objective=Objective(preset="grpo"), learner=Learner(learning_rate=1e-2, warmup_steps=0))
ADAPTED = msgspec.structs.replace(RECIPE, model=Model(lora=Lora(r=4, alpha=8)))


class Training:
    """A learner reduced to what a checkpoint is made of: each step changes weights, moments, counters and random
    numbers, by gradients that are drawn."""

    def __init__(self, recipe: Recipe, model_path: Path) -> None:
        self.trainer = Trainer.load(recipe, model_path, None)
        self.version = 0
        self.generator = torch.Generator().manual_seed(1)

    def step(self) -> None:
        for parameter in self.trainer.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape, generator=self.generator)
        self.trainer.optimizer.step(1)
        torch.rand(3)
        self.version += 1

    def take(self, keep: Keep) -> Snapshot:
        optimizer, rng = self.trainer.resumable(keep)
        return Snapshot(
            weights=Weights(1, self.version),
            model=self.trainer.whole,
            state=state_of(self.trainer.whole, keep),
            optimizer=optimizer,
            rng=rng,
            forks={1: (0, 0)},
            trained=[(1, self.version - 1)],
            tokens=10 * self.version,
        )


class Gate:
    """Every write waits, before its first byte, until the gate is opened for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Semaphore(0), threading.Semaphore(0)
        save_model = writing.save_model

        def slowly(*arguments: Any) -> None:
            self.reached.release()
            assert self.opened.acquire(timeout=LIMIT_S)
            save_model(*arguments)

        monkeypatch.setattr(writing, "save_model", slowly)

    async def is_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.acquire, timeout=LIMIT_S)

    def open(self) -> None:
        self.opened.release()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    for _ in range(9):  # no thread is left behind by a test that failed
        gate.open()


@pytest.fixture
def saver(tmp_path: Path, model_path: Path) -> Callable[..., Any]:
    """A saver into `tmp_path`/saved, and lists of what it says: saved, failed."""

    def make(**options: Any) -> tuple[Saver, list[Saved], list[Failed]]:
        saved: list[Saved] = []
        failed: list[Failed] = []

        async def on_saved(one: Saved) -> None:
            saved.append(one)

        chosen = {"beside": True, "limit_s": LIMIT_S, "newest": None, "on_saved": on_saved, **options}
        made = Saver(tmp_path / "saved", tokenizer=load_tokenizer(model_path), on_failed=failed.append, **chosen)
        return made, saved, failed

    return make


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, whatever lies in dictionaries and lists."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def files(folder: Path) -> dict[str, bytes]:
    """What holds weights."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


async def written_while_training(
    recipe: Recipe, tmp_path: Path, model_path: Path, saver: Any, gate: Gate, *, keep: Keep | None = None
) -> bool:
    """Whether what is written of version 3, while versions 4 and 5 are made, is what was written of version 3 on the
    spot. keep: in place of the saver's own copies."""
    training = Training(recipe, model_path)
    for _ in range(3):
        training.step()
    torch.manual_seed(7)
    gate.open()
    expected = write(tmp_path / "expected", training.take(live), tokenizer=load_tokenizer(model_path))
    await gate.is_reached()
    one, saved, _ = saver()
    async with asyncio.timeout(LIMIT_S):
        await one.save(3, lambda own: training.take(keep or own))
        await gate.is_reached()
        training.step()
        training.step()
        assert saved == []
        gate.open()
        await one.settle()
    assert [done.snapshot.weights.version for done in saved] == [3]
    found, wanted = load(saved[0].path), load(expected)
    facts = ("lineage", "version", "forks", "trained", "tokens", "format")
    assert all(getattr(found.manifest, name) == getattr(wanted.manifest, name) for name in facts)
    return files(found.folder) == files(wanted.folder) and same(found.training_state(), wanted.training_state())


@pytest.mark.parametrize("recipe", [RECIPE, ADAPTED], ids=["whole", "adapter"])
@pytest.mark.asyncio
async def test_what_is_written_is_the_steps_state_although_training_goes_on(
    recipe: Recipe, tmp_path: Path, model_path: Path, saver: Any, gate: Gate
) -> None:
    assert await written_while_training(recipe, tmp_path, model_path, saver, gate)
    assert (tmp_path / "saved" / "version-000003" / ADAPTER).exists() == (recipe is ADAPTED)


@pytest.mark.asyncio
async def test_a_snapshot_that_copies_nothing_would_be_written_as_a_later_step(
    tmp_path: Path, model_path: Path, saver: Any, gate: Gate
) -> None:
    """Negative control: without copies the file has weights of version 5 under the name of version 3."""
    assert not await written_while_training(RECIPE, tmp_path, model_path, saver, gate, keep=live)


@pytest.mark.asyncio
async def test_the_next_one_waits_for_the_write_that_is_under_way_and_reuses_its_memory(
    model_path: Path, saver: Any, gate: Gate
) -> None:
    training = Training(RECIPE, model_path)
    one, saved, _ = saver()
    training.step()
    async with asyncio.timeout(LIMIT_S):
        await one.save(1, training.take)
        await gate.is_reached()
        first = {name: tensor.clone() for name, tensor in training.trainer.whole.state_dict().items()}
        training.step()
        taken: list[int] = []

        def take(keep: Keep) -> Snapshot:
            taken.append(training.version)
            return training.take(keep)

        second = asyncio.create_task(one.save(2, take))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not second.done()
        assert taken == []
        gate.open()
        await second
        assert [done.snapshot.weights.version for done in saved] == [1]
        await gate.is_reached()
        gate.open()
        await one.settle()
    assert [done.snapshot.weights.version for done in saved] == [1, 2]
    written = load_file(saved[0].path / "model.safetensors")
    assert same(written, {name: first[name] for name in written})
    kept, again = (done.snapshot.state for done in saved)
    assert {tensor.data_ptr() for tensor in kept.values()} == {tensor.data_ptr() for tensor in again.values()}
    assert one.take_stalled() > 0
    assert one.take_stalled() == 0


def test_only_what_training_changes_is_copied(model_path: Path) -> None:
    adapted = Training(ADAPTED, model_path)
    copies = Copies()
    snapshot = adapted.take(copies.keep)
    trained = [parameter for parameter in adapted.trainer.model.parameters() if parameter.requires_grad]
    adapted.step()
    snapshot = adapted.take(copies.keep)
    moments = sum(2 * parameter.nbytes + 4 for parameter in trained)  # and a count of steps for each
    assert copies.nbytes == sum(parameter.nbytes for parameter in trained) + moments
    live_state = adapted.trainer.whole.state_dict()
    for name, tensor in snapshot.state.items():
        assert (tensor.data_ptr() == live_state[name].data_ptr()) == ("lora_" not in name), name

    whole = Training(RECIPE, model_path).take(Copies().keep).state
    assert whole["lm_head.weight"] is whole["model.embed_tokens.weight"]  # tied: one tensor, copied once


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.asyncio
async def test_a_write_that_fails_leaves_the_old_one_and_the_next_that_is_due_tries_again(
    beside: bool, tmp_path: Path, model_path: Path, saver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(RECIPE, model_path)
    one, saved, failed = saver(beside=beside)

    async def step_and_save() -> None:
        training.step()
        await one.save(training.version, training.take)
        await one.settle()

    async with asyncio.timeout(LIMIT_S):
        await step_and_save()
        with monkeypatch.context() as broken:
            broken.setattr(torch, "save", full)
            for _ in range(4):
                await step_and_save()
            one.check()  # it goes on
            with pytest.raises(CheckpointError, match=r"version-000005.*No space left on device.* are free there"):
                await one.ensure(5, training.take)
        assert [load(done.path).weights.version for done in saved] == [1]
        assert [failure.count for failure in failed] == [1, 2, 3, 4, 5]
        assert str(failed[2]).startswith("no checkpoint of version 4 (3 in a row): cannot write checkpoint")
        assert [path.name for path in (tmp_path / "saved").iterdir()] == ["version-000001"]
        await one.ensure(5, training.take)
        await step_and_save()
    assert [done.snapshot.weights.version for done in saved] == [1, 5, 6]
    assert len(survey(tmp_path / "saved")[0]) == 3


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.asyncio
async def test_an_error_that_is_no_disks_is_not_taken_for_one(
    model_path: Path, saver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _, failed = saver()
    monkeypatch.setattr(torch, "save", lambda *_: [].pop())
    training = Training(RECIPE, model_path)
    async with asyncio.timeout(LIMIT_S):
        await one.save(0, training.take)
        with pytest.raises(IndexError):
            await one.settle()
    assert failed == []


@pytest.mark.asyncio
async def test_a_disk_that_does_not_answer_is_not_waited_for_without_a_limit(
    model_path: Path, saver: Any, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    one, saved, _ = saver(limit_s=0.05)
    training = Training(RECIPE, model_path)
    async with asyncio.timeout(LIMIT_S):
        await one.save(0, training.take)
        training.step()
        with pytest.raises(CheckpointError, match=r"version 0 is being written .* the disk does not answer"):
            await one.save(1, training.take)
        await one.close(give_up=False)
    assert "the checkpoint of version 0 is not written yet, and left unfinished" in caplog.text
    assert saved == []


@pytest.mark.asyncio
async def test_a_learner_that_was_replaced_leaves_the_folder_to_the_new_one(
    tmp_path: Path, model_path: Path, saver: Any, gate: Gate
) -> None:
    training = Training(RECIPE, model_path)
    one, saved, failed = saver()
    async with asyncio.timeout(LIMIT_S):
        await one.save(0, training.take)
        await gate.is_reached()
        closing = asyncio.create_task(one.close(give_up=True))
        await asyncio.sleep(0)
        gate.open()
        await closing
    assert (saved, failed) == ([], [])
    assert list((tmp_path / "saved").iterdir()) == []

    # One that does not know yet that it was replaced: its version is there already, of a newer lineage.
    gate.open()
    newer = replace(training.take(live), weights=Weights(2, 0))
    write(tmp_path / "saved", newer, tokenizer=load_tokenizer(model_path))
    gate.open()
    with pytest.raises(CheckpointError, match="another learner goes on from there"):
        write(tmp_path / "saved", training.take(live), tokenizer=load_tokenizer(model_path))
    found = find_resumable(tmp_path / "saved")
    assert found is not None
    assert found.weights == Weights(2, 0)


@pytest.mark.asyncio
async def test_what_follows_from_a_checkpoint_is_told_and_its_error_is_seen(model_path: Path, saver: Any) -> None:
    async def on_saved(_: Saved) -> None:
        raise RuntimeError("the store is not what it was")

    training = Training(RECIPE, model_path)
    one, _, failed = saver(on_saved=on_saved)
    async with asyncio.timeout(LIMIT_S):
        await one.save(0, training.take)
        with pytest.raises(RuntimeError, match="not what it was"):
            await one.settle()
    assert failed == []
