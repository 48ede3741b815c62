"""The source of the published SGLang package, as the wheel has it. `make test-sglang` downloads it."""

from __future__ import annotations

import ast
import zipfile
from functools import cached_property
from pathlib import Path

import pytest


class Source:
    """One file of the package."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def define(self, name: str) -> ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef:
        """The only class or function of this name."""
        (found,) = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
        ]
        return found

    def function(self, name: str, cls: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
        """A method."""
        (found,) = [
            node
            for node in self.define(cls).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
        ]
        return found

    def fields(self, cls: str) -> dict[str, ast.AnnAssign]:
        """The annotated fields of a class, in order."""
        return {
            node.target.id: node
            for node in self.define(cls).body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }


class Package:
    """The files of a wheel, by their path below `sglang/`."""

    def __init__(self, wheel: Path) -> None:
        self._wheel = zipfile.ZipFile(wheel)
        self._read: dict[str, Source] = {}

    def __getitem__(self, path: str) -> Source:
        if path not in self._read:
            self._read[path] = Source(self._wheel.read(f"sglang/{path}").decode())
        return self._read[path]

    def below(self, folder: str) -> list[Source]:
        names = [name.removeprefix("sglang/") for name in self._wheel.namelist()]
        return [self[name] for name in names if name.startswith(folder) and name.endswith(".py")]


@pytest.fixture(scope="session")
def sglang() -> Package:
    folder = Path(__file__).parents[2] / ".sglang"
    wheels = sorted(folder.glob("sglang-*.whl"))
    assert len(wheels) == 1, f"{folder} has {len(wheels)} wheels of sglang; run these tests with `make test-sglang`"
    return Package(wheels[0])
