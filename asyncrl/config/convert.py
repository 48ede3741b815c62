"""A document to the recipe's structs, strictly: nothing is guessed, every refusal names key, value and fix."""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, Union

import msgspec

from asyncrl.config.errors import RecipeError, quoted
from asyncrl.config.recipe import CustomTask, Recipe
from asyncrl.config.section import Section
from asyncrl.config.sizes import size_bytes, size_text
from asyncrl.config.unknown_keys import unknown_key
from asyncrl.config.yaml_text import number, scalar

S = TypeVar("S", bound=Section)

SIZES = (
    *("buffer.max_bytes", "collector.engine.kv_cache_memory_bytes", "collector.score_memory_limit"),
    "task.memory_limit",
)
MEANINGS = {"buffer.max_trajectory_age": "0 is synchronous"}
"""What a bound means, where the number alone does not say it."""

LARGEST = 2**63 - 1  # of a signed 64-bit integer, which stores and tensors hold


def convert(document: Mapping[str, Any]) -> Recipe:
    """The recipe a document describes. Raises RecipeError for the first key that is unknown, missing or of a wrong type
    or range. Rules that cross keys are in `checks`."""
    return convert_to(Recipe, document)


def convert_to(root: type[S], document: Mapping[str, Any]) -> S:
    """The same for another kind of recipe; every key of `root` has a default."""
    return _section(root, document, "", root)


def _section(struct: type[S], value: Any, path: str, root: type[Section]) -> S:
    if not isinstance(value, Mapping):
        raise RecipeError(
            f"{path or 'the recipe'} is {quoted(value)}; it must be a mapping with keys out of: "
            f"{', '.join(struct.__struct_fields__)}"
        )
    hints = typing.get_type_hints(struct, include_extras=True)
    values: dict[str, Any] = {}
    for name, item in value.items():
        key = f"{path}.{name}" if path else name
        if name not in hints:
            raise unknown_key(key, item, siblings=struct.__struct_fields__, every_key=every_key(root))
        values[name] = _value(hints[name], item, key, root)
    for field in msgspec.structs.fields(struct):
        if field.required and field.name not in values:
            raise RecipeError(f"{path}.{field.name} is missing; {path} needs it")
    return struct(**values)


def _value(hint: Any, value: Any, key: str, root: type[Section]) -> Any:
    members = _section_types(hint)
    if members and value is None and types.NoneType in typing.get_args(hint):
        return None
    if len(members) > 1:
        return _union(members, value, key, root)
    if members:
        return _section(members[0], value, key, root)
    item_hint = _item_of_list(hint)
    if _section_types(item_hint):
        if value is None and types.NoneType in typing.get_args(hint):
            return None
        if isinstance(value, Mapping):
            return [_value(item_hint, value, key, root)]  # one instead of a list of one
        if not isinstance(value, list):
            raise RecipeError(f"{key} is {quoted(value)}; it must be a mapping, or a list of mappings")
        return [_value(item_hint, item, f"{key}[{n}]", root) for n, item in enumerate(value)]
    return _leaf(hint, value, key, root)


def _item_of_list(hint: Any) -> Any:
    """`A` of `list[A]` and of `list[A] | None`; None of anything else."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((typing.get_args(option)[0] for option in options if typing.get_origin(option) is list), None)


def _section_types(hint: Any) -> tuple[type[Section], ...]:
    """The section structs of a field's type: one, the members of a union, or none for a plain value."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    return tuple(option for option in options if isinstance(option, type) and issubclass(option, Section))


def _union(members: tuple[type[Section], ...], value: Any, key: str, root: type[Section]) -> Section:
    """The member that `type` names; left out, the first one. A key of another member says whose it is."""
    if not isinstance(value, Mapping):
        raise RecipeError(f"{key} is {quoted(value)}; it must be a mapping that starts with `type:`")
    named = {_type_name(member): member for member in members}
    chosen = value.get("type", next(iter(named)))
    if isinstance(chosen, str) and chosen in named:
        member = named[chosen]
    elif isinstance(chosen, str) and ":" in chosen and CustomTask in members:
        member = CustomTask
    else:
        raise _no_such_type(f"{key}.type", chosen, [name or "module:Class" for name in named])
    for name in value:
        owners = [other for other, fields in named.items() if name in fields.__struct_fields__]
        if name not in member.__struct_fields__ and owners:
            owner = owners[0] or "module:Class"
            said = f"this {key.rpartition('.')[2]} is {chosen}" + ("" if "type" in value else " (no `type:` is given)")
            raise RecipeError(
                f"{key}.{name} belongs to type {owner}, and {said}. Remove it, or write `type: {owner}` first"
            )
    return _section(member, value, key, root)


def _type_name(member: type[Section]) -> str:
    """`transformers` of `type: Literal["transformers"]`; "" where the type is free text (module:Class)."""
    literal = typing.get_args(typing.get_type_hints(member)["type"])
    return str(literal[0]) if literal else ""


