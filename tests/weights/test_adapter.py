"""W + scale x B A has the same bits however it is cut, laid out, split among threads or stored; what does not fit is
refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.staleness import Weights
from asyncrl.weights import adapter as adapters
from asyncrl.weights.adapter import Base, ServedWeights, add, factor_names
from asyncrl.weights.base import StagedWeights, WeightsError
from asyncrl.weights.manifest import Adapter, combined_checksum

RANK = 3
NAMES = ("a.weight", "c.weight")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32)


def base() -> list[tuple[str, torch.Tensor]]:
    """Two adapted matrices, the second of which lies [in, out], and what no adapter changes."""
    return [
        ("a.weight", random(4, 6, seed=1)),
        ("b.weight", random(5, seed=2).to(torch.bfloat16).float()),
        ("c.weight", random(6, 5, seed=3)),
        ("c.calls", torch.tensor([7])),
    ]


def described(**other: object) -> Adapter:
    known = {"base": combined_checksum(base()), "path": "some/model", "rank": RANK, "scale": 2.0}
    return Adapter(**{**known, "weights": NAMES, "transposed": ("c.weight",), **other})  # type: ignore[arg-type]


def factors() -> dict[str, torch.Tensor]:
    forms = {"a.weight": (4, 6), "c.weight": (5, 6)}  # out, in
    return {
        factor: random(*shape, seed=9 + at)
        for name, (outer, inner) in forms.items()
        for at, (factor, shape) in enumerate(zip(factor_names(name), [(RANK, inner), (outer, RANK)], strict=True))
    }


def staged(tensors: dict[str, torch.Tensor] | None = None, **other: object) -> StagedWeights:
    return StagedWeights(
        Weights(1, 4), factors() if tensors is None else tensors, {}, "", adapter=described(**other)
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40), columns=st.integers(1, 40), rank=st.integers(1, 9), tile=st.integers(1, 200),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_the_sum_does_not_depend_on_how_it_is_cut_or_laid_out(
    rows: int, columns: int, rank: int, tile: int, seed: int
) -> None:
    weights, left, right = random(rows, columns, seed=seed), random(rows, rank, seed=seed), random(rank, columns)
    whole = add(weights, left, right, 0.5, out=torch.empty(rows, columns))
    known = adapters.CPU_TILE
    try:
        adapters.CPU_TILE = tile
        strided = add(weights.T.contiguous().T, left.T.contiguous().T, right.T.contiguous().T, 0.5, out=weights.clone())
    finally:
        adapters.CPU_TILE = known
    assert torch.equal(bits(strided), bits(whole))
    exact = weights.double() + 0.5 * (left.double() @ right.double())
    assert torch.allclose(whole.double(), exact, atol=1e-5, rtol=0)
    short = add(weights, left, right, 0.5, out=torch.empty(rows, columns, dtype=torch.bfloat16))
    assert torch.equal(short, whole.to(torch.bfloat16)), "rounded once, from float32"


SUM = """
import numpy as np, torch, xxhash
from asyncrl.weights.adapter import add

def random(*shape):
    return torch.from_numpy(np.random.default_rng(shape[0]).standard_normal(shape, np.float32))

def hashed():
    found = add(random(700, 300), random(701, 16)[:700], random(16, 300), 2.0, out=torch.empty(700, 300))
    return xxhash.xxh3_64_hexdigest(found.numpy().data)
