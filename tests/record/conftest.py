"""Groups to encode: one by hand, and a hypothesis strategy of legal ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from asyncrl.schema import Group, Trajectory, VersionSpan
from asyncrl.staleness import Weights


def trajectory(
    member: int = 0, *, prompt: int = 3, sampled: int = 4, version: int = 2, reward: float = 1.0, lineage: int = 1
) -> Trajectory:
    length = prompt + sampled
    mask = np.zeros(length, np.uint8)
    mask[prompt:] = 1
    return Trajectory(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask == 1, np.float32(-0.5), np.float32(0)),
        versions=np.where(mask == 1, np.int32(version), np.int32(-1)),
        member=member,
        prompt_length=prompt,
        spans=(VersionSpan(Weights(lineage, version), prompt, length, "00ff"),) if sampled else (),
        reward=reward,
        reward_parts={"reward": reward},
        finish_reason="stop",
        turn_offsets=(prompt,),
    )


def group(*trajectories: Trajectory, ticket: int = 7, lineage: int = 1) -> Group:
    return Group(
        ticket=ticket,
        attempt=1,
        lineage=lineage,
        task="reverse",
        row_id="train-7",
        collector="c0",
        engine="c0/0",
        sampling={"temperature": 0.5},
        issued=10.0,
        put=12.0,
        trajectories=trajectories or (trajectory(0), trajectory(1, sampled=2, reward=0.0)),
    )


@pytest.fixture
def make_trajectory() -> Callable[..., Trajectory]:
    return trajectory


@pytest.fixture
def make_group() -> Callable[..., Group]:
    return group
