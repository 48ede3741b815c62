"""Answers as an evaluation keeps them, a small random model, and the command in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.rewards import Declared
from asyncrl.runtime.profile_report import Setting, report
from asyncrl.runtime.profile_verdict import verdict
from tests.commands import Ended

Entry = dict[str, Any]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It answers noise, of every length."""
    from tests.collector.real import save_model  # loads torch, which most tests here do without

    return save_model(tmp_path_factory.mktemp("profile") / "model")


@pytest.fixture
def cli(called: Callable[..., Ended]) -> Callable[..., Ended]:
    """In this process: importing torch again would take most of the time."""
    return called


@pytest.fixture
def entry() -> Callable[..., Entry]:
    """One scored answer, with what a test changes of it."""

    def make(row_id: str = "1", reward: float | None = 1.0, **changes: Any) -> Entry:
        made = {
            "task": "sums",
            "row_id": row_id,
            "sample": 0,
            "seed": 7,
            "version": 0,
            "prompt": "2 + 2 = ",
            "answer": "4",
            "expected": "4",
            "reward": reward,
            "parts": {"exact": reward},
            "failure": "" if reward is not None else "verifier_raised",
            "wrong": "",
            "detail": "",
            "finish_reason": "stop",
            "tokens": 2,
            "latency_s": 0.1,
            "verifier_s": 0.001,
        }
        return {**made, **changes}

    return make


@pytest.fixture
def setting() -> Callable[..., Setting]:
    def make(**changes: Any) -> Setting:
        plain: dict[str, Any] = {"group_size": 4, "groups_per_step": 2, "pass_above": 0.0, "seed": 0, "parts": {}}
        return Setting(**{**plain, **changes})

    return make


@pytest.fixture
def document(setting: Callable[..., Setting]) -> Callable[[list[Entry]], dict[str, Any]]:
    """A profile's document of these answers, as the command writes it."""

    def make(answers: list[Entry]) -> dict[str, Any]:
        found = report(answers, setting(parts={"sums": {"exact": Declared(1.0, "outcome")}}), seconds=2.0)
        return {
            "id": "bcdfgh",
            "target": "recipe sums, model small as it is",
            "model": "small",
            "task": "sums",
            "split": "train",
            "per_prompt": 2,
            "seed": 0,
            "sampling": {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "max_tokens": 8},
            "versions": {},
            "report": found,
            "verdict": verdict(found),
            "answers": answers,
        }

    return make
