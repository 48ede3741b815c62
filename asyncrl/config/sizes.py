"""Sizes with a unit: `4GiB`."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {
    "B": 1,
    "kB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}
_SIZE = re.compile(r"(?P<count>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]+)")


def size_bytes(size: str | int) -> int:
    """Bytes of a size; a plain number is bytes. Raises ValueError for anything but a positive whole number of bytes.

    >>> size_bytes("4GiB"), size_bytes("1.5 KiB"), size_bytes(512)
    (4294967296, 1536, 512)
    """
    if isinstance(size, int):
        count = Fraction(size)
    else:
        match = _SIZE.fullmatch(size.strip())
        if not match or match["unit"] not in _UNITS:
            raise ValueError(f"a size is a number and a unit out of {', '.join(_UNITS)}, such as 4GiB")
        count = Fraction(match["count"]) * _UNITS[match["unit"]]
    if count < 1 or count.denominator != 1:
        raise ValueError("a size is a whole number of bytes, 1 or more, such as 4GiB")
    return int(count)


def size_text(count: int) -> str:
    """Bytes in the largest unit that divides them, the one form a recipe keeps.

    >>> size_text(4 << 30), size_text(1536), size_text(7)
    ('4GiB', '1536B', '7B')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count % _UNITS[unit] == 0:
            return f"{count // _UNITS[unit]}{unit}"
    return f"{count}B"


def size_about(count: int) -> str:
    """Bytes for people, rounded.

    >>> size_about(1 << 30), size_about(1_000_000_000), size_about(1000)
    ('1.0 GiB', '954 MiB', '0 MiB')
    """
    return f"{count / _UNITS['GiB']:.1f} GiB" if count >= _UNITS["GiB"] else f"{count / _UNITS['MiB']:.0f} MiB"
