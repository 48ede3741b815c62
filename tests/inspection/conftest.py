"""Groups whose text is easy to read: a token is a byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from asyncrl.schema import Group, Trajectory, VersionSpan
from asyncrl.staleness import Weights


def as_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def trajectory(
    prompt: str,
    stretches: Sequence[tuple[bytes, int | None]],
    *,
    member: int = 0,
    reward: float = 1.0,
    parts: dict[str, float | None] | None = None,
    failure: str = "",
    logprob: float = -0.5,
    done: float = 12.0,
) -> Trajectory:
    """`stretches`: text and the version that sampled it, None where nobody did."""
    ids, versions, spans = list(prompt.encode()), [-1] * len(prompt.encode()), []
    for content, version in stretches:
        start = len(ids)
        ids += content
        versions += [-1 if version is None else version] * len(content)
        if version is not None and content:
            spans.append(VersionSpan(Weights(1, version), start, len(ids), f"sum{version}"))
    mask = np.array([version >= 0 for version in versions], np.uint8)
    return Trajectory(
        token_ids=np.array(ids, np.int32),
        loss_mask=mask,
        logprobs=np.where(mask == 1, np.float32(logprob), np.float32(0)),
        versions=np.array(versions, np.int32),
        member=member,
        prompt_length=len(prompt.encode()),
        spans=tuple(spans),
        reward=reward,
        reward_parts={"exact": None if math.isnan(reward) else reward} if parts is None else parts,
        finish_reason="stop",
        failure=failure,
        first_token=11.0,
        done=done,
        scored=13.0,
    )


def group(*rows: Trajectory, ticket: int = 7, attempt: int = 1) -> Group:
    return Group(
        ticket=ticket,
        attempt=attempt,
        lineage=1,
        task="reverse",
        row_id=f"train-{ticket}",
        collector="collector-0",
        engine="collector-0/0",
        sampling={"temperature": 1.0},
        issued=10.0,
        put=14.5,
        trajectories=rows,
    )


@pytest.fixture
def decode() -> Callable[[Sequence[int]], str]:
    return as_bytes


@pytest.fixture
def make_trajectory() -> Callable[..., Trajectory]:
    return trajectory


@pytest.fixture
def make_group() -> Callable[..., Group]:
    return group
