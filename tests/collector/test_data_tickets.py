"""Tickets for rows of files: one that cannot be used fails its own, by reason, and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.collectors.rollout import PromptError, TaskPrompts
from asyncrl.config.recipe import DataSource, SingleTurnTask
from asyncrl.data import examined
from asyncrl.learners.tiny_tokenizer import build_tokenizer
from asyncrl.tasks.prompt_length import PromptLimit
from asyncrl.tasks.single_turn import SingleTurn
from asyncrl.tasks.training import train_rows


def prompts_of(config: SingleTurnTask) -> TaskPrompts:
    tokenizer = build_tokenizer(64)
    task = SingleTurn(config)
    return TaskPrompts(
        task,
        PromptLimit.of(tokenizer, own=64, given=None),
        train_row=train_rows(task, config, seed=3),
        stop_token_ids=(tokenizer.eos_token_id,),
    )


def test_a_row_that_was_not_looked_at_before_fails_its_ticket_by_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examined, "ALL_ROWS", 20)
    monkeypatch.setattr(examined, "FIRST_ROWS", 10)
    rows: list[dict[str, str | None]] = [{"prompt": f"{n}", "answer": "1"} for n in range(40)]
    rows[30:33] = [{"prompt": None, "answer": "1"}, {"prompt": "30"}, {"prompt": "9" * 500, "answer": "1"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSource(train=str(tmp_path / "a.jsonl"), bad_rows="skip")
    prompts = prompts_of(SingleTurnTask(data=data))
    failed, asked = [], []
    for ordinal in range(2 * len(SingleTurn(SingleTurnTask(data=data)).rows("train"))):
        try:
            asked.append(prompts.train(ordinal).row.id)
        except PromptError as error:
            failed.append((error.reason, str(error)))
    assert sorted(reason for reason, _ in failed) == [
        *["prompt_too_long"] * 2,
        *["row_error/missing-column"] * 2,
        *["row_error/null"] * 2,
    ]
    assert all("a.jsonl:3" in message for _, message in failed)
    assert all(asked.count(row) == 2 for row in asked)


def test_every_epoch_has_every_row_once_in_an_order_of_its_own_also_from_the_middle(tmp_path: Path) -> None:
    """A collector that starts anew, or beside others, asks the same rows at the same ordinals."""
    (tmp_path / "a.jsonl").write_text("".join(f'{{"prompt": "q{n}", "answer": "1"}}\n' for n in range(10)))
    (tmp_path / "b.jsonl").write_text('{"prompt": "h", "answer": "1"}\n')
    config = SingleTurnTask(data=DataSource(train=str(tmp_path / "a.jsonl"), heldout=str(tmp_path / "b.jsonl")))
    asked = [prompts_of(config).train(ordinal).row.id for ordinal in range(30)]
    again = prompts_of(config)
    assert [again.train(ordinal).row.id for ordinal in range(17, 30)] == asked[17:]
    epochs = [tuple(asked[n : n + 10]) for n in (0, 10, 20)]
    assert len({*epochs}) == 3
    assert all(sorted(epoch) == sorted(epochs[0]) and len({*epoch}) == 10 for epoch in epochs)
