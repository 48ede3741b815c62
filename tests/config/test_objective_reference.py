"""Every word that the section `objective` takes is explained: formula, source, and when to use a preset."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any, get_args

import msgspec
import pytest

from asyncrl.config import objective_reference as reference
from asyncrl.config.objective import (
    AdvantageKind,
    Aggregation,
    Anchor,
    Estimator,
    ImportanceWeight,
    Mask,
    Preset,
    SurrogateKind,
)
from asyncrl.config.objective_reference import Part


def keys_of(union: Any) -> dict[str, set[str]]:
    """The types of a union of sections, and what else each has."""
    fields = {member: msgspec.structs.fields(member) for member in get_args(union)}
    return {
        next(field.default for field in found if field.name == "type"): {field.name for field in found} - {"type"}
        for found in fields.values()
    }


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (get_args(AdvantageKind), reference.ADVANTAGES),
        (keys_of(ImportanceWeight), reference.IMPORTANCE_WEIGHTS),
        (get_args(SurrogateKind), reference.SURROGATES),
        (keys_of(Mask), reference.MASKS),
        (keys_of(Anchor), reference.ANCHORS),
        (get_args(Estimator), reference.ESTIMATORS),
        (get_args(Estimator), reference.REFERENCE),
        (get_args(Aggregation), reference.AGGREGATIONS),
    ],
)
def test_every_part_has_a_formula_and_a_source(words: Any, parts: Mapping[str, Part]) -> None:
    assert list(parts) == list(words)
    for name, part in parts.items():
        assert part.formula, name
        assert part.source, name


def test_every_preset_has_a_source_and_says_when_to_use_it() -> None:
    assert list(reference.PRESETS) == list(get_args(Preset))
    for name, use in reference.PRESETS.items():
        assert use.source, name
        assert use.when, name


@pytest.mark.parametrize(
    ("union", "parts"),
    [
        (ImportanceWeight, reference.IMPORTANCE_WEIGHTS),
        (Mask, reference.MASKS),
        (Anchor, reference.ANCHORS),
    ],
)
def test_a_formula_has_the_keys_of_its_part(union: Any, parts: Mapping[str, Part]) -> None:
    for name, keys in keys_of(union).items():
        assert {key for _, key, _, _ in string.Formatter().parse(parts[name].formula) if key} == keys, name
