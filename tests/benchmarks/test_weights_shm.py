"""`bench weights`, transport shm: it runs, in small, between real processes; its bytes are those it compares with."""

from __future__ import annotations

import pytest
import torch

from asyncrl.benchmarks import weights_shm
from asyncrl.benchmarks.weights_shm import OF_MEMCPY, model_of, targets


@pytest.fixture
def flat() -> torch.Tensor:
    return torch.randint(256, (3_000_000,), dtype=torch.uint8)


def test_the_tensors_are_the_bytes_that_are_copied_and_some_are_small(flat: torch.Tensor) -> None:
    tensors = model_of(flat)
    assert torch.equal(torch.cat([tensor for _, tensor in tensors]).view(torch.uint8), flat)
    large = model_of(torch.empty(200_000_000, dtype=torch.uint8))
    assert min(tensor.numel() for _, tensor in large) < 5_000 < 1_000_000 < max(tensor.numel() for _, tensor in large)


def test_every_row_is_a_share_of_a_copy_of_the_same_bytes_and_has_its_target(flat: torch.Tensor) -> None:
    said: list[str] = []
    rows = weights_shm.compared(flat, turns=2, say=said.append)
    assert {(row["reader"], row["hashed"]) for row in rows} == set(OF_MEMCPY)
    assert len(said) == len(rows)
    for row in rows:
        assert row["gb"] == pytest.approx(flat.numel() / 1e9, abs=1e-3)
        assert row["of_memcpy"] == pytest.approx(row["memcpy_ms"] / (row["publish_ms"] + row["stage_ms"]), rel=0.5)
    control = weights_shm.control(flat, turns=1, say=said.append)
    *held, last = targets([*rows, control])
    assert [target.target for target in held] == list(OF_MEMCPY.values())
    assert {target.better for target in held} == {"higher"}
    assert (last.better, last.value) == ("lower", control["of_memcpy"])


def test_a_reader_that_fails_says_so(flat: torch.Tensor) -> None:
    from asyncrl.staleness import Weights
    from asyncrl.weights.image import Images

    images = Images("bench-test")
    image = images.write(Weights(1, 1), model_of(flat), tied={})
    images.close()
    with weights_shm.reading("mapped") as stage, pytest.raises(RuntimeError, match="WeightsGone"):
        stage(image)
