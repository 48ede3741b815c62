"""What reward models take of a collector's machine, each in a process of its own. Pure, but for `reward_model_shapes`.

Certain are the weights, s P: s of the part's dtype, P what a sequence classifier loads of its files, which is all but a
language model's head. Of a batch of N tokens with its padding, in conversations of at most L tokens, there is at most
what one layer would keep for a backward pass (`learners/memory.py`), since each is gone before the next one's is there,
and the mask of what attends to what, once as truth values and once as numbers: N L (1 + s). Keys and values are not
kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from asyncrl.config.devices import Placement, collector_devices, counted
from asyncrl.config.errors import RecipeError
from asyncrl.config.recipe import Recipe, tasks_by_key
from asyncrl.config.rewards import RewardModel, part_name
from asyncrl.learners.memory import PROCESS, Part, layer_bytes
from asyncrl.learners.shapes import Shapes, shapes_of

LANGUAGE_HEAD = "lm_head.weight"
CLASSIFIER = ("score.", "classifier.")
"""How the names of a classifier's own weights begin."""


def reward_models(recipe: Recipe) -> dict[str, RewardModel]:
    """Those of all tasks, by their key in the recipe, as task.rewards[0]."""
    return {
        f"{key}.rewards[{n}]": part
        for key, task in tasks_by_key(recipe.task).items()
        for n, part in enumerate(task.rewards)
        if isinstance(part, RewardModel)
    }


def reward_model_shapes(recipe: Recipe) -> dict[str, Shapes | str]:
    """Of each model, by the key of its part, or why they are not known. Reads what is on this machine."""
    return {key: shapes_of(part.path, _folder(part)) for key, part in reward_models(recipe).items()}


def reward_model_parts(
    recipe: Recipe, shapes: Mapping[str, Shapes | str], placement: Placement, gpus: int
) -> tuple[list[Part], list[str]]:
    """The parts of those whose shapes are known, and for each of the others a line that says why it has none. gpus: of
    the collector's machine. Raises RecipeError for a device that the collector does not see."""
    parts: list[Part] = []
    unknown: list[str] = []
    for key, model in reward_models(recipe).items():
        name, found = part_name(model), shapes.get(key, "nobody has looked")
        gpu = _gpu(key, model, placement, gpus)
        parts.append(Part(name, "process", PROCESS, certain=False))
        if isinstance(found, str):
            unknown.append(f"{name}: {found}")
            continue
        size = 4 if model.dtype == "float32" else 2
        tokens, alone = model.max_tokens_per_batch, min(recipe.collector.sampling.max_tokens, model.max_length)
        smaller = (f"{key}.dtype", f"{key}.path")
        batch = (f"{key}.max_tokens_per_batch", f"{key}.max_length")
        most, least = (
            _batch_bytes(found, size, many, longest) for many, longest in ((tokens, model.max_length), (alone, alone))
        )
        parts += [
            Part(name, f"weights, {model.dtype}", size * parameters(found), True, smaller, gpu is not None, gpu=gpu),
            Part(name, f"a batch of {tokens} tokens", most, False, batch, gpu is not None, least=least, gpu=gpu),
        ]
    return parts, unknown


def parameters(shapes: Shapes) -> int:
    """Of the sequence classifier with one label that is loaded from these files."""
    held = {name: shape for name, shape in shapes.tensors.items() if name != LANGUAGE_HEAD}
    head = 0 if any(name.startswith(CLASSIFIER) for name in held) else shapes.hidden  # by formula there is none
    return head + sum(math.prod(shape) for shape in held.values())


def _batch_bytes(shapes: Shapes, size: int, tokens: int, longest: int) -> int:
    dtype = "float32" if size == 4 else "bfloat16"
    return layer_bytes(shapes, dtype, tokens, tokens) + tokens * longest * (1 + size)


def _gpu(key: str, part: RewardModel, placement: Placement, gpus: int) -> int | None:
    """Its number on this machine; None: the part is on the CPU. The process sees the GPUs that its collector does."""
    if part.device == "cpu":
        return None
    seen = collector_devices(placement) or list(range(gpus))
    at = int(part.device.partition(":")[2] or 0)
    if at >= len(seen):
        raise RecipeError(
            f"{key}.device is {part.device}, but the collector sees {counted(len(seen))}. Use cpu, or name one that it "
            "sees, counted from 0; which ones it sees, collector.devices says"
        )
    return seen[at]


def _folder(part: RewardModel) -> Path | None:
    """Its local one, if it is on this machine."""
    own = Path(part.path).expanduser()
    if own.is_dir():
        return own
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(part.path, "config.json", revision=part.revision)
    except ValueError:  # not the name of a model
        return None
    return Path(cached).parent if isinstance(cached, str) else None
