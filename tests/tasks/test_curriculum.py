"""Train rows by measured pass rate: which stay, in which order, and what is said of files that cannot be used."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncrl.config.convert import convert
from asyncrl.config.curriculum import Curriculum
from asyncrl.data.errors import DataError
from asyncrl.tasks.base import Row, TaskError
from asyncrl.tasks.build import build_task
from asyncrl.tasks.curriculum import LOOKED_THROUGH, STAGES, Course
from asyncrl.tasks.pass_rates import digest, read_pass_rates
from asyncrl.tasks.training import train_rows

UserModule = Callable[[str], Path]

NINE = {"type": "reverse", "digits": [9, 9]}
TEN = """
class Ten:
    def rows(self, split): return [Row(f"r{n}", "ask") for n in range(10)]
    def score(self, row, answer): return 1.0
"""


def document(path: Path, rates: dict[str, list[float | None]], **report: Any) -> Path:
    """As `asyncrl profile` and `asyncrl eval` write it, as far as it is read."""
    answers = [{"row_id": row, "reward": reward} for row, rewards in rates.items() for reward in rewards]
    path.write_text(json.dumps({"report": report, "answers": answers}))
    return path


def drawn(curriculum: dict[str, Any], count: int, *, seed: int = 0) -> list[str]:
    config = convert({"task": {"type": "my_task:Ten", "curriculum": curriculum}}).task
    row_of = train_rows(build_task(config, seed=seed), config, seed=seed)
    return [row_of(ordinal).id for ordinal in range(count)]


RATES = st.dictionaries(st.integers(0, 59), st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), max_size=60)


@given(rates=RATES, staged=st.booleans(), seed=st.integers(0, 3), shuffle=st.booleans())
def test_each_epoch_shows_every_row_that_stays_once(
    rates: dict[int, float], staged: bool, seed: int, shuffle: bool
) -> None:
    rates[0] = 0.5  # one at least stays
    rule = Curriculum(pass_rates="", min=0.25, max=0.75, order="easy-first" if staged else "none")
    course = Course(60, rates, rule)
    stay = [index for index in range(60) if 0.25 <= rates.get(index, 0.5) <= 0.75]
    assert (len(course), course.left_out) == (len(stay), 60 - len(stay))
    for epoch in (0, 1):
        ordinals = range(epoch * len(course), (epoch + 1) * len(course))
        assert sorted(course.index(n, seed=seed, shuffle=shuffle) for n in ordinals) == stay


@given(rates=RATES, seed=st.integers(0, 3))
@example(rates=dict.fromkeys(range(60), 0.0), seed=0)
@example(rates=dict.fromkeys(range(60), 1.0), seed=0)
@example(rates=dict.fromkeys(range(0, 60, 2), 1.0), seed=0)
def test_an_epoch_goes_from_easy_to_hard_a_tenth_of_the_rows_at_a_time(rates: dict[int, float], seed: int) -> None:
    course = Course(60, rates, Curriculum(pass_rates="", order="easy-first"))
    mean = sum(rates.values()) / len(rates) if rates else 0.0
    order = [rates.get(course.index(n, seed=seed, shuffle=True), mean) for n in range(60)]
    size = 60 // STAGES
    stages = [order[start : start + size] for start in range(0, 60, size)]
    assert all(min(one) >= max(next_one) for one, next_one in pairwise(stages))


def test_a_task_with_any_number_of_rows_keeps_nothing_of_those_that_were_not_measured() -> None:
    course = Course(2**40, {7: 1.0, 2**39: 0.0}, Curriculum(pass_rates="", max=0.9, order="easy-first"))
    assert len(course) == 2**40 - 1
    assert (course.at(6), course.at(7), course.at(len(course) - 1)) == (6, 8, 2**39)


def test_rows_outside_the_bounds_are_left_out_and_counted(
    user_module: UserModule, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    user_module(TEN)
    rates = {"r0": [1.0, 1.0], "r1": [1.0, 0.0], "r2": [0.0, 0.0], "r3": [None, 1.0], "elsewhere": [0.5], "r9": [None]}
    path = document(tmp_path / "profile.json", rates)
    with caplog.at_level(logging.INFO):
        found = drawn({"pass_rates": str(path), "min": 0.1, "max": 0.9}, 7)
    assert sorted(found) == ["r1", "r4", "r5", "r6", "r7", "r8", "r9"]
    assert (
        "3 of 10 train rows are left out, 1 measured ones stay, 6 were not measured and stay; 1 measured" in caplog.text
    )
    assert drawn({"pass_rates": str(path), "min": 0.1, "max": 0.9}, 21) != found * 3, "epochs have orders of their own"


def test_rows_that_were_measured_first_are_found_among_any_number(tmp_path: Path) -> None:
    """`asyncrl profile` asks the beginning of the order, which lies anywhere in the rows."""
    config = convert({"task": NINE}).task
    row_of = train_rows(build_task(config, seed=5), config, seed=5)
    asked = [row_of(n).id for n in range(8)]
    assert min(int(row_id.removeprefix("train-")) for row_id in asked) > LOOKED_THROUGH
    path = document(tmp_path / "profile.json", {row_id: [1.0] for row_id in asked})
    config = convert({"task": {**NINE, "curriculum": {"pass_rates": str(path), "max": 0.9}}}).task
    row_of = train_rows(build_task(config, seed=5), config, seed=5)
    assert not {row_of(n).id for n in range(100)} & set(asked)


def test_an_answer_passes_above_the_reward_that_its_document_says(user_module: UserModule, tmp_path: Path) -> None:
    rates = {"r0": [0.5, 1.0], "r1": [0.2]}
    assert read_pass_rates(document(tmp_path / "a.json", rates)) == {"r0": 1.0, "r1": 1.0}
    assert read_pass_rates(document(tmp_path / "a.json", rates, pass_above=0.5)) == {"r0": 0.5, "r1": 0.0}


def test_of_a_run_the_newest_group_of_each_row_counts_and_shaping_does_not(tmp_path: Path) -> None:
    def row(row_id: str, ticket: int, step: int, reward: float, *, segment: int = 0, **info: float) -> dict[str, Any]:
        return {
            **{"row_id": row_id, "ticket": ticket, "member": 0, "segment": segment, "reward": reward},
            **{"info": json.dumps(info), "trained_lineage": 1, "trained_version": step},
        }

    parts = {
        0: [row("a", 0, 0, 1.0), row("a", 0, 0, 1.0), row("b", 1, 0, 0.5, outcome=0.0)],
        9: [row("a", 4, 9, 1.0), row("a", 4, 9, 0.0), row("a", 4, 9, 1.0, segment=1), row("c", 5, 9, float("nan"))],
    }
    (tmp_path / "archive").mkdir()
    for step, rows in parts.items():
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "archive" / f"step-0001-{step:06d}.parquet")
    assert read_pass_rates(tmp_path) == {"a": 0.5, "b": 0.0}


def test_a_run_measures_success_as_its_own_recipe_says(tmp_path: Path) -> None:
    told = {"ticket": 0, "member": 0, "segment": 0, "info": "{}", "trained_lineage": 1, "trained_version": 0}
    rows = [{"row_id": "a", "reward": reward, **told} for reward in (0.25, 1.0)]
    (tmp_path / "archive").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "archive" / "step-0001-000000.parquet")
    assert read_pass_rates(tmp_path) == {"a": 1.0}
    (tmp_path / "recipe.yaml").write_text("eval: {pass_above: 0.5}\n")
    assert read_pass_rates(tmp_path) == {"a": 0.5}
    for text, said in (("eval: {pass_above: high}\n", "pass_above is no number"), ("eval: {", "cannot be read")):
        (tmp_path / "recipe.yaml").write_text(text)
        with pytest.raises(DataError, match=said):
            read_pass_rates(tmp_path)


def test_an_answer_of_nan_is_unscored_and_no_failure(tmp_path: Path) -> None:
    assert read_pass_rates(document(tmp_path / "a.json", {"r0": [float("nan"), 1.0]})) == {"r0": 1.0}


def test_other_pass_rates_than_the_run_began_with_are_refused_and_the_same_in_another_file_are_not(
    user_module: UserModule, tmp_path: Path
) -> None:
    user_module(TEN)
    path = document(tmp_path / "profile.json", {"r0": [1.0], "r1": [0.0]})
    begun = {"pass_rates": str(path), "max": 0.9, "digest": digest(read_pass_rates(path))}
    asked = drawn(begun, 20)
    document(path, {"r1": [0.0, 0.0], "r0": [1.0], "r2": [None]}, model="elsewhere")
    assert drawn(begun, 20) == asked
    document(path, {"r0": [1.0], "r1": [1.0]})
    with pytest.raises(DataError, match=r"task\.curriculum\.pass_rates .* other pass rates than the run began with"):
        drawn(begun, 20)
    assert drawn({**begun, "digest": None}, 20) != asked, "control: other rows would be asked"


def test_in_a_mixture_each_task_has_a_curriculum_of_its_own(
    user_module: UserModule, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ids may be those of the mixture or of the task alone."""
    user_module(TEN)
    mixed = document(tmp_path / "mixed.json", {"one/r0": [1.0], "two/r1": [1.0], "one/r5": [0.0]})
    alone = document(tmp_path / "alone.json", {"r9": [1.0]})
    with caplog.at_level(logging.INFO):
        found = mixed_drawn(mixed, alone)
    assert {f"one/r{n}" for n in range(10)} - found == {"one/r0"}
    assert {f"two/r{n}" for n in range(10)} - found == {"two/r9"}
    assert "; 0 measured ids are no train rows" in caplog.text, "those of the other task are not asked for"


