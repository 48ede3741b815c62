"""A tensor that comes in pieces lies in the image as if it had come whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.staleness import Weights
from asyncrl.weights.base import WeightsError
from asyncrl.weights.image import Images
from asyncrl.weights.manifest import Pieces
from asyncrl.weights.shm import ShmReceiver, shm_offer


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Images]:
    images = Images("test", folder=tmp_path)
    yield images
    images.close()


def cut(tensor: torch.Tensor, at: list[int]) -> Pieces:
    ends = sorted({min(end, tensor.numel()) for end in at} | {0, tensor.numel()})
    flat = tensor.reshape(-1)
    return Pieces(tensor.dtype, tuple(tensor.shape), (flat[a:b] for a, b in itertools.pairwise(ends)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    at=st.lists(st.integers(0, 100), max_size=6),
    hashed=st.booleans(),
)
def test_pieces_are_the_tensor(
    images: Images, shapes: list[list[int]], dtype: torch.dtype, at: list[int], hashed: bool
) -> None:
    tensors = {f"t{n}": torch.randn(shape).mul(50).to(dtype) for n, shape in enumerate(shapes)}
    whole = images.write(Weights(1, 0), tensors.items(), tied={}, hashed=hashed)
    for version in (1, 2):  # into a file that grows, and into one that has its pages
        pieces = {name: cut(tensor, at) for name, tensor in tensors.items()}
        image = images.write(Weights(1, version), pieces.items(), tied={}, hashed=hashed)
        assert image.manifest == whole.manifest
        staged = ShmReceiver().stage(shm_offer(image), deadline_s=10.0)
        assert all(torch.equal(staged.tensors[name], tensor) for name, tensor in tensors.items())


def test_pieces_that_are_not_the_whole_tensor_are_refused(images: Images) -> None:
    parts = [torch.zeros(3), torch.zeros(2)]
    with pytest.raises(WeightsError, match=r"t of shape \(2, 3\) has 24 bytes, of which 20 came"):
        images.write(Weights(1, 0), [("t", Pieces(torch.float32, (2, 3), parts))], tied={})
    assert images.newest is None
