"""`bench engines`, in small: both sides sample what was asked for, and a mismatch would be told."""

from __future__ import annotations

import importlib.util
import re

import pytest

from asyncrl.benchmarks import engines, engines_mismatch, engines_speed, engines_vllm
from asyncrl.benchmarks.frame import Measured, Target
from asyncrl.config.recipe import TransformersEngine
from asyncrl.learners.tiny import ensure_tiny


@pytest.mark.slow
def test_both_sides_sample_the_tokens_that_are_wanted() -> None:
    said: list[str] = []
    row = engines_speed.compared(ensure_tiny(0), "small", [1, 7, 3] * 12, turns=1, say=said.append)
    assert (row["prompts"], row["tokens"]) == (36, 132)
    assert min(row["engine_tokens_s"], row["generate_tokens_s"], row["ratio"]) > 0
    assert re.fullmatch(r"speed, small lengths: engine \d+ tokens/s, generate\(\) \d+", *said)


@pytest.mark.slow
@pytest.mark.parametrize("warmer", [1.0, engines_mismatch.OTHER])
def test_the_engine_agrees_with_the_learner_and_at_another_temperature_it_does_not(warmer: float) -> None:
    row = engines_mismatch.mismatch(
        ensure_tiny(0), TransformersEngine(slots=8), "float32", prompts=8, say=lambda _: None, warmer=warmer
    )
    assert row["tokens"] == 8 * engines_mismatch.TOKENS
    assert (row["largest"] <= engines_mismatch.TARGET) == (warmer == 1.0)


def test_lengths_have_the_mean_and_spread_that_are_said() -> None:
    lengths = engines_speed.lengths(engines_speed.CV)
    assert len(lengths) == engines_speed.PROMPTS
    mean = sum(lengths) / len(lengths)
    deviation = (sum((n - mean) ** 2 for n in lengths) / len(lengths)) ** 0.5
    assert 0.9 < mean / engines_speed.MEAN_TOKENS < 1.1
    assert 0.8 < deviation / mean < 1.2
    assert set(engines_speed.lengths(0.0)) == {engines_speed.MEAN_TOKENS}


def test_without_vllm_nothing_of_it_is_measured_and_no_target_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said: list[str] = []
    measured = engines_vllm.measure(quick=True, say=said.append)
    assert [row["kind"] for row in measured.rows] == ["not run"]
    assert "vLLM is not installed" in measured.rows[0]["why"]
    assert said == ["vllm: not run, vLLM is not installed"]
    assert not any(target.met for target in measured.targets)


def test_all_parts_are_one_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (engines_speed, engines_mismatch):
        found = Measured([{"part": part.__name__}], [Target(part.__name__, 1.0, 1.0, "higher")])
        monkeypatch.setattr(part, "measure", lambda *, quick, say, found=found: found)
    monkeypatch.setattr(engines, "PARTS", ("engines_speed", "engines_mismatch"))
    measured = engines.measure(quick=True, say=lambda _: None)
    names = ["asyncrl.benchmarks.engines_speed", "asyncrl.benchmarks.engines_mismatch"]
    assert [row["part"] for row in measured.rows] == [target.name for target in measured.targets] == names
