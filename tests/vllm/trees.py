"""Which processes a test has started, and which of them are vLLM's."""

from __future__ import annotations

from contextlib import suppress

import psutil

from tests.processes import children

VLLM = "VLLM::"
"""How vLLM's processes name themselves: VLLM::EngineCore, VLLM::Worker."""


def having(pid: int, word: str) -> list[psutil.Process]:
    """Descendants of a process with an argument that begins with `word`, or of a name that does."""
    found = []
    for child in children(pid):
        with suppress(psutil.NoSuchProcess):  # they come and go
            if any(part.startswith(word) for part in child.cmdline()):
                found.append(child)
    return found
