"""The one error a recipe can cause, and how it quotes values."""

from __future__ import annotations

from typing import Any

from asyncrl.config.secrets import masked
from asyncrl.config.yaml_text import number


class RecipeError(Exception):
    """A recipe that cannot be run. The message is one to three lines: full key, value, what is allowed, the fix."""


def quoted(value: Any) -> str:
    """A value as a person wrote it in YAML, without passwords, cut where it gets long.

    >>> quoted("8"), quoted(1e-6), quoted(True), quoted(None), quoted({"a": 1})
    ('"8" (text)', '1e-6', 'true', 'null', 'a mapping')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, str):
        text = masked(value) if value.isprintable() else ascii(masked(value))[1:-1]
        return f'"{text[:80]}..." (text)' if len(text) > 80 else f'"{text}" (text)'
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        text = "[" + ", ".join(quoted(item) for item in value[:4]) + (", ...]" if len(value) > 4 else "]")
        return text.replace(" (text)", "")
    return f"a value of type {type(value).__name__}"
