"""From a name or path to a checked recipe.

Precedence: defaults < recipe (over what it `extends`) < `--set section.key=value` < named flags. Environment variables
are read last, in the values that are left: one that only an overridden value needs may be unset.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.config import sft
from asyncrl.config.checks import check, check_processes
from asyncrl.config.convert import convert, convert_to
from asyncrl.config.environment import expand
from asyncrl.config.errors import RecipeError, quoted
from asyncrl.config.file_checks import check_files
from asyncrl.config.identity import HOST_LOCAL
from asyncrl.config.merge import differing_keys, flatten, merge
from asyncrl.config.overrides import flag_document, keyword_document, override_document
from asyncrl.config.recipe import Recipe, to_builtins
from asyncrl.config.secrets import masked
from asyncrl.config.section import Section
from asyncrl.config.yaml_text import YamlTextError, parse

DEFAULT_RECIPE = "tiny-reverse"


S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a recipe came from.

    document: the recipe as plain mappings, defaults included; passwords are in it, `secrets.masked` shows it.
    source: the packaged name or the path. parent_diff: the keys in which it differs from its parent, which is what
    `extends:` names, or, without one, the recipe as written, before `--set` and flags.
    """

    document: dict[str, Any]
    source: str
    parent_diff: list[str]


@dataclass(frozen=True, slots=True)
class Loaded(Origin):
    """A recipe and where it came from. names_preset: it says itself which preset its objective begins with."""

    recipe: Recipe
    names_preset: bool


@dataclass(frozen=True, slots=True)
class LoadedSft(Origin):
    """A recipe of `asyncrl sft` and where it came from."""

    recipe: sft.SftRecipe


def load_recipe(
    name_or_path: str | None,
    *,
    overrides: Sequence[str] = (),
    sections: Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    single_process: bool = False,
    elsewhere: bool = False,
) -> Loaded:
    """The checked recipe of a packaged name or a path; None is the packaged default.

    overrides: `section.key=value` texts, as of `--set`. sections: the same as Python values, a mapping for each section
    (`keyword_document`). flags: values of named flags by their names, None = not given; they win over both.
    single_process: whether one process runs it all, which is what `memory://` needs. elsewhere: not on this machine,
    which need not have the files that it names. Raises RecipeError.
    """
    environ = os.environ if environ is None else environ
    source = name_or_path or DEFAULT_RECIPE
    written, parent = _read_chain(source, environ)
    if "sft" in written:
        raise RecipeError(
            f"{source} has the section sft, so it is a recipe of supervised training: asyncrl sft {source}"
        )
    over = merge(override_document(overrides), keyword_document(sections or {}))
    recipe = _resolve(Recipe, written, over, flags, environ)
    check(recipe)
    if not single_process:
        check_processes(recipe)
    if not elsewhere:
        check_files(recipe)
    document = to_builtins(recipe)
    base = parent if parent is not None else written
    given = (merge(written, over).get("objective") or {}).get("preset")
    differences = _differences(Recipe, base, document, environ)
    return Loaded(document, source, differences, recipe, names_preset=given is not None)


