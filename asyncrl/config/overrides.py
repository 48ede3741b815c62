"""`--set section.key=value`, keyword arguments and named flags, as documents that merge over the recipe."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.config.errors import RecipeError
from asyncrl.config.merge import merge
from asyncrl.config.yaml_text import YamlTextError, parse

FLAGS = {"max_trajectory_age": "buffer.max_trajectory_age", "data": "data.train", "model": "model.path"}
"""Named flag of the command line (dashes as underscores) -> the key it sets. Flags win over `--set`."""

_KEY = re.compile(r"[^.=\s\[\]{}]+(\.[^.=\s\[\]{}]+)*")


def override_document(overrides: Sequence[str]) -> dict[str, Any]:
    """`section.key=value` texts, the value in YAML, as one document; a later one wins over an earlier one.

    >>> override_document(["learner.learning_rate=1e-6", "task.digits=[3, 4]"])
    {'learner': {'learning_rate': 1e-06}, 'task': {'digits': [3, 4]}}
    """
    document: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals:
            raise RecipeError(f"--set {override!r} has no `=`; write --set section.key=value")
        if not _KEY.fullmatch(key):
            raise RecipeError(
                f"--set {override!r} does not name a key; write --set section.key=value (a list is set as a whole: "
                "--set 'task.digits=[3, 4]')"
            )
        try:
            value = parse(text)
        except YamlTextError as error:
            raise RecipeError(
                f"--set {key}: the value is not YAML ({error}); put text with special characters in quotes"
            ) from None
        document = merge(document, nested(key, value))
    return document


def keyword_document(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `asyncrl.run` as a document: a section each, or a dotted key; paths and tuples are Python's
    ways to write text and lists.

    >>> keyword_document({"task": {"digits": (3, 4)}, "run.output_dir": PurePath("out")})
    {'task': {'digits': [3, 4]}, 'run': {'output_dir': 'out'}}
    """
    document: dict[str, Any] = {}
    for key, value in sections.items():
        document = merge(document, nested(key, _plain(value)))
    return document


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def flag_document(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Named flags as a document. None = the flag was not given. Raises KeyError for a flag that is not in `FLAGS`.

    >>> flag_document({"max_trajectory_age": 2})
    {'buffer': {'max_trajectory_age': 2}}
    """
    document: dict[str, Any] = {}
    for name, value in flags.items():
        if value is not None:
            document = merge(document, nested(FLAGS[name.replace("-", "_")], value))
    return document


def nested(key: str, value: Any) -> dict[str, Any]:
    """A dotted key as nested mappings.

    >>> nested("a.b", 1)
    {'a': {'b': 1}}
    """
    for part in reversed(key.split(".")):
        value = {part: value}
    result: dict[str, Any] = value
    return result
