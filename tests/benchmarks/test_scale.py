"""`bench scale`: what it counts, what its targets catch, and short runs of real processes with their controls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from asyncrl.benchmarks.scale import DROP, OPERATIONS, SMALL, operation_rows, over_bound, run_row, targets, wait_rows
from asyncrl.benchmarks.scale_clients import Report, group_seconds
from asyncrl.benchmarks.scale_run import Observed, account, allow_files, observe
from asyncrl.buffers.base import BufferError, State, Ticket, TicketRow
from asyncrl.staleness import Weights

RUN_LIMIT_S = 120.0


def row(ordinal: int, state: State, *, attempt: int = 0, has_payload: bool = True) -> TicketRow:
    return TicketRow(
        ordinal=ordinal,
        state=state,
        attempt=attempt,
        reason="",
        trained=None,
        owner="",
        lo=None,
        has_payload=has_payload,
        size=1,
    )


def test_a_group_is_lost_if_it_is_neither_trained_nor_there() -> None:
    seen = Observed()
    told = Report(puts={"held": 5}, held=[(0, 0), (1, 0), (2, 0), (3, 0), (4, 1)], seconds={"put": [1.0]}, cpu_s=2.0)
    rows = [
        row(1, State.HELD),
        row(2, State.HELD, has_payload=False),  # lost
        row(3, State.ISSUED, attempt=1),  # lost: it is made again
        row(4, State.LEASED, attempt=1),
    ]
    account(seen, [(0, 0), (9, 0), (9, 1)], [told, told], rows)
    assert (seen.lost, seen.twice, seen.puts["held"], seen.clients_cpu_s) == (4, 1, 10, 4.0)
    assert seen.seconds["put"] == [1.0, 1.0]


def test_a_group_takes_the_same_time_whoever_makes_it_and_the_mean_is_what_was_asked_for() -> None:
    setting = replace(SMALL, group_s=3.0)
    tickets = [Ticket(n, 0, Weights(1, 0), 0.0) for n in range(2_000)]
    seconds = [group_seconds(setting, ticket) for ticket in tickets]
    assert seconds == [group_seconds(setting, ticket) for ticket in tickets]
    assert fmean(seconds) == pytest.approx(3.0, rel=0.05)


def test_more_collectors_than_the_system_has_files_are_refused_with_the_fix() -> None:
    with pytest.raises(BufferError, match="ulimit -Hn"):
        allow_files(10**9)


def observed(**changed: object) -> Observed:
    good = Observed(trained=160, wall_s=1.0, store_cpu_s=0.1, connections=30, peak_bytes=1_000)
    for name, value in changed.items():
        setattr(good, name, value)
    return good


def test_each_thing_that_can_go_wrong_misses_a_target_of_its_own() -> None:
    setting = replace(SMALL, step_s=0.1)
    stay, dropped = observed(peak_bytes=10**9), observed(lost=1)

    def missed(run: Observed, stay: Observed = stay, dropped: Observed = dropped) -> int:
        return sum(not target.met for target in targets(setting, run, observed(), stay, dropped))

    assert missed(observed()) == 0
    for wrong in (
        observed(trained=100),
        observed(store_cpu_s=0.9),
        observed(peak_bytes=10**9),
        observed(lost=1),
        observed(twice=1),
        observed(problems=["x"]),
    ):
        assert missed(wrong) == 1
    assert missed(observed(), observed(), observed()) == 2


@pytest.mark.asyncio
@pytest.mark.timeout(RUN_LIMIT_S)
async def test_a_short_run_loses_nothing_and_stays_within_its_bound_where_settled_rows_leave(tmp_path: Path) -> None:
    seen, stay = [await observe(replace(SMALL, archive=archive), tmp_path / str(archive)) for archive in (True, False)]
    assert (seen.lost, seen.twice, seen.problems) == (0, 0, [])
    assert seen.trained == (SMALL.steps - SMALL.max_age - 1) * SMALL.groups_per_step
    assert seen.connections >= 3 * SMALL.collectors
    assert over_bound(SMALL, seen) <= 1.0 < over_bound(SMALL, stay)
    assert {row["operation"] for row in operation_rows(seen)} == set(OPERATIONS)
    assert run_row("short", SMALL, seen)["puts_held"] >= SMALL.steps * SMALL.groups_per_step
    assert all(row["seconds"] >= 0 for row in wait_rows(seen))


@pytest.mark.asyncio
@pytest.mark.timeout(RUN_LIMIT_S)
async def test_a_group_that_is_gone_after_its_put_was_answered_is_found_missing(tmp_path: Path) -> None:
    assert (await observe(DROP, tmp_path / "drop")).lost == 1
