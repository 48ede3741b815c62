"""What a verifier took for the answer goes with its verdict, from any kind of verifier to the score."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from asyncrl.config.rewards import Function
from asyncrl.rewards import function
from asyncrl.rewards.base import Finding
from asyncrl.rewards.function import FunctionPart
from asyncrl.rewards.parts import LONGEST_DETAIL, Verdict, joined, judge


def boxed(row: Any, answer: Any) -> Finding:
    return Finding({"boxed": 1.0}, read=answer.text[7:-1])


def test_a_function_says_what_it_read(monkeypatch) -> None:
    monkeypatch.setattr(function.importlib, "import_module", lambda name: SimpleNamespace(boxed=boxed))
    part = FunctionPart(Function(function="mine:boxed", name="right"))
    assert judge(part.verify({}, {"text": "\\boxed{12}"})) == Verdict({"right": 1.0}, read="12")


def test_the_first_of_several_verifiers_that_read_something_is_believed() -> None:
    silent, first, second = Verdict({"a": 1.0}), Verdict({"b": 1.0}, read="12"), Verdict({"c": 0.0}, "", "", "x", "13")
    assert (joined([silent, first, second]).read, joined([silent, second, first]).read) == ("12", "13")


def test_what_was_read_is_no_longer_than_a_detail() -> None:
    assert len(judge(Finding({"a": 1.0}, read="9" * 200_000)).read) == LONGEST_DETAIL
