"""What an SGLang server must say of the tensors it serves, if they are what was published.

The server hashes its live parameters (`/weights_checker`, action "checksum"): by the names and in the layout that it
computes with, which fuses matrices by rows and pads vocabularies with rows of zeros. `expected` is the same of
published tensors: their bytes in that layout, under that hash. One server with one GPU serves each of them whole.

Sources, of SGLang 0.5.23: srt/utils/weight_checker.py, srt/managers/mm_utils.py (`tensor_hash`),
kernels/ops/memory/gpu_tensor_hash.py, srt/model_loader/auto_loader.py, srt/layers/vocab_parallel_embedding.py.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncrl.weights.base import WeightsError

if TYPE_CHECKING:
    from asyncrl.weights.base import StagedWeights

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""What the server fuses, in the order of the rows."""

PADDED = ("embed_tokens", "lm_head")
"""Tables that have a row for each token: up to a multiple of PAD_ROWS there are rows of zeros behind them."""

PAD_ROWS = 64

TILE = 8192
"""32-bit words that are hashed together."""

TILES = 64
"""That are hashed in one go here: 2 MiB, which stays in a processor's cache."""

SEED_1 = np.uint32(0x243F6A88)
SEED_2 = np.uint32(((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
PLACE_1, PLACE_2 = np.uint32(0x27D4EB2D), np.uint32(0x165667B1)
MIX_1, MIX_2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
MASK = (1 << 64) - 1

Words: TypeAlias = NDArray[np.uint32]
Bytes: TypeAlias = NDArray[np.uint8]


def layout(live: Collection[str], published: Collection[str], tied: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The published tensors that each live one consists of, by rows.

    Raises WeightsError for a live tensor that was not published, and for a published one that is not served.
    """
    parts = {name: _parts(name, published, tied) for name in live}
    if unpublished := sorted(name for name, found in parts.items() if not found):
        raise WeightsError(f"the SGLang server also computes with {', '.join(unpublished[:5])}: not published")
    served = {part for found in parts.values() for part in found}
    if missing := [name for name in published if name not in served]:
        raise WeightsError(f"the SGLang server has no {', '.join(missing[:5])}, under this name or fused with others")
    return parts


def _parts(name: str, published: Collection[str], tied: Mapping[str, str]) -> tuple[str, ...]:
    """Of one live tensor; () if it is not made of published ones."""
    if (source := tied.get(name, name)) in published:
        return (source,)
    path, _, leaf = name.rpartition(".")
    parent, _, whole = path.rpartition(".")
    parts = tuple(f"{parent}.{part}.{leaf}" for part in FUSED.get(whole, ()))
    return parts if all(part in published for part in parts) else ()


def expected(staged: StagedWeights, live: Collection[str], *, device: str) -> dict[str, str]:
    """By live tensor, the checksum that a server on `device` must report of it. Reads all bytes; for a thread. Raises
    WeightsError as `layout` does."""
    from asyncrl.weights.manifest import tensor_bytes  # imports torch

    fingerprint = fingerprint_on(device)
    found = {}
    for name, parts in layout(live, staged.tensors, staged.tied).items():
        arrays = [np.frombuffer(tensor_bytes(part, staged.tensors[part]), dtype=np.uint8) for part in parts]
        if any(f".{table}." in f".{name}" for table in PADDED):
            rows = staged.tensors[parts[0]].shape[0]
            arrays.append(np.zeros(-rows % PAD_ROWS * (arrays[0].nbytes // rows), dtype=np.uint8))
        found[name] = f"{fingerprint(arrays):016x}"
    return found


def fingerprint_on(device: str) -> Callable[[Sequence[Bytes]], int]:
    """SGLang hashes where its tensors are."""
    return tiled if device == "cuda" else sha256


def sha256(arrays: Sequence[Bytes]) -> int:
    """The first 64 bits, big-endian, over the arrays one after the other."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.data)
    return int.from_bytes(digest.digest()[:8], "big")


def tiled(arrays: Sequence[Bytes]) -> int:
    """SGLang's hash of tensors on a GPU, over the arrays one after the other: each 32-bit word is mixed with its place,
    the words of a tile are summed and mixed, the tiles summed. 64 bits; no words give 0."""
    whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    whole = np.concatenate([whole, np.zeros(-whole.nbytes % 4, dtype=np.uint8)]) if whole.nbytes % 4 else whole
    words: Words = whole.view(np.uint32)
    if not len(words):
        return 0
    count = np.array([4 * len(words) & 0xFFFFFFFF], dtype=np.uint32)
    starts = range(0, len(words), TILE * TILES)
    with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1)) as pool:  # numpy lets go of the interpreter
        total = sum(pool.map(lambda start: _tiles(words[start : start + TILE * TILES], start, count), starts))
    return _last_mix(total & MASK)


def _tiles(words: Words, start: int, count: Words) -> int:
    """The sum over whole tiles, and a last one that need not be whole; `start`: the place of the first word."""
    places = np.arange(start, start + len(words), dtype=np.uint64).astype(np.uint32)
    total = 0
    for place, seed, turn, shift in ((PLACE_1, SEED_1, 15, 32), (PLACE_2, SEED_2, 13, 0)):
        turned: Words = (places << np.uint32(turn)) | (places >> np.uint32(32 - turn))
        placed: Words = (places * place + seed) ^ turned
        mixed = _mix(words ^ placed)
        sums = np.add.reduceat(mixed, np.arange(0, len(words), TILE), dtype=np.uint32)
        total += sum(_mix(sums ^ count).tolist()) << shift
    return total


def _mix(words: Words) -> Words:
    """murmur3's finalizer of 32 bits."""
    words = (words ^ (words >> np.uint32(16))) * MIX_1
    words = (words ^ (words >> np.uint32(13))) * MIX_2
    return words ^ (words >> np.uint32(16))


def _last_mix(total: int) -> int:
    """splitmix64's finalizer."""
    total = (total ^ (total >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    total = (total ^ (total >> 27)) * 0x94D049BB133111EB & MASK
    return total ^ (total >> 31)
