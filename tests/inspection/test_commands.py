"""The commands on a run whose every ticket is known, with its store live, stopped, and gone."""

from __future__ import annotations

import asyncio
import contextlib
import io
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pyarrow.parquet as pq
import pytest

from asyncrl.buffers.server import EmbeddedServer
from asyncrl.cli.main import main
from asyncrl.schema import SUPPORTED_SCHEMA
from tests.inspection.recorded import DAMAGED, HELD, ISSUED, LEASED, MOVED, NAME, TRAINED, record


@dataclass
class Said:
    code: int
    out: str
    err: str


def asyncrl(*words: object) -> Said:
    """Run a command in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["asyncrl", *map(str, words)]),
    ):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return Said(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("runs") / NAME)


@pytest.fixture(scope="module")
def live(run: Path) -> Iterator[Path]:
    """The run's folder, its store serving, as while it trains."""
    server = EmbeddedServer(run)
    asyncio.run(server.start())
    yield run
    asyncio.run(server.stop())


def test_status_adds_up(live):
    said = asyncrl("buffer", "status", live)
    assert said.code == 0, said.err
    assert "tickets       8 = 0 returned + 2 issued + 2 held + 2 leased + 2 trained + 0 stale" in said.out
    assert "7 in the store, 1 archived" in said.out
    assert "collector-0  1/0     2" in said.out


def test_ls_shows_rows_in_a_state_from_a_ticket_on_up_to_a_limit(live):
    def tickets(*options: object) -> list[str]:
        said = asyncrl("buffer", "ls", live, *options)
        assert said.code == 0, said.err
        return [line.split()[0] for line in said.out.splitlines()[1:]]

    assert tickets() == [str(n) for n in range(8)]
    assert tickets("--state", "held") == [str(HELD), str(DAMAGED)]
    assert tickets("--state", "held", "--state", "issued", "--from", DAMAGED, "--limit", 2) == ["5", "6"]
    assert tickets("--limit", 3) == ["0", "1", "2"]
    assert tickets("--state", "filtered") == []


def test_head_is_about_the_step_after_the_leased_one(live):
    said = asyncrl("buffer", "head", live)
    assert said.code == 0, said.err
    assert said.out.startswith("step 3 trains 2 of the 2 oldest live tickets; 4 are live, 2 of them ready\n")
    assert said.out.endswith("a batch of 2 stands: no lease has to wait\n")


def test_show_of_a_held_ticket_has_text_rewards_and_timeline(live):
    said = asyncrl("buffer", "show", HELD, live)
    assert said.code == 0, said.err
    assert said.out.startswith(f"ticket {HELD}  held, attempt 0\n")
    assert f"prompt      reverse {HELD}>\nanswer 0    [0]{HELD}!\nanswer 1    [0]{HELD}!\n" in said.out
    assert "0       1.000   1.000  2       stop     -0.500" in said.out
    assert [line.split("  ")[0] for line in said.out.splitlines() if line.count(":") == 2 and "." in line] == [
        "issued", "first token", "done", "scored", "put",
    ]  # fmt: skip


@pytest.mark.parametrize("ticket", [MOVED, TRAINED[1]])
def test_show_of_a_trained_ticket_comes_from_the_archive(live, ticket):
    said = asyncrl("buffer", "show", ticket, live)
    assert said.code == 0, said.err
    assert "trained by  the step from version 0 of lineage 1" in said.out
    assert f"prompt      reverse {ticket}>" in said.out
    assert {"put", "leased", "trained"} <= {line.split()[0] for line in said.out.splitlines() if line}


@pytest.mark.parametrize(("ticket", "state"), [(LEASED[0], "leased"), (ISSUED, "issued")])
def test_show_of_a_ticket_in_work(live, ticket, state):
    said = asyncrl("buffer", "show", ticket, live)
    assert said.code == 0, said.err
    assert said.out.startswith(f"ticket {ticket}")
    assert f"{state}, attempt 0" in said.out
    assert ("answer 0" in said.out) == (state == "leased")


def test_show_of_a_damaged_group_is_one_error_that_names_it(live):
    said = asyncrl("buffer", "show", DAMAGED, live)
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith(f"Error: the group of ticket {DAMAGED} is damaged: not a whole Arrow stream")
    assert said.err.count("\n") == 1


def test_a_dump_is_plain_parquet_and_names_what_it_had_to_leave_out(live, tmp_path):
    said = asyncrl("buffer", "dump", tmp_path / "held.parquet", live)
    assert said.code == 1, "one of the two held groups is damaged"
    assert f"1 groups are damaged and left out:\nticket {DAMAGED}: not a whole Arrow stream" in said.err
    table = pq.read_table(tmp_path / "held.parquet")
    assert table.schema.names == [*SUPPORTED_SCHEMA.names, "state"]
    assert set(table["ticket"].to_pylist()) == {HELD}
    assert [path.name for path in tmp_path.iterdir()] == ["held.parquet"]

    said = asyncrl("buffer", "dump", tmp_path / "leased.parquet", live, "--state", "leased")
    assert (said.code, said.out) == (0, f"2 groups, 4 trajectories: {tmp_path / 'leased.parquet'}\n")
    assert pq.read_table(tmp_path / "leased.parquet")["state"].to_pylist() == ["leased"] * 4