"""


def test_neither_threads_nor_the_instructions_of_the_processor_change_a_bit() -> None:
    known: dict[str, Any] = {}
    exec(SUM, known)
    found = {known["hashed"]()}
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    found.add(known["hashed"]())
    torch.set_num_threads(before)
    plain = subprocess.run(  # without AVX and fused multiply-add
        [sys.executable, "-c", f"{SUM}\nprint(hashed())"],
        check=True, capture_output=True, text=True, timeout=120, env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
    )  # fmt: skip
    found.add(plain.stdout.strip())
    assert len(found) == 1


def test_control_a_matrix_product_gives_other_bits() -> None:
    weights, left, right = random(64, 64, seed=1), random(64, 16, seed=2), random(16, 64, seed=3)
    product = weights + (left @ right) * 2.0
    assert not torch.equal(product, add(weights, left, right, 2.0, out=torch.empty(64, 64)))


def test_a_base_takes_two_bytes_an_element_where_they_hold_it_and_makes_the_same_sum() -> None:
    kept = Base(base(), {})
    assert kept.checksum == combined_checksum(base()), "of the model in float32, as the learner has it"
    assert [tensor.dtype for tensor in kept.tensors.values()] == [
        torch.float32, torch.bfloat16, torch.float32, torch.int64,
    ]  # fmt: skip
    odd = torch.tensor([-0.0, float("inf"), float("nan"), 1.0])
    (held,) = Base([("odd", odd)], {}).tensors.values()
    assert torch.equal(bits(held.float()), bits(odd))

    short = [(name, tensor.to(torch.bfloat16).float()) for name, tensor in base()]
    adapter = described(base=combined_checksum(short))
    small = Base(short, {}).served(replace(staged(), adapter=adapter))
    assert combined_checksum((name, tensor.float()) for name, tensor in small) == combined_checksum(
        (name, tensor.float()) for name, tensor in ServedWeights(short, {}, adapter, factors())
    )


def test_what_is_served_is_the_base_with_what_is_adapted_in_its_place() -> None:
    served = dict(Base(base(), {}).served(staged()))
    before, given_factors = dict(base()), factors()
    assert list(served) == list(before)
    a, b = (given_factors[name] for name in factor_names("a.weight"))
    assert torch.allclose(served["a.weight"], before["a.weight"] + 2.0 * b @ a)
    a, b = (given_factors[name] for name in factor_names("c.weight"))
    assert torch.allclose(served["c.weight"], before["c.weight"] + 2.0 * (b @ a).T), "it lies [in, out]"
    assert torch.equal(served["b.weight"].float(), before["b.weight"])
    assert served["c.calls"] == 7


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in factors().items() if key != name}


WRONG: dict[str, tuple[Callable[[], StagedWeights], str]] = {
    "another base": (lambda: staged(base="0" * 16), "are an adapter of some/model .xxh3 0000000000000000., but this"),
    "a missing factor": (lambda: staged(without("a.lora_B.weight")), "missing a.lora_B.weight"),
    "an extra factor": (lambda: staged({**factors(), "b.lora_A.weight": random(3, 5)}), "unexpected b.lora_A.weight"),
    "another order": (
        lambda: staged(dict(reversed(factors().items()))),
        "position 0 should be a.lora_A",
    ),
    "another shape": (
        lambda: staged({**factors(), "a.lora_A.weight": random(RANK, 5)}),
        r"a.lora_A.weight \(expected float32\[3, 6\], found float32\[3, 5\]\)",
    ),
    "another rank": (lambda: staged(rank=2), r"expected float32\[2, 6\], found float32\[3, 6\]"),
    "another type": (
        lambda: staged({**factors(), "a.lora_A.weight": random(RANK, 6).to(torch.bfloat16)}),
        r"found bfloat16\[3, 6\]",
    ),
    "a weight that the base lacks": (lambda: staged(weights=("a.weight", "d.weight")), "d.weight is no matrix"),
    "a vector": (lambda: staged(weights=("a.weight", "b.weight")), "b.weight is no matrix"),
    "weights in another order": (lambda: staged(weights=("c.weight", "a.weight")), "a.weight is no matrix of the base"),
    "a weight that lies otherwise": (lambda: staged(transposed=()), r"c.lora_A.weight \(expected float32\[3, 5\]"),
    "whole weights": (lambda: replace(staged(), adapter=None), "are whole, no adapter"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused_by_name(what: str) -> None:
    make, said = WRONG[what]
    with pytest.raises(WeightsError, match=said):
        Base(base(), {}).served(make())


def test_a_base_that_differs_in_one_bit_is_another_one() -> None:
    tensors = base()
    bits(tensors[0][1])[2, 3] ^= 1
    with pytest.raises(WeightsError, match="are an adapter of some/model"):
        Base(tensors, {}).served(staged())


def test_an_adapter_survives_the_way_through_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(described(served="ab")), type=Adapter) == described(served="ab")