def mixed_drawn(mixed: Path, alone: Path) -> set[str]:
    tasks = [
        {"name": name, "task": {"type": "my_task:Ten", "curriculum": {"pass_rates": str(path), "max": 0.5}}}
        for name, path in (("one", mixed), ("two", alone))
    ]
    config = convert({"task": {"type": "mixture", "tasks": tasks}}).task
    row_of = train_rows(build_task(config, seed=0), config, seed=0)
    return {row_of(n).id for n in range(40)}


def test_a_curriculum_that_has_no_use_is_refused(user_module: UserModule, tmp_path: Path) -> None:
    user_module(TEN)
    path = str(document(tmp_path / "eval.json", {"heldout-3": [1.0]}))
    with pytest.raises(
        TaskError, match=r"such as 'heldout-3', and none of them was found among the train rows(.|\n)*asyncrl profile"
    ):
        drawn({"pass_rates": path, "max": 0.9}, 1)
    document(tmp_path / "eval.json", {f"r{n}": [1.0] for n in range(10)})
    with pytest.raises(TaskError, match=r"leaves out all 10 train rows: none has a pass rate from 0 to 0\.9"):
        drawn({"pass_rates": path, "max": 0.9}, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "no list `answers`"),
        ('{"answers": 1}', "no list `answers`"),
        ('{"answers": [{"row_id": "a", "reward": 1}, {"reward": 1}]}', r"answers\[1\] has no row_id"),
        ('{"answers": [{"row_id": 7, "reward": 1}]}', r"answers\[0\] has no row_id"),
        ('{"answers": [{"row_id": "a", "reward": "1"}]}', r"answers\[0\] has no row_id and reward"),
        ('{"answers": [{"row_id": "a", "reward": null}]}', "no scored answer"),
        ('{"report": {"pass_above": "1"}, "answers": []}', "pass_above is no number"),
    ],
)
def test_a_file_without_pass_rates_is_named_with_what_is_wrong(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"rates\.json.*{said}"):
        read_pass_rates(path)


