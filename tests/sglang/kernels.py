"""Runs SGLang's own hash kernel on a CPU: Triton's operations, as far as it uses them, on numpy arrays.

One program of the grid after the other; scalars are arrays of one element, so that they wrap as 32-bit numbers do.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np


class Lanes(np.ndarray):  # type: ignore[type-arg]
    """A value in every lane."""

    def to(self, dtype: Any) -> Lanes:
        return self.astype(dtype).view(Lanes)


def lanes(values: Any, dtype: Any) -> Lanes:
    return (
        (np.atleast_1d(np.asarray(values, dtype=np.uint64)) & np.uint64(0xFFFFFFFFFFFFFFFF)).astype(dtype).view(Lanes)
    )


@dataclass(frozen=True)
class Pointer:
    memory: Any
    at: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)


def _load(pointer: Pointer, mask: Any, other: int, cache_modifier: str = "") -> Lanes:
    at = np.atleast_1d(np.asarray(pointer.at))
    inside = np.where(mask, at, 0)
    return np.where(mask, pointer.memory[inside], other).astype(pointer.memory.dtype).view(Lanes)


def _store(pointer: Pointer, value: Any) -> None:
    pointer.memory[pointer.at] = np.asarray(value)[0]


def _sum(values: Any, axis: int) -> Lanes:
    return lanes([int(values.sum(dtype=np.uint64)) & 0xFFFFFFFF], np.uint32)


def gpu_tensor_hash(source: str) -> Callable[[bytes], int]:
    """The function of this name in `kernels/ops/memory/gpu_tensor_hash.py`, for the bytes of a tensor."""
    program = SimpleNamespace(id=0)
    tl = SimpleNamespace(
        constexpr=Any,
        uint32=np.uint32,
        uint64=np.uint64,
        program_id=lambda axis: program.id,
        full=lambda shape, value, dtype: lanes(value & 0xFFFFFFFF, dtype),
        zeros=lambda shape, dtype: lanes(0, dtype),
        zeros_like=np.zeros_like,
        arange=lambda start, end: np.arange(start, end).view(Lanes),
        static_range=range,
        where=lambda mask, one, other: np.where(mask, one, other).view(Lanes),
        sum=_sum,
        load=_load,
        store=_store,
    )
    names: dict[str, Any] = {"tl": tl}
    wanted = ("_rotl32", "_fmix32", "hash_tiles32_kernel_blocked", "add_tree_reduce_u64_kernel", "_final_splitmix64")
    tree = ast.parse(source)
    driver = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "gpu_tensor_hash")
    for node in tree.body:
        if isinstance(node, ast.Assign) or (isinstance(node, ast.FunctionDef) and node.name in wanted):
            if isinstance(node, ast.FunctionDef):
                node.decorator_list = []  # triton's compiler
            exec(compile(ast.Module([node], []), "gpu_tensor_hash.py", "exec"), names)
    defaults = {
        argument.arg: ast.literal_eval(default)
        for argument, default in zip(driver.args.kwonlyargs, driver.args.kw_defaults, strict=True)
        if default is not None
    }

    def run(data: bytes) -> int:
        seed, tile, chunk = defaults["seed"], defaults["tile_words"], defaults["reduce_chunk"]
        words = np.frombuffer(data + bytes(-len(data) % 4), dtype=np.uint32)
        current = np.zeros(-(-len(words) // tile), dtype=np.uint64)
        with np.errstate(over="ignore"):
            for program.id in range(len(current)):
                names["hash_tiles32_kernel_blocked"](
                    Pointer(words),
                    Pointer(current),
                    len(words),
                    seed & 0xFFFFFFFF,
                    ((seed * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF,
                    FM_C1=names["FMIX32_C1"],
                    FM_C2=names["FMIX32_C2"],
                    POS_A=names["POS_C1"],
                    POS_B=names["POS_C2"],
                    TILE=tile,
                    BLOCK=defaults["block_words"],
                    USE_CG=True,
                )
            while len(current) > 1:
                following = np.zeros(-(-len(current) // chunk), dtype=np.uint64)
                for program.id in range(len(following)):
                    names["add_tree_reduce_u64_kernel"](Pointer(current), Pointer(following), len(current), CHUNK=chunk)
                current = following
        return int(names["_final_splitmix64"](int(current[0])))

    return run
