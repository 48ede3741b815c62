r"""The unit behind an answer. What is compared leaves units away, as rows seldom have them; where both sides name one
that is known here, it has to be the same: 2 minutes are not 2 hours. Pure; nothing is converted, and powers do not
count.
"""

from __future__ import annotations

import re

NAMES = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "inch": "in inch inche",  # and so inches
    "foot": "ft foot feet",
    "yard": "yd yard",
    "mile": "mi mile",
    "second": "s sec second",
    "minute": "min minute",
    "hour": "h hr hour",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "yr year",
    "mg": "mg milligram",
    "g": "g gram",
    "kg": "kg kilogram",
    "ounce": "oz ounce",
    "pound": "lb pound",
    "ml": "ml milliliter millilitre",
    "liter": "l liter litre",
    "gallon": "gal gallon",
    "cent": "cent",
    "dollar": "dollar",
    "degree": "degree",
    "radian": "rad radian",
}
KNOWN = {name + plural: unit for unit, names in NAMES.items() for name in names.split() for plural in ("", "s")}

LAST = re.compile(
    r"(?:\\(?:text|mathrm|textrm|mbox)\s*\{(?P<marked>[^{}]*)\}"
    r"|(?<=[\d\s}])(?P<bare>[A-Za-z][A-Za-z ]{2,}|[mck]m|[mk]g))"
    r"(?:\s*\^\s*\{?[23]\}?)?[\s.$]*$"
)
AROUND = re.compile(r"\b(?:square|cubic|sq|cu)\b\.?|\.")
DOLLARS = re.compile(r"^\s*(?:\$\s*)?\\\$\s*[\d.]")


def unit_of(text: str) -> str:
    r"""The unit that a text ends in, as NAMES has it; "" if it has none, or one that is not known.

    >>> unit_of(r"12\text{ cm}^2"), unit_of("3 minutes"), unit_of(r"\$5"), unit_of("5 apples")
    ('cm', 'minute', 'dollar', '')
    """
    if DOLLARS.match(text):
        return "dollar"
    found = LAST.search(text[-100:])
    name = AROUND.sub(" ", found["marked"] or found["bare"] or "") if found else ""
    return KNOWN.get(name.strip().lower(), "")


def other_unit(expected: str, given: str) -> bool:
    """Whether two texts have units that are known, and differ."""
    one, other = unit_of(expected), unit_of(given)
    return bool(one and other and one != other)
