"""The resolved recipe as text: what `--dry-run` prints and the run folder keeps."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.representer import RoundTripRepresenter

from asyncrl.config.derived import IN_ORDER, derive, given_slots
from asyncrl.config.recipe import Recipe, VllmEngine, to_builtins
from asyncrl.config.secrets import masked
from asyncrl.config.sft import SftRecipe
from asyncrl.config.yaml_text import number

_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_ ./:@+*=-]*")
"""Text that may stand without quotes, if its meaning allows. The emitter would leave more, such as `?0` in a list or a
line separator of Unicode, which its own parser reads as something else."""


class _Representer(RoundTripRepresenter):
    """Numbers the way recipes write them; null spelled out, since an empty value reads like a mistake."""


_Representer.add_representer(
    float, lambda representer, value: representer.represent_scalar("tag:yaml.org,2002:float", number(value))
)
_Representer.add_representer(
    str,
    lambda representer, value: representer.represent_scalar(
        "tag:yaml.org,2002:str", value, style=None if _PLAIN.fullmatch(value) else '"'
    ),
)
_Representer.add_representer(
    type(None), lambda representer, value: representer.represent_scalar("tag:yaml.org,2002:null", "null")
)


_EXTENDS = re.compile(r"# extends (.+), merged in below")


def resolved_yaml(recipe: Recipe | SftRecipe, *, run_folder: str | None = None, names_preset: bool = True) -> str:
    """Every key with its value, defaults included, passwords as `***`; what follows from them is a `# derived` comment.

    Read back, the text gives the same recipe, so a derived number never turns into one that was asked for.
    `run_folder`: the folder if it is known; else the pattern of its name is shown. `names_preset`: see `Loaded`.
    """
    document = masked(to_builtins(recipe))
    extends = document.pop("extends")
    tree = _commented(document)
    if extends is not None:
        tree.yaml_set_start_comment(f"extends {extends}, merged in below")
    if recipe.run.output_dir is None:
        _note(tree["run"], "output_dir", run_folder or f"runs/{recipe.run.name}-<date>-<n>")
    if isinstance(recipe, Recipe):
        _note_derived(tree, recipe)
        if not names_preset:
            age = recipe.buffer.max_trajectory_age
            _note(tree["objective"], "preset", f"the default where buffer.max_trajectory_age is {age}")
    return dump(tree)


def extended_by(resolved: str) -> str | None:
    """What the recipe of that `resolved_yaml` extends; None if nothing."""
    found = _EXTENDS.match(resolved)
    return found[1] if found else None


def _note_derived(tree: CommentedMap, recipe: Recipe) -> None:
    derived = derive(recipe)
    _note(
        tree["learner"],
        "groups_per_step",
        f"x group_size {recipe.collector.group_size} = {derived.trajectories_per_step} trajectories a step",
    )
    if recipe.learner.updates_per_step > 1:
        _note(tree["learner"], "updates_per_step", f"each by {derived.groups_per_update} of a step's groups")
    _note(
        tree["buffer"],
        "max_bytes",
        f"{derived.max_bytes} bytes; a full window reserves {'' if recipe.model.max_length else 'at least '}"
        f"{derived.reserved_bytes}, {derived.group_bytes} a group",
    )
    if recipe.buffer.lookahead is None:
        order = ", strictly in order" if derived.lookahead == IN_ORDER else ""
        _note(tree["buffer"], "lookahead", f"{derived.lookahead:g}{order}")
    if recipe.buffer.dynamic_sampling:
        empty = recipe.buffer.max_empty_fills * recipe.learner.groups_per_step
        _note(tree["buffer"], "max_empty_fills", f"{empty} groups in a row")
    if recipe.buffer.max_uses > 1:
        groups = recipe.learner.groups_per_step
        _note(
            tree["buffer"],
            "max_uses",
            f"{groups / recipe.buffer.max_uses:g} of a step's {groups} groups are fresh, or more",
        )
    if derived.fresh_per_step:
        _note(tree["buffer"], "min_fresh", f"{derived.fresh_per_step} of a step's groups, at least")
    if recipe.collector.min_members is not None:
        _note(tree["collector"], "min_members", f"of {recipe.collector.group_size}")
    engine = recipe.collector.engine
    if given_slots(engine) is None:
        slots = "max_num_seqs" if isinstance(engine, VllmEngine) else "slots"
        _note(tree["collector"]["engine"], slots, f"{derived.engine_slots} requests at once")
    if recipe.collector.max_concurrent_groups == "auto":
        _note(tree["collector"], "max_concurrent_groups", f"{derived.most_groups} groups")


def _note(section: CommentedMap, key: str, text: str) -> None:
    section.yaml_add_eol_comment(f"derived: {text}", key)


def dump(document: Mapping[str, Any]) -> str:
    """Plain values as YAML 1.2 text that `yaml_text.parse` reads back unchanged."""
    yaml = YAML()
    yaml.Representer = _Representer
    yaml.width = 4096  # a value never wraps
    stream = io.StringIO()
    yaml.dump(document if isinstance(document, CommentedMap) else _commented(document), stream)
    return stream.getvalue()


def _commented(value: Any) -> Any:
    """The same values in the containers that carry comments; lists stay on one line, but for the tasks of a mixture,
    which hold sections."""
    if isinstance(value, Mapping):
        return CommentedMap((key, _commented(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        sequence = CommentedSeq(_commented(item) for item in value)
        if not any(isinstance(item, Mapping) and isinstance(item.get("task"), Mapping) for item in value):
            sequence.fa.set_flow_style()
        return sequence
    return value
