r"""Which text of an answer is the mathematical answer: that of the last \boxed{...} or \fbox{...}. Pure."""

from __future__ import annotations

import re
from collections import deque

BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*(?P<opens>\{)?")
BARE = re.compile(r"[^\s${}]+")  # \boxed 5: LaTeX takes one token, people mean a word
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text

LAST = re.compile(
    r"""\$\$(?P<display>[^$]+)\$\$ | \$(?P<inline>[^$\n]+)\$
      | \\\[(?P<bracket>.+?)\\\] | \\\((?P<paren>.+?)\\\)
      | (?<![\w.,])(?P<number>[-−+]?\d[\d,]*(?:\.\d+)?(?:\s\d+/\d+|/\d+)?(?:\s?%)?)""",
    re.VERBOSE | re.DOTALL,
)
TAIL = 2000
"""Characters at the end of an answer in which its last expression is looked for."""


class Unclosed(ValueError):
    """The last box has no end."""


def boxed(text: str) -> str | None:
    r"""What the box that begins last holds; None without a box. Raises Unclosed.

    >>> boxed(r"so \boxed{1}, or rather \fbox{\frac{1}{2}}."), boxed("42")
    ('\\frac{1}{2}', None)
    """
    box = _last(BOX, text)
    if box is None:
        return None
    if box["opens"]:
        return text[box.end() : _closing(text, box.end())].strip()
    bare = BARE.match(text, box.end())
    return bare[0].rstrip(".,;:") if bare else ""


def content(text: str) -> str:
    r"""What the last box of a text holds, or the text itself: doing it twice does nothing more. Raises Unclosed.

    >>> content(content(r"\boxed{\{1, 2\}}"))
    '\\{1, 2\\}'
    """
    found = boxed(text)
    return text.strip() if found is None else found


def last_expression(text: str) -> str | None:
    """What a model that was not taught to box may mean: the formula or number that ends last; None without any.

    >>> last_expression("468 = 2 * 234, so the answer is **73**.")
    '73'
    """
    found = _last(LAST, text[-TAIL:])
    return None if found is None else found[found.lastgroup or 0].strip()


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    newest = deque(pattern.finditer(text), maxlen=1)
    return newest[0] if newest else None


def _closing(text: str, start: int) -> int:
    """Where the brace that was opened right before `start` is closed."""
    depth = 1
    for brace in BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    raise Unclosed("the last box is not closed")
