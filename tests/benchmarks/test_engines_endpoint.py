"""The benchmark of the endpoint measures the endpoint: more work in each call is seen."""

from __future__ import annotations

import pytest

from asyncrl.benchmarks import engines_endpoint


@pytest.mark.slow
def test_the_rows_of_the_endpoint_are_whole_and_the_control_sees_more_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_endpoint, "EPISODES", 5)
    monkeypatch.setattr(engines_endpoint, "ENGINE_S", (0.0, 0.01))
    monkeypatch.setattr(engines_endpoint, "CONTROL_S", 0.05)
    said: list[str] = []
    measured = engines_endpoint.measure(quick=True, say=said.append)
    rows = {row["server"]: row for row in measured.rows}
    assert set(rows) == {"endpoint", "echo", "control"}
    assert all(row["calls"] == 5 * 4 and row["part"] == "endpoint" for row in rows.values())
    assert rows["control"]["cpu_ms"] > rows["endpoint"]["cpu_ms"] + 40
    assert len(said) == 3