def test_a_folder_that_is_no_runs_and_a_file_that_is_gone_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it is not the folder of a run that has trained"):
        read_pass_rates(tmp_path)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_pass_rates(tmp_path / "gone.json")
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "step-0001-000000.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(DataError, match=r"step-0001-000000\.parquet cannot be read"):
        read_pass_rates(tmp_path)


def test_a_row_that_cannot_be_read_ends_nothing(user_module: UserModule, tmp_path: Path) -> None:
    user_module(
        """
class Rows:
    def __len__(self): return 3
    def __getitem__(self, n):
        if n == 1: raise KeyError("broken")
        return Row(f"r{n}", "ask")
class Ten:
    def rows(self, split): return Rows()
    def score(self, row, answer): return 1.0
"""
    )
    path = document(tmp_path / "profile.json", {"r0": [1.0], "r2": [0.0]})
    config = convert({"task": {"type": "my_task:Ten", "curriculum": {"pass_rates": str(path), "max": 0.5}}}).task
    row_of = train_rows(build_task(config, seed=0), config, seed=0)
    found: list[Row | str] = []
    for n in range(2):
        try:
            found.append(row_of(n).id)
        except KeyError as error:
            found.append(str(error))
    assert sorted(map(str, found)) == ["'broken'", "r2"]
