"""From what a column says of rows to a few groups of them that a table can show. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

MOST = 8
"""Groups of a table: of more, each has too few prompts to say anything, and nobody reads them."""

UNKNOWN = "unknown"
OTHER = "other"

K = TypeVar("K")


def levels(values: Mapping[K, Any]) -> dict[K, str]:
    """The group of each row, groups in order: one for each value where these are few; else thirds, of numbers, or the
    commonest texts and the rest as `other`. A row without a value is `unknown`.

    >>> levels({"a": 2, "b": 10, "c": None})
    {'a': '2', 'b': '10', 'c': 'unknown'}
    >>> list(dict.fromkeys(levels({n: n / 10 for n in range(9)}).values()))
    ['0 to 0.2', '0.3 to 0.5', '0.6 to 0.8']
    """
    known = {row: value for row, value in values.items() if value is not None}
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in known.values())
    ordered: list[K] = sorted(known, key=lambda row: known[row] if numeric else str(known[row]))
    distinct = Counter(str(value) for value in known.values())
    if len(distinct) <= MOST:
        named = {row: str(known[row]) for row in ordered}
    elif numeric:
        named = _thirds({row: float(known[row]) for row in ordered})
    else:
        common = {text for text, _ in distinct.most_common(MOST - 1)}
        named = {row: str(known[row]) for row in ordered if str(known[row]) in common}
        named |= {row: OTHER for row in ordered if row not in named}
    return named | {row: UNKNOWN for row in values if row not in known}


def _thirds(numbers: Mapping[K, float]) -> dict[K, str]:
    """By rank, equal numbers together; named by the lowest and highest that occur."""
    cuts = np.quantile(list(numbers.values()), [1 / 3, 2 / 3])
    third = {row: int(np.searchsorted(cuts, number, side="left")) for row, number in numbers.items()}
    names = {}
    for n in set(third.values()):
        members = [numbers[row] for row in numbers if third[row] == n]
        names[n] = f"{min(members):g} to {max(members):g}"
    return {row: names[n] for row, n in third.items()}
