"""When two recipes describe the same run."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from asyncrl.config.merge import flatten, is_under
from asyncrl.config.recipe import Buffer, Recipe, Telemetry, to_builtins
from asyncrl.config.secrets import masked

HOST_LOCAL = (
    "model.path",
    "collector.devices",
    "collector.engine.url",
    "collector.endpoint.host",
    "collector.endpoint.port",
)
"""Keys a process that joins a run may set for its own machine."""

NOT_IDENTITY = (
    "extends",
    "run.output_dir",
    "buffer.url",
    "learner.devices",
    "weights.interface",
    "telemetry.wandb",
    "telemetry.tensorboard",
    *HOST_LOCAL,
)
"""Keys, and what is below them, that say where things are or go, or where the recipe came from, not what the run is."""


def identity(recipe: Recipe | dict[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of everything that makes a run the run it is. Passwords are masked: changing one changes
    nothing."""
    document = to_builtins(recipe) if isinstance(recipe, Recipe) else recipe
    return {key: value for key, value in flatten(masked(document)).items() if not is_under(key, NOT_IDENTITY)}


def recipe_hash(recipe: Recipe | dict[str, Any]) -> str:
    """16 hex digits over `identity`, the same on every machine and for every order of keys."""
    return hashlib.sha256(msgspec.json.encode(identity(recipe), order="deterministic")).hexdigest()[:16]


def identity_differences(one: Recipe | dict[str, Any], other: Recipe | dict[str, Any]) -> list[str]:
    """Dotted keys that make `recipe_hash` differ; [] if it is the same."""
    left, right = identity(one), identity(other)
    missing = object()
    return [key for key in {**left, **right} if left.get(key, missing) != right.get(key, missing)]


def portable(recipe: Recipe) -> Recipe:
    """The same run for any machine: without the folder, the store, the GPUs, the network and the sinks that this one
    had. A model's path stays, and so does the URL of an engine that is a server."""
    return msgspec.structs.replace(
        recipe,
        extends=None,
        run=msgspec.structs.replace(recipe.run, output_dir=None),
        buffer=msgspec.structs.replace(recipe.buffer, url=Buffer().url),
        collector=msgspec.structs.replace(recipe.collector, devices=None),
        learner=msgspec.structs.replace(recipe.learner, devices=None),
        weights=msgspec.structs.replace(recipe.weights, interface=None),
        telemetry=Telemetry(),
    )
