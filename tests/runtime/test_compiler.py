"""`learner.compile` on a CPU wants a compiler, and a machine without one is told before the run."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from asyncrl.config.errors import RecipeError
from asyncrl.config.recipe import Learner
from asyncrl.runtime.compiler import check

COMPILED = Learner(compile=True)


@pytest.fixture
def complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of headers and programs, which are all that there is."""
    (tmp_path / "Python.h").touch()
    (tmp_path / "g++").touch(mode=0o755)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def test_a_machine_with_compiler_and_headers_may_compile(complete: Path) -> None:
    check(COMPILED, gpu=False)


def test_what_is_missing_is_said_with_its_fix(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "icpx")
    with pytest.raises(RecipeError, match=r"no C\+\+ compiler icpx here.*environment variable CXX, or set learner"):
        check(COMPILED, gpu=False)
    monkeypatch.delenv("CXX")
    (complete / "Python.h").unlink()
    with pytest.raises(RecipeError, match=rf"Python\.h\) are not in {complete}"):
        check(COMPILED, gpu=False)


def test_nothing_is_missing_where_nothing_is_compiled_on_the_cpu(
    complete: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    check(Learner(), gpu=False)
    check(COMPILED, gpu=True)
