"""What an interrupted benchmark has measured already, so that the next call goes on where it ended."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

import asyncrl
from asyncrl.config.cache_folder import cache_root

LIBRARIES = ("numpy", "torch", "transformers")


class Journal:
    """Results by their key, one JSON line each, in asyncrl's cache folder. They belong to the code that measured them:
    with one changed line of asyncrl, or another torch, nothing is found and everything is measured anew."""

    def __init__(self, name: str) -> None:
        self._path = cache_root() / "bench" / f"{name}-{code_hash()}.jsonl"

    def finished(self) -> dict[tuple[Any, ...], Any]:
        """What was measured. Of a line that was being written when its process died nothing is kept."""
        found: dict[tuple[Any, ...], Any] = {}
        for line in self._path.read_text().splitlines() if self._path.exists() else []:
            try:
                key, result = json.loads(line)
            except ValueError:
                continue
            found[tuple(key)] = result
        return found

    def add(self, key: Sequence[Any], result: Any) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps([list(key), result]) + "\n")

    def forget(self) -> None:
        """The benchmark is through: the next call measures."""
        self._path.unlink(missing_ok=True)


def code_hash() -> str:
    """Of every module of asyncrl and the versions of the libraries that compute."""
    digest = xxhash.xxh3_64()
    for name in LIBRARIES:
        digest.update(f"{name} {importlib.metadata.version(name)}\n".encode())
    root = Path(asyncrl.__file__).parent
    modules = (Path(folder) / file for folder, _, files in os.walk(root, followlinks=True) for file in files)
    for module in sorted(path for path in modules if path.suffix == ".py"):
        digest.update(f"{module.relative_to(root)}\n".encode())
        digest.update(module.read_bytes())
    return digest.hexdigest()
