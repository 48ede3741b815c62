"""`bench soak`: what it kills and when, what it counts from an archive, and a short soak of real processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from asyncrl.benchmarks.soak import (
    LAST_STEPS,
    PHASES,
    Account,
    Kill,
    Soaked,
    Struck,
    account,
    control,
    schedule,
    soak,
    targets,
)
from asyncrl.benchmarks.soak_child import POINTS
from asyncrl.buffers.archive import Archive
from asyncrl.schema import Group, Trajectory, VersionSpan, decode, encode
from asyncrl.staleness import Weights

SOAK_LIMIT_S = 900.0


def test_every_round_kills_once_in_each_phase_and_the_points_take_turns() -> None:
    kills = schedule(10 * len(PHASES) + 3, seed=0)
    assert len(kills) == 10 * len(PHASES) + 3
    assert {phase for phase, _ in kills[: len(PHASES)]} == set(PHASES)
    assert min(Counter(phase for phase, _ in kills).values()) == 10
    points = Counter(point for _, point in kills)
    for phase, names in POINTS.items():
        assert all(points[name] >= 10 // len(names) for name in names), phase
    assert kills[: len(PHASES)] != kills[len(PHASES) : 2 * len(PHASES)]


def write(archive: Archive, lineage: int, step: int, groups: Sequence[tuple[int, Sequence[int]]]) -> None:
    """The part of a step that trained these tickets, with these members of each."""
    archive.write(lineage, step, [decode(encode(group(step, ticket, members))) for ticket, members in groups])


def group(step: int, ticket: int, members: Sequence[int]) -> Group:
    trajectories = [
        Trajectory(
            token_ids=np.array([1, 0], np.int32),
            loss_mask=np.array([0, 1], np.uint8),
            logprobs=np.array([0, -1], np.float32),
            versions=np.array([-1, step], np.int32),
            member=member,
            prompt_length=1,
            spans=(VersionSpan(Weights(1, step), 1, 2, f"{step:016x}"),),
            reward=1.0,
            reward_parts={"exact": 1.0},
            finish_reason="stop",
        )
        for member in members
    ]
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
        trajectories=trajectories,
    )


def counted(archive: Archive, steps: int) -> Account:
    return account(archive, steps=steps, groups_per_step=2, group_size=2)


def test_what_only_a_dead_lineage_trained_is_lost(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    write(archive, 1, 0, [(0, (0, 1)), (1, (0, 1))])
    write(archive, 1, 1, [(2, (0, 1)), (3, (0, 1))])
    assert counted(archive, 2) == Account(tickets=4, lost=0, duplicated=0)
    write(archive, 2, 1, [(2, (0, 1)), (4, (0, 1))])  # ticket 4 is not one of the run's: its steps have room for four
    assert counted(archive, 2) == Account(tickets=4, lost=1, duplicated=0)


def test_a_ticket_in_two_steps_counts_as_trained_twice_and_a_torn_group_as_lost(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    write(archive, 1, 0, [(0, (0, 1)), (1, (0,))])
    write(archive, 1, 1, [(0, (0, 1)), (2, (0, 1)), (3, (0, 1))])
    assert counted(archive, 2) == Account(tickets=4, lost=1, duplicated=1)


def test_a_step_without_a_part_is_no_account(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    write(archive, 1, 0, [(0, (0, 1)), (1, (0, 1))])
    with pytest.raises(FileNotFoundError, match="1 steps of 2"):
        counted(archive, 2)


def soaked(lost: int = 0, duplicated: int = 0, wrong: str = "", audit: str = "") -> Soaked:
    kills = [Struck(phase, phase, "", 1.0) for phase in PHASES for _ in range(15)]
    kills[0] = kills[0]._replace(wrong=wrong)
    return Soaked(kills, Account(100, lost, duplicated), audit, 1, 10.0)


def test_each_thing_that_can_go_wrong_misses_a_target_of_its_own() -> None:
    controls = {"undo-nothing": soaked(lost=9), "undo-everything": soaked(duplicated=9)}

    def missed(run: Soaked) -> list[str]:
        return [target.name for target in targets(run, controls) if not target.met]

    assert missed(soaked()) == []
    for wrong in (soaked(lost=1), soaked(duplicated=1), soaked(wrong="hung"), soaked(wrong="ended"), soaked(audit="x")):
        assert len(missed(wrong)) == 1
    assert len([t for t in targets(soaked(), dict.fromkeys(controls, soaked())) if not t.met]) == 2


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(SOAK_LIMIT_S)
def test_a_kill_in_each_phase_and_rank_loses_nothing_and_trains_nothing_twice(tmp_path: Path) -> None:
    said: list[str] = []
    kills = schedule(len(PHASES), seed=1)
    kills += [Kill("rank", point) for point in ("told.before", "rank-gather.before")]  # while it waits; at a checkpoint
    found = soak(tmp_path / "soak", kills, say=said.append)
    assert [kill for kill in found.kills if kill.wrong] == [], said
    assert {kill.phase for kill in found.kills} == set(PHASES)
    assert (found.account.lost, found.account.duplicated) == (0, 0)
    assert found.account.tickets > len(kills) * LAST_STEPS
    assert found.audit == ""


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(SOAK_LIMIT_S)
def test_without_the_question_what_survived_a_soak_finds_it(tmp_path: Path) -> None:
    said: list[str] = []
    assert control(tmp_path / "lost", "undo-nothing", say=said.append).account.lost > 0, said
    assert control(tmp_path / "twice", "undo-everything", say=said.append).account.duplicated > 0, said
