"""What a run's rows say of the weights that sampled them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.buffers.archive import Archive
from asyncrl.learners.recording import Recording
from asyncrl.schema import to_batch
from asyncrl.staleness import Weights


def test_versions_without_a_checksum_leave_no_stamp(
    tmp_path: Path, make_row: Callable[..., Any], make_group: Callable[..., Any]
) -> None:
    def row(version: int, member: int, *, checksum: str) -> Any:
        made = make_row([1], [2, 3], [-1.0, -1.0], reward=1.0, weights=Weights(1, version), member=member)
        return replace(made, spans=tuple(replace(span, checksum=checksum) for span in made.spans))

    hashed, unhashed = [row(0, 0, checksum="ab"), row(0, 1, checksum="")], [row(1, 0, checksum="")]
    archive = Archive(tmp_path / "archive")
    archive.write(1, 0, [to_batch(make_group(hashed))])
    archive.write(1, 1, [to_batch(make_group(unhashed, ticket=1))])
    recording = Recording(folder=tmp_path, branch=[(1, 0, 1)], forks={1: (0, 0)}, kept={}, budgets={}, notes=[])
    assert recording.stamps(0) == {0: {"ab"}}
