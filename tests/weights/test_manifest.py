"""The manifest: what counts as one version of a model, and which differences are named."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
import xxhash
from torch import nn

from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights, WeightsError
from asyncrl.weights.manifest import (
    Manifest,
    TensorSpec,
    aligned,
    check_fits,
    combine,
    combined_checksum,
    compare,
    describe,
    model_tensors,
    tensor_bytes,
    verify_served,
)


class Head(nn.Module):
    """An embedding, a buffer of each kind, and a head that may share the embedding's weight."""

    def __init__(self, *, tie: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.head = nn.Linear(3, 5, bias=False)
        if tie:
            self.head.weight = self.embed.weight


def manifest_of(tensors: list[tuple[str, torch.Tensor]], tied: dict[str, str] | None = None) -> Manifest:
    specs = specs_of(tensors)
    return Manifest(tuple(specs), tied or {}, combine(spec.checksum for spec in specs))


def specs_of(tensors: list[tuple[str, torch.Tensor]]) -> list[TensorSpec]:
    offset, specs = 0, []
    for name, tensor in tensors:
        checksum = xxhash.xxh3_64_hexdigest(tensor_bytes(name, tensor))
        specs.append(describe(name, tensor, offset=offset, checksum=checksum))
        offset = aligned(offset + tensor.nbytes)
    return specs


def staged_of(model: nn.Module, **changes: Any) -> StagedWeights:
    tensors, tied = model_tensors(model)
    fields: dict[str, Any] = {"weights": Weights(1, 0), "tensors": dict(tensors), "tied": tied, "checksum": ""}
    return StagedWeights(**{**fields, **changes})


def test_a_model_is_its_parameters_and_persistent_buffers_in_order() -> None:
    tensors, tied = model_tensors(Head(tie=False))
    assert [name for name, _ in tensors] == [
        "embed.weight",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "head.weight",
    ]
    assert tied == {}


def test_a_tied_head_is_an_alias_and_has_no_bytes_of_its_own() -> None:
    tensors, tied = model_tensors(Head(tie=True))
    assert "head.weight" not in dict(tensors)
    assert tied == {"head.weight": "embed.weight"}


def test_a_transposed_view_of_the_same_memory_is_no_alias() -> None:
    model = nn.Module()
    square = torch.arange(9.0).reshape(3, 3)
    model.register_buffer("a", square)
    model.register_buffer("b", square.T)
    tensors, tied = model_tensors(model)
    assert (len(tensors), tied) == (2, {})


def test_empty_tensors_are_no_aliases_of_each_other() -> None:
    model = nn.Module()
    model.register_buffer("a", torch.empty(0, 3))
    model.register_buffer("b", torch.empty(0, 3))
    assert model_tensors(model)[1] == {}


def test_extra_state_is_refused_by_name() -> None:
    class WithExtra(nn.Linear):
        def get_extra_state(self) -> str:
            return "calibration"

    with pytest.raises(WeightsError, match="_extra_state is a str"):
        model_tensors(WithExtra(2, 2))


def test_a_checksum_does_not_depend_on_memory_layout() -> None:
    dense = torch.arange(12.0).reshape(3, 4)
    assert combined_checksum([("a", dense.T)]) == combined_checksum([("a", dense.T.contiguous())])


def test_one_changed_bit_changes_the_combined_checksum() -> None:
    model = Head(tie=True)
    tensors, _ = model_tensors(model)
    before = combined_checksum(tensors)
    verify_served(model, before)
    with torch.no_grad():
        model.head.weight[0, 0] += 1e-6
    with pytest.raises(WeightsError, match=f"announced was {before}"):
        verify_served(model, before)


def test_a_sparse_tensor_is_refused_by_name() -> None:
    with pytest.raises(WeightsError, match=r"routing is a torch\.sparse_coo"):
        tensor_bytes("routing", torch.eye(2).to_sparse())


def test_a_manifest_survives_json() -> None:
    manifest = manifest_of([("a", torch.ones(2, 3, dtype=torch.bfloat16)), ("b", torch.tensor(7))], {"c": "a"})
    assert msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest) == manifest


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([("a", torch.zeros(2))], "missing b"),
        ([("a", torch.zeros(2)), ("b", torch.ones(2)), ("c", torch.ones(2))], "unexpected c"),
        ([("b", torch.ones(2)), ("a", torch.zeros(2))], "another order: position 0 should be a, is b"),
        (
            [("a", torch.zeros(2)), ("b", torch.ones(1, 2))],
            r"b \(expected float32\[2\], found float32\[1, 2\]\)",
        ),
        (
            [("a", torch.zeros(2)), ("b", torch.ones(2, dtype=torch.bfloat16))],
            r"b \(expected float32\[2\], found bfloat16\[2\]\)",
        ),
        ([("a", torch.zeros(2)), ("b", torch.zeros(2))], r"1 of 2 tensors differ: b \(expected xxh3"),
    ],
)
def test_every_difference_is_named(found: list[tuple[str, torch.Tensor]], message: str) -> None:
    manifest = manifest_of([("a", torch.zeros(2)), ("b", torch.ones(2))])
    with pytest.raises(WeightsError, match=message):
        compare(manifest, specs_of(found), where="test")


def test_equal_tensors_compare_equal() -> None:
    tensors = [("a", torch.zeros(2)), ("b", torch.ones(2))]
    compare(manifest_of(tensors), specs_of(tensors), where="test")


def test_weights_of_an_untied_model_do_not_fit_a_tied_one() -> None:
    with pytest.raises(WeightsError, match=r"unexpected head\.weight"):
        check_fits(Head(tie=True), staged_of(Head(tie=False)))


def test_weights_with_other_ties_do_not_fit() -> None:
    model = Head(tie=True)
    with pytest.raises(WeightsError, match="expected tied tensors"):
        check_fits(model, staged_of(model, tied={"head.weight": "norm.weight"}))


def test_weights_of_the_same_model_fit() -> None:
    for tie in (True, False):
        check_fits(Head(tie=tie), staged_of(Head(tie=tie)))
