"""`engines`: what the engines are worth: tokens per second, and log-probs beside the learner's.

Each part is a module of its own, with rows that name it and targets of its own.
"""

from __future__ import annotations

import importlib

from asyncrl.benchmarks.frame import Measured, Say

PARTS = ("engines_speed", "engines_mismatch", "engines_vllm", "engines_endpoint")


def measure(*, quick: bool, say: Say) -> Measured:
    """All rows and targets of all parts, in order."""
    parts: list[Measured] = [
        importlib.import_module(f"asyncrl.benchmarks.{part}").measure(quick=quick, say=say) for part in PARTS
    ]
    return Measured([row for part in parts for row in part.rows], [target for part in parts for target in part.targets])