def load_sft_recipe(
    path: str | None,
    *,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> LoadedSft:
    """The same for `asyncrl sft`; None: the defaults alone, which need at least `data.train`. Raises RecipeError."""
    environ = os.environ if environ is None else environ
    written, parent = _read_chain(path, environ) if path else ({}, None)
    if others := sorted({"task", "collector", "learner", "objective"} & written.keys()):
        raise RecipeError(
            f"{path} has the section {others[0]}, so it is a recipe of `asyncrl run`, not of `asyncrl sft`"
        )
    recipe = _resolve(sft.SftRecipe, written, override_document(overrides), flags, environ)
    sft.check(recipe)
    document = to_builtins(recipe)
    base = parent if parent is not None else written
    differences = _differences(sft.SftRecipe, base, document, environ)
    return LoadedSft(document, path or "the defaults", differences, recipe)


def _resolve(
    kind: type[S],
    written: Mapping[str, Any],
    over: Mapping[str, Any],
    flags: Mapping[str, Any] | None,
    environ: Mapping[str, str],
) -> S:
    over = merge(over, flag_document(flags or {}))
    if "extends" in over:
        raise RecipeError("extends is a key of a recipe file; it cannot be set with --set")
    return convert_to(kind, expand(merge(written, _without_empty_sections(over)), environ, key=""))


def recipe_from_document(document: Mapping[str, Any], *, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe a run keeps in its store, as a process that joins gets it.

    overrides: `--set` texts; only keys in `HOST_LOCAL` may be set when joining. Raises RecipeError.
    """
    over = override_document(overrides)
    for key in flatten(over):
        if key not in HOST_LOCAL:
            raise RecipeError(
                f"--set {key}: a run's recipe is fixed when it is created; a process that joins may set only "
                f"{', '.join(HOST_LOCAL)}"
            )
    recipe = convert(merge(document, over))
    check(recipe)
    return recipe


def stored_document(recipe: Recipe) -> dict[str, Any]:
    """What a run keeps of its recipe in the store, for `recipe_from_document`. The store's own password stays out: who
    reads this has given it already."""
    document = to_builtins(recipe)
    document["buffer"]["url"] = masked(document["buffer"]["url"])
    return document


def packaged_recipes() -> list[str]:
    """Names of the recipes that come with asyncrl."""
    folder = files("asyncrl.configs")
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def is_path(name_or_path: str) -> bool:
    """Whether a recipe is named by its path: it has a slash or a YAML suffix. `tiny-reverse` is always the packaged
    one, whatever lies in the working folder.

    >>> is_path("tiny-reverse"), is_path("./tiny-reverse"), is_path("mine.yaml")
    (False, True, True)
    """
    return os.sep in name_or_path or "/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))


def _read_chain(source: str, environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The recipe over all it extends, and its direct parent over all that extends; None if it extends nothing."""
    chain: list[dict[str, Any]] = []
    seen: list[str] = []
    current, folder, needed_by = source, Path(), ""
    while True:
        name, text = _text(current, folder, needed_by)
        identity = str(Path(name).resolve()) if is_path(name) else name
        if identity in seen:
            raise RecipeError(f"extends goes in a circle: {' -> '.join([*seen, identity])}; remove one of them")
        seen.append(identity)
        document = _document(text, name)
        chain.append(document)
        extends = document.get("extends")
        if extends is None:
            break
        extends = expand(extends, environ, key="extends")
        if not isinstance(extends, str) or not extends:
            raise RecipeError(f"extends is {quoted(extends)}; it must be a path or one of {_names()}")
        folder = Path(name).parent if is_path(name) else Path()
        current, needed_by = extends, name
    merged: dict[str, Any] = {}
    parent: dict[str, Any] | None = None
    for document in reversed(chain):
        parent, merged = merged, merge(merged, document)
    return merged, parent if len(chain) > 1 else None


def _text(source: str, folder: Path, needed_by: str) -> tuple[str, str]:
    """(its packaged name, or its path from the working folder; its text). `needed_by`: the recipe that extends it."""
    named_by = f" (named by `extends` in {needed_by})" if needed_by else ""
    if not is_path(source):
        entry = files("asyncrl.configs") / f"{source}.yaml"
        if not entry.is_file():
            raise RecipeError(_no_such_recipe(source, folder) + named_by)
        return source, entry.read_text(encoding="utf-8")
    path = folder / Path(source).expanduser()
    try:
        return str(path), path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(
            f"there is no recipe {path}{named_by}. Give a path, or one of the packaged recipes: {_names()}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"the recipe {path} cannot be read: {error}") from None


def _no_such_recipe(source: str, folder: Path) -> str:
    said = f"there is no packaged recipe {source!r}; there is: {_names()}"
    for suffix in ("", ".yaml", ".yml"):
        if (folder / f"{source}{suffix}").is_file():
            return f"{said}. For the file write ./{source}{suffix}"
    close = difflib.get_close_matches(source, packaged_recipes(), n=1)
    return f"{said}. Did you mean {close[0]}?" if close else f"{said}. A path has a slash or ends in .yaml"


def _names() -> str:
    return ", ".join(packaged_recipes())


def _document(text: str, name: str) -> dict[str, Any]:
    try:
        document = parse(text)
    except YamlTextError as error:
        line = text.splitlines()[error.line - 1] if 0 < error.line <= len(text.splitlines()) else ""
        hint = '; inside { } and [ ] write "${NAME}" in quotes' if "${" in line else ""
        raise RecipeError(f"{name}{f', line {error.line}' if error.line else ''}: {error}{hint}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise RecipeError(f"{name} is {quoted(document)}; a recipe is a mapping of sections such as run: and learner:")
    return _without_empty_sections(document)


def _without_empty_sections(document: dict[str, Any]) -> dict[str, Any]:
    """A section with nothing under it (all of its keys commented out, say) sets nothing."""
    return {key: value for key, value in document.items() if value is not None}


def _differences(
    kind: type[Section], base: Mapping[str, Any], document: Mapping[str, Any], environ: Mapping[str, str]
) -> list[str]:
    """The keys in which a recipe differs from its base. A base may be incomplete by itself (it is there to be
    extended): then all that it does not say counts as different."""
    try:
        whole = to_builtins(convert_to(kind, expand(dict(base), environ, key="")))
    except RecipeError:
        whole = dict(base)
    return [key for key in differing_keys(whole, document) if key != "extends"]
