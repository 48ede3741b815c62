"""Which GPUs a run computes on: what `learner.devices` and `collector.devices` say, and what follows where they do not.

A GPU's number is its place among those that the process sees, as torch counts them: under CUDA_VISIBLE_DEVICES=4,5,
number 0 is the GPU that the driver calls 4. Pure, but for `use_only`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import msgspec

from asyncrl.config.errors import RecipeError, quoted
from asyncrl.config.recipe import Recipe, TransformersEngine, VllmEngine

VARIABLE = "CUDA_VISIBLE_DEVICES"

LATER = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it torch asks the driver's library, not CUDA itself, whether there are GPUs. Asking CUDA would fix for the rest
of the process which ones it sees, and importing transformers asks."""


@dataclass(frozen=True, slots=True)
class Placement:
    """GPUs by number. ranks: of each rank of the learner; engines: of each engine of one collector. () where they
    compute on the CPU, elsewhere, or not at all on this host."""

    ranks: tuple[int, ...] = ()
    engines: tuple[int, ...] = ()


def check_devices(recipe: Recipe) -> None:
    """Raise RecipeError for devices that do not fit the recipe's ranks and engines, or each other."""
    learner, collector = recipe.learner, recipe.collector
    _check_numbers("learner.devices", learner.devices)
    _check_numbers("collector.devices", collector.devices)
    if learner.devices is not None and len(learner.devices) != learner.ranks:
        raise RecipeError(
            f"learner.devices is {quoted(learner.devices)} with learner.ranks {learner.ranks}: each rank has a GPU of "
            f"its own. Name {learner.ranks}, or make learner.ranks {len(learner.devices)}"
        )
    if collector.devices is not None:
        if not computes_here(recipe):
            raise RecipeError(
                f"collector.devices is {quoted(collector.devices)}, but collector.engine.type {collector.engine.type} "
                "computes on no GPU of the collector's. Leave collector.devices out"
            )
        if collector.engines % len(collector.devices):
            raise RecipeError(
                f"collector.devices is {quoted(collector.devices)} with collector.engines {collector.engines}: each "
                f"engine has a GPU of its own, or as many share each. Name {collector.engines}, or make "
                f"collector.engines {len(collector.devices)}"
            )
    if recipe.buffer.url == "embedded":  # so that both are on one host
        check_apart(recipe)


def check_apart(recipe: Recipe) -> None:
    """Raise RecipeError if learner and collector, on one host, are given some of the same GPUs, unless both have the
    same single one: that is meant."""
    learner, collector = recipe.learner.devices, recipe.collector.devices
    if learner is None or collector is None or len({*learner, *collector}) == 1:
        return
    if both := sorted(set(learner) & set(collector)):
        raise RecipeError(
            f"learner.devices is {quoted(learner)} and collector.devices {quoted(collector)}: GPU {both[0]} is in "
            "both. On one host each has GPUs of its own, or both have the same single one"
        )


def computes_here(recipe: Recipe) -> bool:
    """Whether the recipe's engines compute in the collector or in processes of its own, not in a server elsewhere."""
    return isinstance(recipe.collector.engine, TransformersEngine | VllmEngine)


def placed(recipe: Recipe, gpus: int, *, ranks: int, collects: bool) -> Placement:
    """Where a host with `gpus` GPUs computes. ranks: of the learner, on this host; collects: a collector is on it.

    What the recipe leaves open: the ranks have the first GPUs, one each, and the engines those that are left over, one
    each or as many on each; both share the only GPU of a host. Raises RecipeError: it has too few.
    """
    learner = recipe.learner.devices if ranks else None
    collector = recipe.collector.devices if collects else None
    for key, named in (("learner.devices", learner), ("collector.devices", collector)):
        if named is not None and max(named) >= gpus:
            raise RecipeError(
                f"{key} is {quoted(named)}, but this machine has {counted(gpus)}. Name those that it has, or leave "
                f"{key} out"
            )
    if gpus == 0:
        return Placement()
    if ranks and collects:
        check_apart(recipe)
    if ranks and learner is None:
        learner = _first_free(ranks, gpus, collector or [])
    if not collects or not computes_here(recipe):
        return Placement(tuple(learner or ()))
    left = collector or [gpu for gpu in range(gpus) if gpu not in (learner or ())]
    if not left and learner is not None and len(learner) == 1:
        left = learner
    if not left:
        raise RecipeError(
            f"learner.ranks is {ranks}, and this machine has {counted(gpus)}: none is left for the engines of "
            "collector.engine. Use fewer ranks, or start the collector on another host"
        )
    count = recipe.collector.engines
    used = max(some for some in range(1, min(len(left), count) + 1) if count % some == 0)
    return Placement(tuple(learner or ()), tuple(left[n % used] for n in range(count)))


def _first_free(ranks: int, gpus: int, taken: Sequence[int]) -> list[int]:
    free = [gpu for gpu in range(gpus) if gpu not in taken]
    if not free and ranks == len(taken) == 1:
        free = list(taken)
    if len(free) < ranks:
        raise RecipeError(
            f"learner.ranks is {ranks}, but this machine has {counted(len(free))} for them: each rank needs one of "
            "its own. Use fewer ranks, or name fewer in collector.devices"
        )
    return free[:ranks]


def with_devices(recipe: Recipe, placement: Placement) -> Recipe:
    """The recipe with the learner's GPUs named, as its process is given it."""
    if not placement.ranks:
        return recipe
    learner = msgspec.structs.replace(recipe.learner, devices=list(placement.ranks))
    return msgspec.structs.replace(recipe, learner=learner)


def collector_devices(placement: Placement) -> list[int]:
    """`collector.devices` for this placement; [] where it needs none."""
    return list(dict.fromkeys(placement.engines))


def visible(devices: Sequence[int], environ: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES of a process that is to see these GPUs only, whose parent has `environ`. Raises RecipeError
    if that does not let it see as many.

    >>> visible([1, 0], {})
    '1,0'
    >>> visible([1], {"CUDA_VISIBLE_DEVICES": "4,GPU-8f2a"})
    'GPU-8f2a'
    """
    given = environ.get(VARIABLE)
    if given is None:
        return ",".join(map(str, devices))
    seen = [name.strip() for name in given.split(",") if name.strip()]
    if max(devices) >= len(seen):
        raise RecipeError(
            f"devices {quoted(list(devices))} are counted among those of {VARIABLE}={given}, which has {len(seen)}. "
            f"Name others, or unset {VARIABLE}"
        )
    return ",".join(seen[device] for device in devices)


def use_only(devices: Sequence[int] | None, environ: MutableMapping[str, str] = os.environ) -> None:
    """From here on this process, and what it starts, sees these GPUs only, in this order; None: all that it sees. To be
    called before anything computes. Raises RecipeError."""
    environ.setdefault(LATER, "1")
    if devices is not None:
        environ[VARIABLE] = visible(devices, environ)


def _check_numbers(key: str, devices: Sequence[int] | None) -> None:
    if devices is None:
        return
    if not devices or min(devices) < 0:
        raise RecipeError(f"{key} is {quoted(devices)}; name GPUs by their numbers, such as [0, 1], or leave it out")
    if len(set(devices)) < len(devices):
        raise RecipeError(f"{key} is {quoted(devices)}, with one GPU twice. Name each once")


def counted(gpus: int) -> str:
    """For people: no GPU, 1 GPU, 2 GPUs."""
    return {0: "no GPU", 1: "1 GPU"}.get(gpus, f"{gpus} GPUs")
