"""The reward part `exact`: the answer is the expected text, character for character."""

from __future__ import annotations


def exact(text: str, expected: str, finish_reason: str) -> float:
    """1.0 iff the texts are equal and the model ended its answer itself, else 0.0.

    An answer cut off by the length limit may happen to be right so far; rewarding it would teach not to stop.
    """
    return float(finish_reason == "stop" and text == expected)
