"""`asyncrl.run` from Python: as the command line, in a script, in a notebook's running event loop, in any thread."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import asyncrl
from asyncrl.buffers.base import State, TicketRow
from asyncrl.cli.main import cli
from asyncrl.config.errors import RecipeError
from asyncrl.runtime.finished import table
from asyncrl.runtime.folder import RunFolderError
from asyncrl.staleness import Weights
from asyncrl.tasks.base import TaskError

LIMIT_S = 120.0
SHORT: dict[str, Any] = {"run": {"max_steps": 3}, "eval": {"at_start": False, "at_end": False}}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_its_names_are_there_without_being_loaded() -> None:
    assert set(asyncrl.__all__) <= set(dir(asyncrl))
    assert issubclass(asyncrl.RunFailed, Exception)
    with pytest.raises(AttributeError, match="module 'asyncrl' has no attribute 'rum'"):
        asyncrl.rum  # noqa: B018


@pytest.mark.parametrize(
    ("sections", "setting"),
    [
        ({"run": {"max_stepz": 3}}, "run.max_stepz=3"),
        ({"lerner": {"learning_rate": 1e-4}}, "lerner.learning_rate=1e-4"),
        ({"collector": {"num_generations": 4}}, "collector.num_generations=4"),
        ({"collector.group_size": 1}, "collector.group_size=1"),
        (
            {"task": {"type": "single-turn", "data": {"train": Path("no.jsonl")}}},
            "task={type: single-turn, data: {train: no.jsonl}}",
        ),
        ({"task": {"type": "mine:Task"}}, "task={type: 'mine:Task'}"),
        ({"model": {"path": Path("./no-such-folder")}}, "model.path=no-such-folder"),
        ({"run": {"output_dir": "/proc/self/mine"}}, "run.output_dir=/proc/self/mine"),
    ],
)
def test_what_is_wrong_is_said_in_the_words_of_the_command_line(
    here: Path, sections: dict[str, Any], setting: str
) -> None:
    with pytest.raises(Exception, match=" ") as said_there:
        cli.main(["run", "--set", setting], standalone_mode=False)
    with pytest.raises(type(said_there.value)) as said_here:
        asyncrl.run(**sections)
    assert str(said_here.value) == str(said_there.value)
    assert not (here / "runs").exists(), "nothing was begun"


def test_the_flag_wins_over_a_section_and_is_checked_like_one(here: Path) -> None:
    with pytest.raises(RecipeError, match=r"buffer\.max_trajectory_age is -1"):
        asyncrl.run(max_trajectory_age=-1, buffer={"max_trajectory_age": 2})


def test_a_class_of_a_notebook_needs_a_file(here: Path) -> None:
    with pytest.raises(TaskError, match=r"__main__:Mine: .*write it into a file"):
        asyncrl.run(task={"type": "__main__:Mine"})


# --- what a run holds -------------------------------------------------------------------------------------------------

STEPS = [
    {"step": 1, "version": 1, "reward/mean": 0.25, "age/tokens": {"0": 9}, "lost": {}, "ess": None, "skipped": False},
    {"step": 2, "version": 2, "reward/mean": 1, "age/tokens": {"1": 7}, "lost": {}, "ess": 0.5, "pass_rate": [1, 2]},
]


def test_the_table_has_every_name_once_and_null_where_a_step_has_none(tmp_path: Path) -> None:
    found = table(STEPS)
    assert found.column_names == [*STEPS[0], "pass_rate"]
    assert found["reward/mean"].to_pylist() == [0.25, 1.0]
    assert found["ess"].to_pylist() == [None, 0.5]
    assert found["age/tokens"].to_pylist() == [{"0": 9, "1": None}, {"0": None, "1": 7}]
    assert found.flatten().column("age/tokens.1").to_pylist() == [None, 7]
    assert found["lost"].type == pa.null()
    pq.write_table(found, tmp_path / "steps.parquet")
    assert pq.read_table(tmp_path / "steps.parquet")["step"].to_pylist() == [1, 2]
    assert table([]).num_rows == 0


@pytest.fixture
def made(here: Path) -> Path:
    """The folder of a run that redid step 2 and was then moved."""
    folder = here / "runs" / "mine-20260101-1"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").touch()
    records = [
        {"event": "start", "lineage": 1, "version": 0, "parent": [0, 0]},
        *STEPS,
        {"event": "start", "lineage": 2, "version": 1, "parent": [1, 1]},
        {**STEPS[1], "lineage": 2},
        {"event": "checkpoint", "path": "/elsewhere/mine/checkpoints/version-000002"},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.mark.parametrize("run", [None, "mine", "runs/mine-20260101-1", Path("runs/mine-20260101-1")])
def test_a_run_is_opened_by_name_by_folder_or_as_the_newest(made: Path, run: Any) -> None:
    opened = asyncrl.open_run(run)
    assert opened.folder == made
    assert opened.metrics["step"].to_pylist() == [1, 2]
    assert opened.metrics["lineage"].to_pylist() == [None, 2], "the step that was done again counts once"
    assert [event["event"] for event in opened.events] == ["start", "start", "checkpoint"]
    assert opened.checkpoint == made / "checkpoints" / "version-000002"
    assert repr(opened) == f"Run({str(made)!r}: not ended)"
    with pytest.raises(RunFolderError, match="has no summary"):
        _ = opened.summary


def test_the_ledger_has_the_rows_that_the_present_weights_go_by(made: Path) -> None:
    run = asyncrl.open_run()
    assert run.ledger.num_rows == 0

    def row(ordinal: int, state: State, *uses: Weights) -> TicketRow:
        return TicketRow(ordinal, state, 0, str(state), None, "", None, False, 0, uses=uses)

    run.archive.ledger.write(Weights(1, 1), [row(1, State.FAILED), row(0, State.TRAINED, Weights(1, 0))])
    run.archive.ledger.write(Weights(1, 1), [row(0, State.TRAINED, Weights(1, 0))])  # its learner died in between
    run.archive.ledger.write(Weights(1, 2), [row(2, State.TRAINED, Weights(1, 1))])  # of weights that were rewound
    assert run.ledger["ordinal"].to_pylist() == [0, 1]
    assert run.ledger["state"].to_pylist() == ["trained", "failed"]
    assert run.ledger["uses"].to_pylist() == [[{"lineage": 1, "version": 0}], []]


def test_the_folder_of_a_supervised_training_says_what_it_is(made: Path) -> None:
    records = [{"event": "start", "step": 0}, {"step": 1, "loss": 2.5}]
    (made / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    summary = {"step": 1, "steps": 9, "heldout_loss_before": 3.0, "heldout_loss": None}
    (made / "summary.json").write_text(json.dumps(summary))
    run = asyncrl.open_run()
    assert repr(run) == f"Run({str(made)!r}: 1 steps, held-out loss 3.000 -> -)"
    assert run.metrics["loss"].to_pylist() == [2.5]
    with pytest.raises(RunFolderError, match=r"is of `asyncrl sft`, which has no tickets"):
        _ = run.ledger


def test_what_a_run_has_not_yet_is_said(made: Path) -> None:
    (made / "metrics.jsonl").unlink()
    assert asyncrl.open_run().metrics.num_rows == 0
    with pytest.raises(RunFolderError, match="no checkpoint yet"):
        _ = asyncrl.open_run().checkpoint
    with pytest.raises(RunFolderError, match="no run 'other'"):
        asyncrl.open_run("other")


# --- real runs --------------------------------------------------------------------------------------------------------


def complete(run: asyncrl.Run, folder: Path) -> None:
    assert run.folder.parent == folder / "runs"
    assert run.metrics["step"].to_pylist() == [1, 2, 3]
    assert run.summary["steps"] == 3
    assert run.events[-1]["event"] == "end"
    assert (run.checkpoint / "model.safetensors").is_file()
    assert set(run.archive.table(columns=["trained_version"])["trained_version"].to_pylist()) == {0, 1, 2}
    assert repr(run).endswith(": 3 steps, success - -> -)")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_notebooks_cell_runs_it_in_a_running_loop_without_a_terminal(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)

    async def cell() -> asyncrl.Run:
        return asyncrl.run(max_trajectory_age=0, buffer={"max_trajectory_age": 2}, **SHORT)

    run = asyncio.run(cell())
    complete(run, here)
    assert [line.split()[1] for line in shown.getvalue().splitlines() if line.startswith("step")] == [
        "1/3",
        "2/3",
        "3/3",
    ]
    assert "\x1b" not in shown.getvalue()
    assert run.metrics["age/max"].to_pylist() == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_runs_in_a_thread_that_is_not_the_main_one(here: Path) -> None:
    found: list[asyncrl.Run] = []
    prompts = [*(f"reverse {n}" for n in range(120, 140)), "1" * 600]
    (here / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": one, "answer": "1"}) for one in prompts))
    task = {"type": "single-turn", "data": {"train": "rows.jsonl", "bad_rows": "skip"}}
    thread = threading.Thread(target=lambda: found.append(asyncrl.run("tiny-reverse", task=task, **SHORT)))
    thread.start()
    thread.join(LIMIT_S)
    complete(found[0], here)
    kept = json.loads((found[0].folder / "data.json").read_bytes())["task.data"]
    assert (kept["train"] + kept["heldout"], kept["read"]["train"]["left_out"]["too-long"]["rows"]) == (20, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_fails_raises_the_reason(here: Path) -> None:
    (here / "late.py").write_text(
        "import sys\n"
        "from asyncrl.tasks.base import Row\n"
        "if 'collector' in sys.argv: raise RuntimeError('only in the collector')\n"
        "class Late:\n"
        "    def rows(self, split): return [Row(split, 'reverse 123')]\n"
        "    def score(self, row, answer): return 1.0\n"
    )
    with pytest.raises(asyncrl.RunFailed, match="only in the collector"):
        asyncrl.run(task={"type": "late:Late"}, **SHORT)


SCRIPT = """
import asyncrl
try:
    asyncrl.run("tiny-reverse", run={"max_steps": 100000}, eval={"at_start": False})
except KeyboardInterrupt:
    run = asyncrl.open_run()
    print("stopped", run.summary["stopped"], run.checkpoint.is_dir(), run.metrics.num_rows >= 2, flush=True)
"""


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(300)
def test_an_interrupt_leaves_a_checkpoint_and_no_process(
    start: Callable[..., Any],
    eventually: Callable[..., bool],
    descendants: Callable[[int], list[Any]],
    is_alive: Callable[[int], bool],
    here: Path,
) -> None:
    script = start("-c", f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler){SCRIPT}", cwd=here)
    assert eventually(
        LIMIT_S, lambda: list(here.glob("runs/*/recipe.yaml")) and asyncrl.open_run().metrics.num_rows >= 2
    )
    children = [child.pid for child in descendants(script.pid)]
    assert len(children) >= 3, "store, learner, collector"
    os.kill(script.pid, signal.SIGINT)
    said, errors = script.communicate(timeout=LIMIT_S)
    assert script.returncode == 0, said + errors
    assert said.splitlines()[-1] == "stopped True True True"
    assert not [pid for pid in children if is_alive(pid)]
