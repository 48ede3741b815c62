from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from asyncrl.benchmarks.pipeline_model import Pipeline, group_length, simulate
from asyncrl.benchmarks.simulated import judge, observe, recipe_of
from asyncrl.buffers.archive import Archive
from asyncrl.buffers.base import State, TicketRow
from asyncrl.schema import Group, Trajectory, VersionSpan, decode, encode
from asyncrl.staleness import Weights


def test_the_recipe_gives_the_engine_the_time_and_slots_of_the_model() -> None:
    setting = Pipeline(k=2, c=2.0, B=4, G=3)
    recipe = recipe_of(setting, step_s=0.5)
    engine = recipe.collector.engine
    assert engine.type == "simulated"
    assert engine.slots == setting.slots == 24
    assert engine.token_s * engine.mean_tokens == pytest.approx(setting.scale * 0.5)
    assert recipe.run.max_steps > setting.steps  # the last measured step still has tickets behind it


def archived(ticket: int, versions: list[int]) -> Group:
    """A group of one, whose tokens were sampled by these versions."""
    starts = [0, *(n for n in range(1, len(versions)) if versions[n] != versions[n - 1]), len(versions)]
    return Group(
        ticket=ticket,
        attempt=0,
        lineage=1,
        task="simulated",
        row_id=str(ticket),
        collector="c",
        engine="e",
        sampling={"temperature": 1.0},
        issued=1.0,
        put=2.0,
        trajectories=[
            Trajectory(
                token_ids=np.zeros(1 + len(versions), np.int32),
                loss_mask=np.array([0, *(1 for _ in versions)], np.uint8),
                logprobs=np.array([0, *(-1 for _ in versions)], np.float32),
                versions=np.array([-1, *versions], np.int32),
                member=0,
                prompt_length=1,
                spans=tuple(
                    VersionSpan(Weights(1, versions[first]), 1 + first, 1 + end, f"{versions[first]:016x}")
                    for first, end in pairwise(starts)
                ),
                reward=1.0,
                reward_parts={"exact": 1.0},
                finish_reason="stop",
            )
        ],
    )


def row(ordinal: int, state: State, attempt: int = 0) -> TicketRow:
    return TicketRow(
        ordinal=ordinal,
        state=state,
        attempt=attempt,
        reason="",
        trained=None,
        owner="",
        lo=None,
        has_payload=False,
        size=0,
    )


def test_losses_and_ages_come_from_archive_and_ledger_alone(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    archive.write(1, 0, [decode(encode(archived(0, [0, 0])))])
    archive.write(1, 1, [decode(encode(archived(2, [0, 1, 1])))])
    archive.write(1, 2, [decode(encode(archived(3, [0, 1, 2])))])
    rows = [
        row(0, State.TRAINED),
        row(1, State.STALE, attempt=2),
        row(2, State.TRAINED),
        row(3, State.LEASED),
        row(4, State.ISSUED),
    ]
    setting = Pipeline(k=1, B=1, G=1, policy="mask")
    found = judge(archive, rows, setting, efficiency=0.5)
    length = [group_length(setting, ticket) for ticket in range(5)]
    assert (found.efficiency, found.max_age, found.mean_age) == (0.5, 1, pytest.approx(2 / 3))
    assert found.lost == pytest.approx(1 / 4)
    assert found.masked == pytest.approx(1 / 8)  # version 0 at step 2
    assert found.attempts == pytest.approx(7 / 5)
    trained = (length[0] + length[2] + length[3]) / 3
    assert found.length_ratio == pytest.approx(trained / (sum(length) / 5))
    assert found.lost_length_ratio == pytest.approx(length[1] / trained)
    # the very same archive under a policy that masks nothing has trained a token beyond the bound
    assert judge(archive, rows, Pipeline(k=1, B=1, G=1), efficiency=0.5).max_age == 2


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("policy", ["wait", "drop", "mask", "requeue"])
async def test_a_real_pipeline_keeps_its_bound_and_is_no_faster_than_physics(tmp_path: Path, policy: str) -> None:
    bounded = Pipeline(k=1, B=4, G=4, steps=12, policy=policy)  # type: ignore[arg-type]
    found = (await observe(bounded, step_s=0.3, folder=tmp_path)).outcome
    assert found.max_age <= 1
    if policy == "wait":
        assert found.lost == 0
    assert 0 < found.efficiency <= simulate(bounded).efficiency * 1.1  # a real run parts from the model by chance, too


@pytest.mark.slow
@pytest.mark.asyncio
async def test_without_the_bound_the_same_measure_sees_older_tokens(tmp_path: Path) -> None:
    unbounded = Pipeline(k=6, B=4, G=4, steps=12)
    assert (await observe(unbounded, step_s=0.3, folder=tmp_path)).outcome.max_age > 1
