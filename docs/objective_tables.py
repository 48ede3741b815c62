"""The generated parts of `docs/objectives.md`: presets and parts of objectives as the code has them, explained by
`asyncrl.config.objective_reference`."""

from __future__ import annotations

import textwrap
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from asyncrl.config import objective_reference as reference
from asyncrl.config.objective import Anchor, ImportanceWeight, Mask, Objective, Preset
from asyncrl.config.objective_reference import Part
from asyncrl.config.recipe import to_builtins
from asyncrl.config.section import Section

KEYS = ("advantage", "importance_weight", "surrogate", "epsilon", "epsilon_high", "mask", "anchor", "aggregation")
WIDTH = 135  # of prose


def presets() -> str:
    """A row for each preset: what its parts are."""
    rows = ["| preset | " + " | ".join(f"`{key}`" for key in KEYS) + " |", "|---" * (len(KEYS) + 1) + "|"]
    for preset in typing.get_args(Preset):
        parts = to_builtins(Objective(preset=preset))
        rows.append(f"| [`{preset}`](#{preset}) | " + " | ".join(_value(parts[key]) for key in KEYS) + " |")
    return "\n".join(rows) + "\n"


def formulas() -> str:
    """A section for each preset: when to use it, the whole formula with its numbers, the source."""
    sections = []
    for preset in typing.get_args(Preset):
        use = reference.PRESETS[preset]
        formula = "".join(f"    {line}\n" for line in _formula(to_builtins(Objective(preset=preset))))
        source = textwrap.fill(f"Source: {use.source}. {use.note}", WIDTH, break_on_hyphens=False)
        sections.append(f"### `{preset}`\n\nWhen: {use.when}\n\n{formula}\n{source}\n")
    return "\n".join(sections)


def _formula(parts: dict[str, Any]) -> list[str]:
    """An objective with the numbers of its parts, line by line."""
    weight, anchor = parts["importance_weight"], parts["anchor"]
    clips = parts["epsilon"] is not None
    bounds = {"low": f"{1 - parts['epsilon']:g}", "high": f"{1 + parts['epsilon_high']:g}"} if clips else {}
    loss = reference.SURROGATES[parts["surrogate"]].formula.format_map(bounds)
    if weight["type"] != "none":
        loss = f"- sg({_filled(reference.IMPORTANCE_WEIGHTS, weight)}) {loss.removeprefix('- ')}"
    if anchor["type"] != "none":
        loss += f" + {_filled(reference.ANCHORS, anchor)}"
    return [
        f"A_i  = {reference.ADVANTAGES[parts['advantage']].formula}",
        f"l_t  = {loss}",
        f"loss = {reference.AGGREGATIONS[parts['aggregation']].formula}",
        *(f"without {_filled(reference.MASKS, mask)}" for mask in parts["mask"]),
    ]


def _filled(parts: Mapping[str, Part], chosen: dict[str, Any]) -> str:
    """The formula of one of these parts with the numbers that were chosen for it."""
    numbers = {key: _value(value) for key, value in chosen.items()}
    if "estimator" in chosen:
        numbers["estimator"] = reference.ESTIMATORS[chosen["estimator"]].formula
    return parts[chosen["type"]].formula.format_map(numbers)


def table(parts: Mapping[str, Part], *titles: str, members: Any = None) -> Callable[[], str]:
    """What writes a row for each part: its word, formula, note if there is a title for it, source. members: the union
    of sections that these parts are, if they have keys of their own, which are shown with their defaults."""

    def written() -> str:
        rows = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
        keys = dict(map(_defaults, typing.get_args(members)))
        for name, part in parts.items():
            defaults = keys.get(name, {})
            word = ", ".join([f"`{name}`", *(f"{key} {value}" for key, value in defaults.items() if value)])
            formula = part.formula.format_map({**_CLIP, **{key: key for key in defaults}})
            rows.append("| " + " | ".join([word, formula, *[part.note] * (len(titles) == 4), part.source]) + " |")
        return "\n".join(rows) + "\n"

    return written


def _defaults(member: type[Section]) -> tuple[str, dict[str, str]]:
    """The type of a part that has keys of its own, and those with their defaults, "" for what has to be given."""
    keys = {field.name: field.default for field in msgspec.structs.fields(member)}
    kind = keys.pop("type")
    return kind, {key: "" if value is msgspec.NODEFAULT else _value(value) for key, value in keys.items()}


def _value(value: Any) -> str:
    """`sequence-tis, cap 5` of a union, `0.2` of a number, `-` of what there is not."""
    if isinstance(value, list):
        return "; ".join(map(_value, value)) or "-"
    if isinstance(value, dict):
        found = ", ".join([value["type"], *(f"{key} {_value(item)}" for key, item in value.items() if key != "type")])
        return "-" if found == "none" else found
    if isinstance(value, float):
        return f"{value:g}"
    return "-" if value is None else str(value)


_CLIP = {"low": "1 - epsilon", "high": "1 + epsilon_high"}

PARTS = {
    "objective_presets": presets,
    "objective_formulas": formulas,
    "objective_advantages": table(reference.ADVANTAGES, "value", "A_i", "", "source"),
    "objective_weights": table(
        reference.IMPORTANCE_WEIGHTS, "type", "weight", "bias", "source", members=ImportanceWeight
    ),
    "objective_surrogates": table(reference.SURROGATES, "value", "l_t", "", "source"),
    "objective_masks": table(reference.MASKS, "type", "takes", "", "source", members=Mask),
    "objective_anchors": table(reference.ANCHORS, "type", "added to l_t", "", "source", members=Anchor),
    "objective_reference": table(reference.REFERENCE, "estimator", "added to l_t, times beta", "gradient", "source"),
    "objective_estimators": table(reference.ESTIMATORS, "estimator", "", "source"),
    "objective_aggregations": table(reference.AGGREGATIONS, "value", "loss", "source"),
}
"""Name of a generated part -> what writes it."""
