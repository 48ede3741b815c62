"""YAML 1.2 text to plain Python values: no duplicate keys, no surprises with dates, `1e-6` a number."""

from __future__ import annotations

import math
import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import ScalarNode

MAX_DEPTH = 32
"""Levels of nesting. Also what ends the walk of an anchor that contains itself."""


class YamlTextError(ValueError):
    """Text that is not plain YAML. `line` counts from 1; 0 = unknown."""

    def __init__(self, message: str, line: int = 0):
        super().__init__(message)
        self.line = line


class _Constructor(SafeConstructor):
    """Safe values only; a duplicate key names both lines; dates stay the text they were written as."""

    def check_mapping_key(self, node: Any, key_node: Any, mapping: Any, key: Any, value: Any) -> bool:
        if key not in mapping:
            return True
        first = next(k for k, _ in node.value if isinstance(k, ScalarNode) and k.value == key_node.value)
        line = key_node.start_mark.line + 1
        raise YamlTextError(
            f"the key `{key}` stands twice, in line {first.start_mark.line + 1} and in line {line}; remove one of them",
            line,
        )


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def parse(text: str) -> Any:
    """Values of one YAML document: mappings with text keys, lists, text, numbers, booleans, null.

    Raises YamlTextError for anything else, with the line.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    try:
        value = yaml.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = " ".join(str(error.problem or error.context).split())
        raise YamlTextError(said, mark.line + 1 if mark else 0) from None
    except RecursionError:
        raise YamlTextError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    except (YAMLError, ValueError, TypeError) as error:
        if isinstance(error, YamlTextError):
            raise
        raise YamlTextError(str(error).splitlines()[0] if str(error) else type(error).__name__) from None
    _require_plain(value, "", 0)
    return value


def _require_plain(value: Any, path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise YamlTextError(f"`{path[:60]}...` is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise YamlTextError(
                    f"the key {key!r}{f' under `{path}`' if path else ''} is not text; put it in quotes"
                )
            _require_plain(item, f"{path}.{key}" if path else key, depth + 1)
    elif isinstance(value, list):
        for n, item in enumerate(value):
            _require_plain(item, f"{path}[{n}]", depth + 1)
    elif not (value is None or isinstance(value, str | int | float)):
        raise YamlTextError(f"`{path}` is of the type {type(value).__name__}; use text, numbers, lists or mappings")


def scalar(text: str) -> Any:
    """What a plain scalar of this text means in YAML 1.2: null, a boolean, a number, or the text itself.

    >>> scalar("60"), scalar("1e-6"), scalar("true"), scalar("a: b"), scalar("")
    (60, 1e-06, True, 'a: b', '')
    """
    if not _PLAIN_NUMBER_OR_WORD.fullmatch(text):
        return text
    value = parse(text)
    return value if value is None or isinstance(value, bool | int | float) else text


_PLAIN_NUMBER_OR_WORD = re.compile(r"[-+.\w]+|~")


def number(value: float) -> str:
    """A number as recipes write it: `1e-6`, not `1e-06`.

    >>> number(1e-6), number(0.001), number(1e22), number(5), number(2.0)
    ('1e-6', '0.001', '1e+22', '5', '2.0')
    """
    if math.isnan(value):
        return ".nan"
    if value in (float("inf"), float("-inf")):
        return ".inf" if value > 0 else "-.inf"
    return re.sub(r"e([+-])0+(\d)", r"e\1\2", repr(value))
