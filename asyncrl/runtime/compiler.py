"""Whether `learner.compile` can work on this machine: torch writes C++ for a CPU, and has it compiled. No torch."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from asyncrl.config.errors import RecipeError
from asyncrl.config.recipe import Learner


def check(config: Learner, *, gpu: bool) -> None:
    """gpu: the learner computes on one, for which torch writes other code. Raises RecipeError."""
    if not config.compile or gpu:
        return
    # As torch looks for it (torch._inductor.config.cpp.cxx).
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(name) is None:
        raise RecipeError(
            f"learner.compile is true, but there is no C++ compiler {name} here, which torch needs for a CPU's code. "
            "Install it, name another in the environment variable CXX, or set learner.compile to false"
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise RecipeError(
            f"learner.compile is true, but Python's headers (Python.h) are not in {headers}, and torch compiles with "
            "them. Install them (python3-dev, python3-devel), or set learner.compile to false"
        )
