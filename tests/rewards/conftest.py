"""Pools over scorers that are written in the test, and a way to wait for a process that is not a child."""

from __future__ import annotations

import os
import select
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from asyncrl.rewards.pool import VerifierPool
from asyncrl.rewards.sandbox import Ended, Sandbox
from asyncrl.rewards.scoring import Scoring
from tests.rewards.walls import LIMIT_S, MEMORY, WITHOUT, RunSource

NUMBERS = count()
HEAD = "import os, subprocess, sys, time\n\nclass Scorer:\n    def part_weights(self): return {}\n"

MakePool = Callable[..., AbstractAsyncContextManager[Scoring]]


@pytest.fixture
def write_scorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The factory "module:Scorer" of a module that the worker can import; the text is the body of the class."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(body: str) -> str:
        name = f"scorer_of_test_{next(NUMBERS)}"
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        (tmp_path / f"{name}.py").write_text(HEAD + lines)
        return f"{name}:Scorer"

    return write


@pytest.fixture
def make_pool(write_scorer: Callable[[str], str]) -> MakePool:
    @asynccontextmanager
    async def make(
        body: str,
        *,
        workers: int = 1,
        timeout_s: float = 30.0,
        arguments: dict[str, Any] | None = None,
        memory_bytes: int | None = None,
        limited: dict[str, float] | None = None,
    ) -> AsyncIterator[Scoring]:
        pool = VerifierPool(write_scorer(body), arguments or {}, workers=workers, memory_bytes=memory_bytes)
        scoring = Scoring(pool, timeout_s=timeout_s, limited=limited)
        await scoring.start()
        try:
            yield scoring
        finally:
            await scoring.close()

    return make


def ends_within(pid: int, limit_s: float) -> bool:
    """Whether a process, which need not be a child, is gone (or a zombie) within the limit."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], limit_s)[0])
    finally:
        os.close(descriptor)


@pytest.fixture
def process_ends_within() -> Callable[[int, float], bool]:
    return ends_within


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[Callable[[str], Sandbox]]:
    """By the wall that is left out; "" for none."""
    made: dict[str, Sandbox] = {}

    def sandbox(without: str) -> Sandbox:
        if without not in made:
            made[without] = Sandbox(memory_bytes=MEMORY, _without=WITHOUT.get(without, frozenset()))
        return made[without]

    yield sandbox
    for sandbox_ in made.values():
        sandbox_.close()


@pytest.fixture
def run(sandboxes: Callable[[str], Sandbox]) -> RunSource:
    def run(source: str, *, without: str = "", limit_s: float = LIMIT_S) -> Ended:
        return sandboxes(without).run(source, "", limit_s=limit_s)

    return run


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that every user may write to."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)