def _no_such_type(key: str, chosen: Any, names: list[str]) -> RecipeError:
    said = f"{key} is {quoted(chosen)}; it must be one of {', '.join(names)}"
    close = difflib.get_close_matches(chosen, names, n=1) if isinstance(chosen, str) else []
    return RecipeError(f"{said}. Did you mean {close[0]}?" if close else said)


def _leaf(hint: Any, value: Any, key: str, root: type[Section]) -> Any:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, float) and not math.isfinite(item):
            raise RecipeError(f"{key} is {quoted(value)}; it must be a finite number")
        if isinstance(item, int) and abs(item) > LARGEST:
            raise RecipeError(f"{key} is {quoted(value)}; it must be a number of 64 bits, at most {LARGEST}")
    try:
        converted = msgspec.convert(value, hint, strict=True)
        if key in SIZES and converted is not None:
            converted = size_text(size_bytes(converted))
    except msgspec.ValidationError:
        info = msgspec.inspect.type_info(hint)
        raise RecipeError(
            f"{key} is {quoted(value)}; it must be {allowed(info)}{_meaning(key)}{_fix(info, value, key, root)}"
        ) from None
    except ValueError as error:
        raise RecipeError(f"{key} is {quoted(value)}; {error}") from None
    return converted


def allowed(info: msgspec.inspect.Type) -> str:
    """A type and its range in words.

    >>> allowed(msgspec.inspect.type_info(structs.Positive)), allowed(msgspec.inspect.type_info(float | None))
    ('a whole number of 1 or more', 'a number, or null')
    """
    match info:
        case msgspec.inspect.IntType():
            return "a whole number" + _range(info)
        case msgspec.inspect.FloatType():
            return "a number" + _range(info)
        case msgspec.inspect.StrType():
            return "text"
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.NoneType():
            return "null"
        case msgspec.inspect.LiteralType(values=(only,)):
            return str(only)
        case msgspec.inspect.LiteralType(values=values):
            return f"one of {', '.join(map(str, values))}"
        case msgspec.inspect.TupleType(item_types=items):
            return f"a list of {len(items)}, each {allowed(items[0])}"
        case msgspec.inspect.UnionType(types=options):
            return ", or ".join(allowed(option) for option in options)
        case msgspec.inspect.DictType():
            return "a mapping"
    return "a list"


def _range(info: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> str:
    low = f"{info.ge} or more" if info.ge is not None else f"more than {info.gt}" if info.gt is not None else ""
    high = f"at most {info.le}" if info.le is not None else f"less than {info.lt}" if info.lt is not None else ""
    return f" of {low}{' and ' if low and high else ''}{high}" if low or high else ""


def _meaning(key: str) -> str:
    return f" ({MEANINGS[key]})" if key in MEANINGS else ""


def _fix(info: msgspec.inspect.Type, value: Any, key: str, root: type[Section]) -> str:
    """What to write instead, where one can tell."""
    options = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    if isinstance(value, str):
        meant = scalar(value)
        numeric = any(isinstance(option, msgspec.inspect.IntType | msgspec.inspect.FloatType) for option in options)
        if numeric and isinstance(meant, int | float) and not isinstance(meant, bool):
            return f". Write {number(meant)} without quotes"
        if any(isinstance(option, msgspec.inspect.BoolType) for option in options):
            words = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}
            return f". Write {words[value.lower()]}" if value.lower() in words else ""
        names = [str(name) for o in options if isinstance(o, msgspec.inspect.LiteralType) for name in o.values]
        close = difflib.get_close_matches(value, names, n=1)
        return f". Did you mean {close[0]}?" if close else ""
    if isinstance(value, float) and value.is_integer():
        return f". Write {int(value)}"
    if isinstance(value, bool | int | float) and any(isinstance(option, msgspec.inspect.StrType) for option in options):
        return f'. Write "{quoted(value)}" in quotes'
    return _default_hint(key, root)


def _default_hint(key: str, root: type[Section]) -> str:
    default: Any = root()
    for part in key.split("."):
        default = getattr(default, part, None)
    return "" if default is None or isinstance(default, Section) else f". Left out, it is {quoted(default)}"


@cache
def every_key(root: type[Section] = Recipe) -> tuple[str, ...]:
    """All dotted keys a recipe can have, sections and every union's members included. What may stand in several places,
    as the keys of a task in a mixture, is named at the first."""
    return tuple(dict.fromkeys(_keys(root, "", {})))


def _keys(struct: type[Section], prefix: str, places: dict[type[Section], str]) -> list[str]:
    """places: where each struct stands that was met so far."""
    keys: list[str] = []
    if places.setdefault(struct, prefix) != prefix:
        return keys
    for name, hint in typing.get_type_hints(struct, include_extras=True).items():
        if name.startswith("__"):
            continue
        keys.append(prefix + name)
        for member in _section_types(_item_of_list(hint) or hint):
            keys += _keys(member, f"{prefix}{name}.", places)
    return keys
