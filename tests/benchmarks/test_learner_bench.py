"""`bench learner`, in small: what the sides are given, what would be told, and what numbers come of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.benchmarks import (
    learner,
    learner_checkpoint,
    learner_memory,
    learner_packed,
    learner_shared,
    learner_trl,
)
from asyncrl.benchmarks.frame import Measured, Target
from asyncrl.benchmarks.learner_batch import answer_lengths, as_collected
from asyncrl.benchmarks.learner_checkpoint import found
from asyncrl.benchmarks.learner_trl import Agreement, Problem, agree, first_gradient, load, longest, trl_steps
from asyncrl.benchmarks.loss import Problem as Logits
from asyncrl.benchmarks.memory import MODELS, random_llama
from asyncrl.benchmarks.runs import RunError
from asyncrl.schema import pack

SMALL = Problem({**MODELS["132 K"], "hidden_size": 16, "intermediate_size": 32}, groups=2, mean=6)


def test_lengths_are_log_normal_and_cut_as_max_tokens_cuts_them() -> None:
    lengths = np.array(answer_lengths(100, 8, mean=48, longest=192, cv=1.0))
    assert lengths.shape == (100, 8)
    assert 0.85 < lengths.mean() / 48 < 1.05
    assert 0.7 < lengths.std() / lengths.mean() < 1.0
    assert (lengths.min() >= 1, lengths.max()) == (True, 192)
    assert (lengths == 192).mean() < 0.05


def test_rows_that_are_filled_up_have_the_same_gradient_and_more_tokens(tmp_path: Path) -> None:
    """What the control is: the same step, but for its padding. And some ratios are clipped, else both sides would agree
    whatever they do about it."""
    random_llama(tmp_path / "model", dict(SMALL.model))
    trainer, groups = load(tmp_path / "model", SMALL)
    most = longest(groups)
    rows, padded = as_collected(groups), as_collected(groups, padded_to=most)
    assert pack(rows).loss_mask.sum() == pack(padded).loss_mask.sum()
    assert len(pack(padded).token_ids) == 16 * (learner_trl.PROMPT + most) > 1.3 * len(pack(rows).token_ids)
    seen, _ = trainer.train(trainer.prepare(rows, version=0))
    assert 0 < seen.clipped.sum() < seen.tokens
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    first = first_gradient(trainer, rows)
    trainer.model.load_state_dict(weights)
    second = first_gradient(trainer, padded)
    assert first.keys() == {name for name, _ in trainer.model.named_parameters()}
    for name, gradient in first.items():
        torch.testing.assert_close(second[name], gradient, rtol=1e-4, atol=1e-7)
    assert agree(first, second).cosine > learner_trl.COSINE


def test_another_direction_or_length_of_the_gradient_would_be_told() -> None:
    ours = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([[2.0]])}
    turned = agree(ours, {"a": torch.tensor([0.9, 0.2]), "b": torch.tensor([[2.0]])})
    assert turned.cosine < learner_trl.COSINE
    longer = agree(ours, {name: 1.01 * tensor for name, tensor in ours.items()})
    assert longer.cosine == pytest.approx(1.0)
    assert longer.norms > learner_trl.NORM
    with pytest.raises(RunError, match=r"train different parameters: \['b'\]"):
        agree(ours, {"a": ours["a"]})


def test_the_number_of_threads_that_is_worse_counts() -> None:
    rows = [{"ratio": 3.0, "ratio_padded": 1.2}, {"ratio": 1.4, "ratio_padded": 1.6}]
    met = {target.name: target.met for target in learner_trl.targets(rows, Agreement(cosine=0.9999, norms=2e-3))}
    assert list(met.values()) == [False, True, False, False]
    assert all(target.met for target in learner_trl.targets(rows[:1], Agreement(cosine=1.0, norms=0.0)))


def test_a_side_of_trls_that_ends_is_quoted_with_its_last_words(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such trainer >&2; exit 3\n")
    python.chmod(0o755)
    with (
        trl_steps(python, tmp_path, {"rows": []}) as once,
        pytest.raises(RunError, match=r"(?s)TRL's side ended with code 3:.*no such trainer"),
    ):
        once(1)


def step(number: int, *, begins: float, ends: float, wait_s: float = 0.25, stalled: float = 0.0) -> dict[str, Any]:
    """The record of a step."""
    return {
        "step": number,
        "time": ends,
        "step_s": ends - begins,
        "wait_s": wait_s,
        "checkpoint/stall_s": stalled,
    }


def test_a_stall_is_what_lies_between_two_steps_with_a_checkpoint_between_them() -> None:
    steps = [
        step(1, begins=0.0, ends=9.0),  # not counted
        step(2, begins=9.0, ends=11.0),
        step(3, begins=11.5, ends=15.25, stalled=0.5),  # a checkpoint before it; its write is beside it
        step(4, begins=15.25, ends=17.5),
        step(5, begins=17.75, ends=21.0, wait_s=0.5, stalled=0.25),
        step(6, begins=21.0, ends=23.25),  # the last one's checkpoint is not counted
    ]
    of = found(steps, [{"checkpoint/save_s": 1.0}, {"checkpoint/save_s": 3.0}], every=2)
    assert (of.checkpoints, of.step, of.beside) == (2, 2.0, 3.125)
    assert (of.stall, of.own, of.save) == (0.375, 0.375, 2.0)


def test_waiting_for_a_write_must_miss_what_writing_beside_training_meets() -> None:
    beside, waited = learner_checkpoint.targets({"stall_share": 0.02}, {"stall_share": 0.2})
    assert (beside.met, waited.met) == (True, True)
    beside, waited = learner_checkpoint.targets({"stall_share": 0.06}, {"stall_share": 0.04})
    assert (beside.met, waited.met) == (False, False)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_real_runs_have_the_checkpoints_that_are_counted() -> None:
    said: list[str] = []
    measured = learner_checkpoint.compare(MODELS["132 K"], steps=5, say=said.append)
    assert [(row["way"], row["checkpoints"]) for row in measured.rows] == [
        ("beside training", 2),
        ("training waits", 2),
    ]
    for row in measured.rows:
        assert 1 < row["mb"] < 3
        assert min(row["step_s"], row["beside_s"], row["own_stall_s"], row["save_s"]) > 0
    assert len(said) == 2


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_blocks_need_less_memory_than_all_logits_at_once() -> None:
    measured = learner_memory.compare(Logits(2048, 8, vocabulary=20_000), say=lambda _: None)
    peaks = {row["side"]: row["gib"] for row in measured.rows}
    assert peaks["spread"] < 0.6 * min(peaks["plain"], peaks["at-once"])
    assert measured.targets[1].met


def test_all_parts_are_one_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [learner_packed, learner_shared, learner_trl, learner_memory, learner_checkpoint]
    for part in parts:
        one = Measured([{"part": part.__name__}], [Target(part.__name__, 1.0, 1.0, "higher")])
        monkeypatch.setattr(part, "measure", lambda one=one, **_: one)
    measured = learner.measure(quick=True, say=lambda _: None)
    assert [row["part"] for row in measured.rows] == [part.__name__ for part in parts]
    assert [target.name for target in measured.targets] == [part.__name__ for part in parts]
