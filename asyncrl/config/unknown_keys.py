"""What to say about a key that no section has."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import asyncrl
from asyncrl.config.errors import RecipeError
from asyncrl.config.foreign import PLANNED, foreign_name
from asyncrl.config.merge import flatten

CLOSE = 0.75
"""Similarity (difflib's ratio) from which a misspelling is taken for a key: `lerning_rat` is, `rate` is not."""


def unknown_key(path: str, value: Any, *, siblings: Sequence[str], every_key: Sequence[str]) -> RecipeError:
    """The error for key `path`. `siblings`: names allowed beside it; `every_key`: all dotted keys of a recipe.

    In this order: a key of a later version, a key that lives in another section, another system's name, a misspelled
    one, a section of another system; else the names that are allowed.
    """
    return RecipeError(
        f"{path} is not a key of a recipe. {_advice(path, value, siblings=siblings, every_key=every_key)}"
    )


def _advice(path: str, value: Any, *, siblings: Sequence[str], every_key: Sequence[str]) -> str:
    section, _, name = path.rpartition(".")
    if path in PLANNED or any(path.startswith(f"{planned}.") for planned in PLANNED):
        return f"asyncrl {asyncrl.__version__} does not have it yet; remove it"
    if elsewhere := [key for key in every_key if key.rpartition(".")[2] == name]:
        return f"Did you mean {' or '.join(elsewhere)}?"
    if here := _other_systems({path: name}, every_key):
        return here
    if close := difflib.get_close_matches(name, siblings, n=1, cutoff=CLOSE):
        return f"Did you mean {section + '.' if section else ''}{close[0]}?"
    inside = flatten(value, f"{path}.") if isinstance(value, Mapping) else {}
    if here := _other_systems(dict(zip(inside, inside, strict=True)), every_key):
        return here
    names = {key.rpartition(".")[2]: key for key in reversed(every_key)}
    if not isinstance(value, Mapping) and (close := difflib.get_close_matches(name, names, n=1, cutoff=CLOSE)):
        return f"Did you mean {names[close[0]]}?"
    return f"{section or 'A recipe'} has: {', '.join(siblings)}"


def _other_systems(shown: Mapping[str, str], every_key: Sequence[str]) -> str:
    """`here: ...` for those of the keys (path -> as shown) that other systems have, three at most; "" if none is."""
    said = []
    for path, name in shown.items():
        if known := foreign_name(path):
            system, here = known
            later = "" if here in every_key else f", which asyncrl {asyncrl.__version__} does not have yet"
            said.append(f"{name} is a name of {system}; here: {here}{later}")
    return ". ".join(said[:3])
