"""Documents on top of each other: `extends:`, then `--set`, then named flags."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`: mappings merge, lists and scalars replace. Neither argument is changed.

    A mapping that names another `type` replaces the whole mapping: what belonged to the old type means nothing to the
    new one.

    >>> merge({"a": {"b": 1, "c": [1, 2]}}, {"a": {"c": [3]}})
    {'a': {'b': 1, 'c': [3]}}
    >>> merge({"e": {"type": "x", "slots": 1}}, {"e": {"type": "y"}})
    {'e': {'type': 'y'}}
    """
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping) and not _changes_type(old, value):
            result[key] = merge(old, value)
        else:
            result[key] = value
    return result


def _changes_type(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return "type" in old and "type" in new and bool(old["type"] != new["type"])


def flatten(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value; lists are values, and so are empty mappings.

    >>> flatten({"a": {"b": 1, "c": {}}, "d": [1]})
    {'a.b': 1, 'a.c': {}, 'd': [1]}
    """
    flat: dict[str, Any] = {}
    for key, value in document.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{path}."))
        else:
            flat[path] = value
    return flat


def is_under(key: str, names: Iterable[str]) -> bool:
    """Whether a dotted key is one of these, or below one of them.

    >>> is_under("learner.checkpoint.keep_last", ["learner.checkpoint"]), is_under("learner.ranks", ["learner.rank"])
    (True, False)
    """
    return any(key == name or key.startswith(f"{name}.") for name in names)


def differing_keys(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Dotted keys whose values differ between two documents, or that only one of them has, in order.

    >>> differing_keys({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3, "d": 4}})
    ['a.c', 'a.d']
    """
    left, right = flatten(one), flatten(other)
    missing = object()
    keys = [*left, *(key for key in right if key not in left)]
    return [key for key in keys if left.get(key, missing) != right.get(key, missing)]