def test_looking_changes_nothing(live, tmp_path):
    before = asyncrl("buffer", "ls", live).out.replace("0:01", "0:00")
    for words in (("status",), ("head",), ("show", HELD), ("dump", tmp_path / "x.parquet")):
        asyncrl("buffer", *words, live)
    after = asyncrl("buffer", "ls", live).out
    assert [line.split()[:8] for line in after.splitlines()] == [line.split()[:8] for line in before.splitlines()]
    assert "0 quarantined" not in after


def test_a_store_may_be_named_instead_of_a_folder(live, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from asyncrl.buffers.server import url_of

    url = url_of(live)
    for words in (("--run", NAME), (NAME,), ()):  # with one run in the store its name may be left out
        said = asyncrl("buffer", "status", "--buffer", url, *words)
        assert said.code == 0, said.err
        assert said.out.startswith(f"run {NAME}")
    for ticket, known in ((TRAINED[1], "trained by"), (MOVED, "its row has left the store")):
        said = asyncrl("buffer", "show", ticket, "--buffer", url)
        assert said.code == 0, said.err
        assert known in said.out
        assert "answer 0" not in said.out, "the archive is on another host"
    said = asyncrl("buffer", "ls", "--buffer", url)
    assert said.out.splitlines()[1].startswith(str(TRAINED[1]))
    assert said.out.endswith("1 rows are in the archive's ledger, which is not on this host\n")


def test_asyncrl_status_names_who_waits(live):
    said = asyncrl("status", live)
    assert said.code == 0, said.err
    assert said.out.startswith(f"run {NAME}")
    assert "learner       has the batch of step 2" in said.out
    assert "collector-0" in said.out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("buffer", "show", 99, "RUN"), "ticket 99 was never issued: the run has 8 so far, from 0 on"),
        (("buffer", "show", "x", "RUN"), "Invalid value for 'TICKET'"),
        (("buffer", "status", "nowhere"), "no run 'nowhere' in"),
        (("status", "nowhere"), "no run 'nowhere' in"),
        (("buffer", "status", "RUN", "--run", "b"), "RUN is given twice"),
        (("buffer", "status", "RUN", "--buffer", "redis://127.0.0.1:1"), "store redis://127.0.0.1:1 is unreachable"),
        (("buffer", "dump", "/nowhere/x.parquet", "RUN"), "there is no folder /nowhere"),
        (("buffer", "ls", "RUN", "--state", "lost"), "'lost' is not one of 'returned', 'issued'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(live, tmp_path, monkeypatch, words, error):
    monkeypatch.chdir(tmp_path)
    said = asyncrl(*(live if word == "RUN" else word for word in words))
    assert (said.code, said.out) == (2, "")
    assert error in said.err
    assert said.err.count("\n") <= 3


def test_a_folder_of_another_kind_is_named(tmp_path):
    (tmp_path / "recipe.yaml").write_text("run: {name: x}\nsft: {}\n")
    said = asyncrl("buffer", "status", tmp_path)
    assert said.code == 2
    assert "is of `asyncrl sft`, which has no buffer" in said.err


def test_after_the_end_the_embedded_store_is_started_for_the_moment_and_without_it_the_archive_answers(tmp_path):
    ended = record(tmp_path / NAME)
    said = asyncrl("buffer", "show", HELD, ended)
    assert said.code == 0, said.err
    assert f"answer 0    [0]{HELD}!" in said.out

    shutil.rmtree(ended / "store")
    for ticket in TRAINED:
        said = asyncrl("buffer", "show", ticket, ended)
        assert said.code == 0, said.err
        assert "the archive alone" in said.out
        assert f"answer 0    [0]{ticket}!" in said.out
    said = asyncrl("buffer", "show", HELD, ended)
    assert said.code == 2
    assert "has no store to look into" in said.err

    (part,) = (ended / "archive").glob("step-*.parquet")
    part.write_bytes(part.read_bytes()[:-100])
    for ticket in TRAINED:
        said = asyncrl("buffer", "show", ticket, ended)
        assert said.code == 1, said.out
        assert "damaged" in said.err

    (ledger,) = (ended / "archive" / "ledger").glob("*.parquet")
    ledger.write_bytes(b"junk")
    said = asyncrl("buffer", "show", MOVED, ended)
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert "the archive's ledger" in said.err
