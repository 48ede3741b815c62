"""A version as safetensors files: which file has which tensor where. Pure; both sides compute it from the manifest.

The format is 8 bytes of header size, the header (JSON) and the tensors' bytes, without gaps. What the safetensors
package writes it takes from memory and puts on a local disk; written here, the bytes go from an image to any file
system without a copy between. The package reads the result, as does everything that reads safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.weights.manifest import DTYPES, Manifest, TensorSpec

SHARD_BYTES = 4 * 10**9
"""A file ends before the tensor that would make it larger: every file system and store takes files of this size."""

INDEX = "model.safetensors.index.json"
"""Beside several files: which has which tensor, as transformers wants it."""

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file: `header`, then the bytes of `tensors` in their order."""

    name: str
    header: bytes
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(spec.nbytes for spec in self.tensors)


def shards(manifest: Manifest, metadata: Mapping[str, str], *, shard_bytes: int = SHARD_BYTES) -> list[Shard]:
    """The files of a version, one at least. metadata: of each header, for people."""
    # Larger elements first, as the package does: each tensor then begins at a multiple of its element's size, without
    # which readers cannot map it. The order that counts is the manifest's.
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in sorted(manifest.tensors, key=lambda spec: -DTYPES[spec.dtype].itemsize):
        if groups[-1] and size + spec.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    if len(groups) == 1:
        return [Shard("model.safetensors", _header(groups[0], metadata), tuple(groups[0]))]
    return [
        Shard(f"model-{i:05}-of-{len(groups):05}.safetensors", _header(group, metadata), tuple(group))
        for i, group in enumerate(groups, 1)
    ]


def index(files: list[Shard]) -> bytes:
    """The content of `INDEX`."""
    size = sum(spec.nbytes for shard in files for spec in shard.tensors)
    places = {spec.name: shard.name for shard in files for spec in shard.tensors}
    return json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=1).encode()


def _header(tensors: list[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for spec in tensors:
        entries[spec.name] = {
            "dtype": _CODES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    content = json.dumps(entries, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)  # so that the data begins at a multiple of 8
    return len(content).to_bytes(8, "little") + content
