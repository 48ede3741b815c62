"""Where what can be made again is kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """`$ASYNCRL_CACHE`, else `~/.cache/asyncrl`."""
    chosen = os.environ.get("ASYNCRL_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "asyncrl"
