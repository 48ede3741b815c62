"""`bench data`, small: memory stays, and a list of the rows would show if it did not."""

from __future__ import annotations

import pytest

from asyncrl.benchmarks import data


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_million_rows_take_the_memory_of_a_few() -> None:
    said: list[str] = []
    measured = data.measure(quick=True, say=said.append)
    memory = [target for target in measured.targets if "memory" in target.name]
    assert len(memory) == 5
    assert not [target for target in memory if not target.met], said
