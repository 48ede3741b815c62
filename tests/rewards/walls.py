"""What keeps programs from harm, by name, and what tests of it share."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.rewards.sandbox import Ended

LIMIT_S = 30.0  # of programs that end by themselves: never reached
MEMORY = 128 << 20
SECRET = "the secret of this test"
WITHOUT = {
    # Landlock keeps from files and programs and, since its fourth version, from networks; as root, the other user too.
    "filter": frozenset({"filter"}),
    "files": frozenset({"files", "user"}),
    "both": frozenset({"filter", "files"}),
    "limits": frozenset({"limits"}),
    "user": frozenset({"user"}),
}

RunSource = Callable[..., Ended]


def last_line(ended: Ended) -> str:
    return ended.stderr.strip().splitlines()[-1]
