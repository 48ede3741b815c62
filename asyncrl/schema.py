"""The trajectory record: one group is one Arrow record batch in IPC stream form, one row per trajectory.

(interface only; being written)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from asyncrl.staleness import Weights

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Completion-or-sequence tokens [start, end) (positions in `token_ids`) sampled by `weights` with `checksum`."""

    weights: Weights
    start: int
    end: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One training row. Per-token arrays cover the WHOLE sequence (prompt, sampled tokens, tool text), length T."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]  # 1 on sampled tokens
    logprobs: NDArray[np.float32]  # behaviour, nats; 0 where the mask is 0
    versions: NDArray[np.int32]  # -1 where the mask is 0
    member: int
    prompt_length: int
    spans: tuple[VersionSpan, ...]
    reward: float  # NaN = unscored
    reward_parts: Mapping[str, float | None]
    finish_reason: str  # stop | length | abort | error
    failure: str = ""  # class, from the verifier or the engine
    segment: int = 0
    turn_offsets: tuple[int, ...] = ()
    turn_rewards: tuple[float, ...] = ()
    first_token: float = 0.0
    done: float = 0.0
    scored: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one ticket, as the collector hands them over."""

    ticket: int
    attempt: int
    lineage: int  # of the newest span
    task: str
    row_id: str
    collector: str
    engine: str
    sampling: Mapping[str, Any]  # temperature, top_p, top_k, min_p, seed
    issued: float
    put: float
    trajectories: Sequence[Trajectory]


def encode(group: Group) -> bytes:
    """Arrow IPC stream: schema with `schema_version` in its metadata, one record batch."""
    raise NotImplementedError


def decode(payload: bytes | memoryview, *, validate: bool = True) -> pa.RecordBatch:
    """Zero-copy. Raises ValueError: other schema version, truncated, trailing bytes, failed validation."""
    raise NotImplementedError


def digest(payload: bytes) -> str:
    """xxh3_64 hex of a payload."""
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Packed:
    """Groups back to back: per-token columns of all rows, and where each row starts. Zero-copy where Arrow allows."""

    token_ids: NDArray[np.int32]  # [N]
    loss_mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    cu_seqlens: NDArray[np.int64]  # [rows + 1]
    rewards: NDArray[np.float64]  # [rows]; NaN = unscored
    groups: NDArray[np.int64]  # [rows] index of the row's group in the batch
    table: pa.Table


def pack(batches: Sequence[pa.RecordBatch]) -> Packed:
    raise NotImplementedError
