"""The parts of `asyncrl bench learner` that look at packing and shared prompts, on models of no size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from asyncrl.benchmarks import learner_packed, learner_shared
from asyncrl.benchmarks.learner_turns import cpu_seconds
from asyncrl.learners.shapes import SMOLLM2

CONFIG: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def test_packed_and_padded_are_the_same_gradient_and_padding_wastes_what_is_said() -> None:
    said: list[str] = []
    found = learner_packed.compare(LlamaConfig(**CONFIG), [5, 90, 3, 70, 120], budget=200, turns=1, say=said.append)
    assert [row["side"] for row in found.rows] == ["packed", "padded", "control"]
    assert {(row["tokens"], row["padded_tokens"]) for row in found.rows} == {(288, 2 * 90 + 2 * 70 + 120)}
    apart = next(target for target in found.targets if "apart" in target.name)
    assert apart.met
    assert apart.value is not None
    assert apart.value > 0
    assert len(said) == 1


def test_control_a_gradient_of_other_rows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    padded = learner_packed.padded
    monkeypatch.setattr(learner_packed, "padded", lambda model, rows, budget: padded(model, rows[:-1], budget))
    found = learner_packed.compare(LlamaConfig(**CONFIG), [5, 90, 3, 70], budget=200, turns=1, say=lambda _: None)
    assert not next(target for target in found.targets if "apart" in target.name).met


def test_lengths_of_rows_are_log_normal_and_bounded() -> None:
    lengths = learner_packed.lengths(4000, 96)  # drawn with a seed: always the same
    spread = torch.tensor(lengths, dtype=torch.float32)
    assert 85 < float(spread.mean()) < 107
    assert 0.85 < float(spread.std() / spread.mean()) < 1.15
    assert min(lengths) >= 2
    assert max(learner_packed.lengths(100, 900)) == learner_packed.LONGEST


def test_operations_of_shared_and_unshared_prompts_are_counted_in_two_ways() -> None:
    found = learner_shared.compare(
        LlamaConfig(**{**CONFIG, "hidden_size": 64}), turns=1, say=lambda _: None, members=4, prompt=200, answer=40
    )
    by_name = {row["side"]: row for row in found.rows}
    assert list(by_name) == ["shared", "unshared", "control"]
    for row in found.rows:
        assert row["tflop"] <= row["tflop_counted"] * 1.02 + 1e-4
    assert by_name["control"]["tflop"] == by_name["unshared"]["tflop"]
    assert [target.better for target in found.targets] == ["higher", "lower"]


def test_a_share_of_smollm2_is_that_of_its_layers_and_of_its_vocabulary() -> None:
    whole, part = learner_shared.smollm2(1), learner_shared.smollm2(5)
    assert (whole.num_hidden_layers, whole.vocab_size) == (SMOLLM2["num_hidden_layers"], SMOLLM2["vocab_size"])
    assert (part.num_hidden_layers, part.vocab_size) == (6, 9830)
    assert part.hidden_size == whole.hidden_size


def test_sides_take_turns_and_the_first_is_last_in_the_next() -> None:
    order: list[str] = []
    threads = torch.get_num_threads()
    found = cpu_seconds({name: (lambda name=name: order.append(name)) for name in "abc"}, turns=2)
    assert order == ["a", "b", "c", "c", "b", "a"]
    assert list(found) == ["a", "b", "c"]
    assert torch.get_num_threads() == threads
