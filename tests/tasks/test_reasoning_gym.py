"""Questions and scores of the package reasoning-gym, and the two splits that are made of them."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import create_dataset
from reasoning_gym.utils import SYSTEM_PROMPTS

from asyncrl.config.convert import convert
from asyncrl.config.packages import ReasoningGymTask
from asyncrl.config.recipe import Collector
from asyncrl.rewards.scoring import Score
from asyncrl.tasks.base import Answer, Row, Task, TaskError
from asyncrl.tasks.build import build_task
from asyncrl.tasks.reasoning_gym import HELDOUT_TRIES
from asyncrl.tasks.verify import scoring_of
from tests.processes import Start

EXAMPLE = Path(__file__).parents[2] / "examples" / "reasoning-gym"
SHORT_WORDS = {"name": "spell_backward", "config": {"min_word_len": 3, "max_word_len": 3}}


def config(*datasets: dict[str, Any], **keys: Any) -> ReasoningGymTask:
    found = convert({"task": {"type": "reasoning-gym", "datasets": list(datasets), **keys}}).task
    assert isinstance(found, ReasoningGymTask)
    return found


def built(*datasets: dict[str, Any], **keys: Any) -> Task:
    return build_task(config(*datasets, **keys), seed=0)


def said(text: str, finish_reason: str = "stop") -> Answer:
    return Answer(text, (1,), finish_reason)


def test_no_held_out_question_is_ever_trained_though_the_generator_repeats_itself() -> None:
    keys = {"rows": 500, "heldout_rows": 50}
    task = built(SHORT_WORDS, **keys)
    heldout = {row.prompt for row in task.rows("heldout")}
    train = task.rows("train")
    assert (len(train), len(task.rows("heldout")), len(heldout)) == (500, 50, 50)
    assert heldout.isdisjoint(row.prompt for row in train)
    assert train[-1] == train[499] == train[498:][1]
    with pytest.raises(IndexError):
        train[500]
    # Seeds alone would not do: of the questions that training would have had, some are held out.
    own = create_dataset("spell_backward", **SHORT_WORDS["config"], seed=1, size=1000)
    first = HELDOUT_TRIES * 50
    assert train[0].prompt == own[first]["question"]
    assert heldout & {own[index]["question"] for index in range(first, first + 500)}


def test_rows_are_the_same_in_every_process_and_in_every_run() -> None:
    program = (
        "import json, sys; from asyncrl.config.convert import convert; from asyncrl.tasks.build import build_task\n"
        "task = build_task(convert({'task': json.load(sys.stdin)}).task, seed=3)\n"
        "rows = [task.rows(split)[n] for split in ('train', 'heldout') for n in (0, 7)]\n"
        "print(json.dumps([[row.id, row.prompt, row.answer] for row in rows]))"
    )
    document = {"type": "reasoning-gym", "datasets": [{"name": "letter_jumble"}, {"name": "lcm"}], "heldout_rows": 20}
    found = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(document),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONHASHSEED": "5"},
    )
    task = build_task(convert({"task": document}).task, seed=0)
    rows = [task.rows("train")[0], task.rows("train")[7], task.rows("heldout")[0], task.rows("heldout")[7]]
    assert json.loads(found.stdout) == [[row.id, row.prompt, row.answer] for row in rows]


def test_datasets_are_mixed_by_their_weights() -> None:
    task = built({"name": "lcm", "weight": 3}, {"name": "gcd"}, rows=400, heldout_rows=10)
    names = [row.info["dataset"] for row in task.rows("train")]
    assert 0.68 < names.count("lcm") / 400 < 0.82
    assert set(names) == {"lcm", "gcd"}


def test_the_score_is_the_packages_own_with_partial_credit_as_it_is() -> None:
    task = built({"name": "spell_backward", "config": {"min_word_len": 4, "max_word_len": 4}}, heldout_rows=5)
    row = task.rows("train")[0]
    right = str(row.answer)
    assert task.score(row, said(f"It is <answer>\n{right} </answer>")) == {"score": 1.0}
    assert task.score(row, said(f"<answer>{right}</answer> or <answer>{right[:2]}</answer>")) == {"score": 0.5}
    assert task.score(row, said(right)) == {"score": 0.0}  # without the tags it is no answer
    assert task.part_weights() == {"score": 1.0}


def test_a_whole_answer_is_all_that_was_written_if_the_model_ended_it() -> None:
    task = built({"name": "lcm"}, heldout_rows=5, answer="whole")
    row = task.rows("heldout")[0]
    assert task.score(row, said(f" {row.answer}\n")) == {"score": 1.0}
    assert task.score(row, said(str(row.answer), "length")) == {"score": 0.0}


@pytest.mark.parametrize(
    ("given", "shown"),
    [("direct", SYSTEM_PROMPTS["direct"]), ("Be brief.", "Be brief."), (None, None)],
)
def test_the_system_prompt_is_a_text_or_one_of_the_packages_by_name(given: str | None, shown: str | None) -> None:
    task = built({"name": "lcm"}, heldout_rows=5, system_prompt=given)
    row = task.rows("heldout")[0]
    before = [] if shown is None else [{"role": "system", "content": shown}]
    assert task.messages(row) == [*before, {"role": "user", "content": row.prompt}]


async def scored(task: ReasoningGymTask, *calls: tuple[Row, Answer]) -> list[Score]:
    pool = scoring_of(task, Collector(score_workers=1, score_timeout_s=30), seed=0, max_tokens=20)
    await asyncio.wait_for(pool.start(), 60)
    try:
        return await asyncio.wait_for(asyncio.gather(*(pool.score(row, answer) for row, answer in calls)), 60)
    finally:
        await pool.close()


@pytest.mark.asyncio
async def test_a_verifier_process_makes_the_question_again_and_an_answer_to_another_one_is_unscored() -> None:
    """Metadata of rotate_matrix are tuples, of which a message between processes would make lists."""
    section = config({"name": "rotate_matrix"}, {"name": "letter_counting"}, heldout_rows=4, answer="whole")
    rows = build_task(section, seed=0).rows("train")
    other = Row("0", "How many?", "1", rows[0].info)
    *right, wrong = await scored(section, *((rows[n], said(str(rows[n].answer))) for n in range(4)), (other, said("1")))
    assert right == [Score({"score": 1.0}, 1.0, "")] * 4
    assert wrong.failure == "verifier_raised"


@pytest.mark.parametrize(
    ("dataset", "keys", "complaint"),
    [
        ({"name": "spell_backwards"}, {}, r"none of reasoning-gym's \d+ datasets. Did you mean spell_backward\?"),
        ({"name": "composite"}, {}, "composite is none of"),
        (
            {"name": "lcm", "config": {"max_numbrs": 3}},
            {},
            r"lcm has no config 'max_numbrs'. Did you mean max_numbers\?",
        ),
        ({"name": "lcm", "config": {"min_value": 0}}, {}, "lcm refuses its config {'min_value': 0}: AssertionError"),
        ({"name": "lcm", "config": {"min_value": "1"}}, {}, "refuses its config {'min_value': '1'}: TypeError"),
        ({"name": "word_ladder"}, {"rows": 30000}, "cannot be built with 31024 questions .* too large"),
        ({"name": "ransom_note"}, {}, "start the commands with PYTHONHASHSEED=0"),
        (
            {"name": "spell_backward", "config": {"max_word_len": 3, "min_word_len": 3, "data_file": "none.txt"}},
            {},
            "none",
        ),
        (
            {"name": "lcm", "config": {"min_value": 1, "max_value": 3}},
            {"heldout_rows": 100},
            r"first 400 questions have only \d+ different ones.\nUse \d+ or less",
        ),
    ],
)
def test_a_dataset_that_cannot_be_used_is_refused_with_the_fix(
    dataset: dict[str, Any], keys: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(TaskError, match=complaint) as caught:
        built(dataset, **keys)
    assert len(str(caught.value).splitlines()) <= 3


def test_datasets_that_differ_from_process_to_process_are_used_where_text_is_hashed_in_one_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert len(built({"name": "ransom_note"}, heldout_rows=5).rows("heldout")) == 5


def test_a_dataset_that_validates_nothing_is_used_too() -> None:
    assert len(built({"name": "power_function"}, heldout_rows=5).rows("heldout")) == 5


def test_a_score_that_raises_is_no_zero() -> None:
    task = built({"name": "prime_factorization"}, heldout_rows=5, answer="whole")
    with pytest.raises(ValueError, match="invalid literal"):
        task.score(task.rows("train")[0], said("no idea"))


def test_questions_that_are_all_held_out_leave_nothing_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.tasks.reasoning_gym.HELDOUT_TRIES", 50)
    few = {"name": "lcm", "config": {"min_value": 2, "max_value": 3}}  # of 2 and 2, 2 and 3, 3 and 2, 3 and 3
    with pytest.raises(TaskError, match=r"all held out: there are few different ones.\nLower it"):
        built(few, rows=200, heldout_rows=4)
    assert len({row.prompt for row in built(few, rows=200, heldout_rows=2).rows("train")}) == 2


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TaskError, match=r"pip install 'asyncrl\[reasoning-gym\]'"):
        built({"name": "lcm"})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_is_taught_and_practises(begin: Start, tmp_path: Path) -> None:
    """A few steps of each: docs/packages.md has what all of them bring."""
    for file in EXAMPLE.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    subprocess.run([sys.executable, "make_data.py"], cwd=tmp_path, check=True, timeout=60)
    heldout = {
        row.prompt for row in built(SHORT_WORDS | {"config": {"min_word_len": 3, "max_word_len": 5}}).rows("heldout")
    }
    taught = [json.loads(line)["prompt"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert heldout.isdisjoint(taught)
    assert len(taught) == 6000
    small = ("--set", "eval.prompts=8", "--set", "learner.groups_per_step=4")
    for command in (("sft", "./sft.yaml"), ("run", "./rl.yaml", *small)):
        process = begin(*command, "--set", "run.max_steps=2")
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    summary = json.loads((tmp_path / "spell-rl" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert 0 <= summary["success_before"] <= 1
