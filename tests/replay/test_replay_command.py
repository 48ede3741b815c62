"""`run.deterministic` and `asyncrl buffer replay`, with the processes a person starts."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.buffers.archive import Archive

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

SMALL = (
    "--set=run.deterministic=true",
    "--set=learner.groups_per_step=4",
    "--set=learner.checkpoint.every_steps=2",
    "--set=eval.at_start=false",
    "--set=eval.at_end=false",
)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_synchronous_runs_and_a_replay_have_the_same_bits(cli: Cli, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        ran = cli("run", *SMALL, "--max-trajectory-age", "0", f"--set=run.output_dir={folder}", "--set=run.max_steps=3")
        assert ran.returncode == 0, ran.stderr
    replayed = cli("buffer", "replay", "one", "--check")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.splitlines()[-1] == (
        "3 steps replayed: all 4 versions that left a trace are equal bit for bit, 2 checkpoints too"
    )
    for version in (2, 3):
        weights = [
            tmp_path / folder / f"checkpoints/version-{version:06}/model.safetensors" for folder in ("one", "two")
        ]
        assert weights[0].read_bytes() == weights[1].read_bytes()
    archives = [Archive(tmp_path / folder / "archive") for folder in ("one", "two")]
    served = [{stamp for step in archive.parts() for stamp in archive.stamps(step)} for archive in archives]
    assert len(served[0]) == 3
    assert served[0] == served[1]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_resumed_run_is_replayed_and_a_changed_part_is_named(cli: Cli, tmp_path: Path) -> None:
    for more in (
        ("--set=run.output_dir=run", "--set=run.max_steps=3", *SMALL),
        ("--resume=run", "--set=run.max_steps=5"),
    ):
        ran = cli("run", *more)
        assert ran.returncode == 0, ran.stderr
    replayed = cli("buffer", "replay", "run", "--check", "--out", "again")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "note" not in replayed.stdout
    # A version that was served for a moment only may have left no trace.
    all_equal = r"5 steps replayed: all [456] versions that left a trace are equal bit for bit, 2 checkpoints too"
    assert re.fullmatch(all_equal, replayed.stdout.splitlines()[-1])
    assert (tmp_path / "again" / "version-000005" / "model.safetensors").is_file()

    part = tmp_path / "run" / "archive" / "step-0002-000003.parquet"
    table = pq.read_table(part)
    rewards = table["reward"].to_pylist()
    rewards[0] = 1.0 - rewards[0]
    changed = table.set_column(table.schema.get_field_index("reward"), "reward", pa.array(rewards))
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), part)
    replayed = cli("buffer", "replay", "run", "--check")
    assert replayed.returncode == 1
    different = r"5 steps replayed: equal up to version [123], DIFFERENT from version 4 on: .* is not as recorded"
    assert re.fullmatch(different, replayed.stdout.splitlines()[-1])
    assert cli("buffer", "replay", "run").returncode == 0, "without --check it only tells"


def test_what_cannot_be_replayed_is_said_in_a_line(cli: Cli, tmp_path: Path) -> None:
    nothing = cli("buffer", "replay", "nope")
    assert nothing.returncode == 2
    assert nothing.stderr.startswith("Error: no run 'nope' in ")
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("run: {name: x}\n")
    untrained = cli("buffer", "replay", "empty")
    assert untrained.returncode == 2
    assert untrained.stderr == (
        f"Error: {folder}/metrics.jsonl tells of no learner's start: there is nothing to replay\n"
    )
