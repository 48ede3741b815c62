"""asyncrl: asynchronous reinforcement-learning post-training for language models.

import asyncrl

run = asyncrl.run("tiny-reverse", max_trajectory_age=1)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.runtime.api import Run, RunFailed, open_run, run

__version__ = "0.1.0"

__all__ = ["Run", "RunFailed", "__version__", "open_run", "run"]


def __getattr__(name: str) -> Any:
    """What Python users call, loaded when it is used: `import asyncrl` itself stays light."""
    if name not in __all__:
        raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")
    from asyncrl.runtime import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
