"""`${NAME}` and `${NAME:-default}` in a recipe's values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from asyncrl.config.errors import RecipeError
from asyncrl.config.yaml_text import scalar

_REFERENCE = re.compile(r"\$(?P<escaped>\$)?\{(?P<inside>[^{}]*)\}")
_INSIDE = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>.*))?", re.DOTALL)


def expand(value: Any, environ: Mapping[str, str], *, key: str) -> Any:
    """Every text in `value` with its references replaced. `key` is the dotted key it stands under, for the message.

    A text that is one reference and nothing else takes the YAML meaning of what replaces it, so that
    `max_steps: ${STEPS:-60}` is a number. As in a shell, `:-` also stands in for an empty variable. `$${NAME}` is the
    literal text `${NAME}`. Raises RecipeError for an unset variable without a default and for a malformed reference.

    >>> expand(["${N:-3}", "n=${N:-3}", "$${N}"], {}, key="a")
    [3, 'n=3', '${N}']
    """
    if isinstance(value, dict):
        return {name: expand(item, environ, key=f"{key}.{name}" if key else name) for name, item in value.items()}
    if isinstance(value, list):
        return [expand(item, environ, key=f"{key}[{n}]") for n, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole and not whole["escaped"]:
        return scalar(_lookup(whole["inside"], environ, key))
    return _REFERENCE.sub(
        lambda match: match[0][1:] if match["escaped"] else _lookup(match["inside"], environ, key), value
    )


def _lookup(inside: str, environ: Mapping[str, str], key: str) -> str:
    match = _INSIDE.fullmatch(inside)
    if not match:
        raise RecipeError(
            f"{key} has ${{{inside}}}, which is not the name of an environment variable; write ${{NAME}} or "
            f"${{NAME:-default}}, or $${{{inside}}} for the text itself"
        )
    name, default = match["name"], match["default"]
    if default is not None:
        return environ.get(name) or default
    if name not in environ:
        raise RecipeError(
            f"{key} needs the environment variable {name}, which is not set; export {name}=... or write "
            f"${{{name}:-default}}"
        )
    return environ[name]
