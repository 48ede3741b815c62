"""Prompts with more tokens than the model takes are found before a run, whatever the tokenizer, and few are counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.collectors.rollout import PromptError, TaskPrompts
from asyncrl.config.convert import convert
from asyncrl.data import lengths
from asyncrl.data.dataset import Dataset
from asyncrl.data.errors import DataError
from asyncrl.learners.tiny_tokenizer import CHAT_TEMPLATE, build_tokenizer, byte_symbols
from asyncrl.tasks.build import construct
from asyncrl.tasks.chat import render
from asyncrl.tasks.prompt_length import PromptLimit, RowTokens
from asyncrl.tasks.single_turn import SingleTurn
from asyncrl.tasks.training import train_rows

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"where": {}, "when": {}}}}}

SHORT = ("1", "2")

END_ID = 257


def _nfc() -> PreTrainedTokenizerFast:
    """As Qwen's: bytes, a few merges, Unicode put into its normal form first."""
    vocabulary = {symbol: n for n, symbol in enumerate([*byte_symbols(), "aa", "aaaa", "Ċa"])}
    merges = [("a", "a"), ("aa", "aa"), ("Ċ", "a")]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return _wrapped(made)


def _pieces() -> PreTrainedTokenizerFast:
    """As Llama 2's: a letter of its own begins each text, blanks are letters, unknown ones are three or four bytes."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a"]
    vocabulary = {word: n for n, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.ByteFallback()
    return _wrapped(made)


def _wrapped(made: Tokenizer) -> PreTrainedTokenizerFast:
    marks = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, eos_token=marks[0], chat_template=CHAT_TEMPLATE.replace("|>'", "|>\\n'")
    )


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bytes": cache(lambda: build_tokenizer(64)),
    "nfc": cache(_nfc),
    "pieces": cache(_pieces),
}


def task_of(path: Path, tokenizer: Any, longest: int | None, **keys: Any) -> SingleTurn:
    """Rows whose prompts have at most `longest` tokens; None: any."""
    system = keys.pop("system_prompt", None)
    section = {"type": "single-turn", "system_prompt": system, "data": {"train": str(path), "bad_rows": "skip", **keys}}
    limit = PromptLimit.of(tokenizer, own=None if longest is None else longest + 1, given=None)
    task = construct(convert({"task": section}).task, seed=0, limit=limit)
    assert isinstance(task, SingleTurn)
    return task


def ids_of(dataset: Dataset) -> list[str]:
    return sorted(record.id for side in (dataset.train, dataset.heldout) for record in side)


def written(path: Path, prompts: list[Any], **columns: Any) -> Path:
    path.write_text("".join(json.dumps({"prompt": one, "answer": "1", **columns}) + "\n" for one in prompts))
    return path


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of rows whose tokens were counted."""
    seen: list[str] = []
    count = RowTokens.count

    def counting(self: RowTokens, record: Any) -> int | None:
        seen.append(record.id)
        return count(self, record)

    monkeypatch.setattr(RowTokens, "count", counting)
    return seen


LETTERS = "aaaaab \n\u0958\U0001d160\u00e9e\u0301<>|\u4e2d"
"""Some grow under NFC: U+0958 twofold, U+1D160 threefold."""

texts = st.text(st.sampled_from(LETTERS), min_size=1, max_size=60).filter(str.strip)
prompts = st.one_of(
    texts,
    texts.map(lambda text: "<|user|>" * 9 + text),
    st.lists(texts, min_size=1, max_size=4).map(
        lambda said: [{"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate(said)]
    ),
)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(asked=st.lists(prompts, min_size=4, max_size=6, unique_by=str), system=st.sampled_from([None, "be brief"]))
def test_what_is_left_out_is_what_would_fail_its_ticket(
    name: str, tmp_path_factory: pytest.TempPathFactory, asked: list[Any], system: str | None
) -> None:
    tokenizer = TOKENIZERS[name]()
    path = written(tmp_path_factory.mktemp("rows") / "a.jsonl", [*SHORT, *asked])
    whole = task_of(path, tokenizer, None, system_prompt=system)
    rows = [row for side in ("train", "heldout") for row in whole.rows(side)]
    sizes = {row.id: len(render(tokenizer, whole.messages(row))) for row in rows}
    longest = sorted(sizes.values())[len(sizes) // 2]
    try:
        left = task_of(path, tokenizer, longest, system_prompt=system).dataset
    except DataError as error:
        assume("all rows have the same prompt" not in str(error))
        raise
    assert ids_of(left) == sorted(row for row, size in sizes.items() if size <= longest)


def test_the_look_and_the_ticket_draw_one_line(tmp_path: Path) -> None:
    """59 letters and the template's three marks are 62 tokens: with one for the answer 63."""
    path = written(tmp_path / "a.jsonl", [*SHORT, "b" * 58, "c" * 59, "d" * 60], tools=None)
    tokenizer, unlimited = build_tokenizer(64), task_of(path, build_tokenizer(64), None)
    config = convert({"task": {"type": "single-turn", "data": {"train": str(path)}}}).task
    drawn = train_rows(unlimited, config, seed=0)
    prompts = TaskPrompts(
        unlimited, PromptLimit.of(tokenizer, own=63, given=None), train_row=drawn, stop_token_ids=(END_ID,)
    )
    asked, failed = set(), set()
    for ask, rows in ((prompts.train, len(unlimited.rows("train"))), (prompts.heldout, prompts.heldout_rows)):
        for n in range(rows):
            try:
                asked.add(ask(n).row.id)
            except PromptError as error:
                failed.add(str(error).partition(": the prompt")[0])
    assert failed == {"prompt_too_long: row a.jsonl:5"}
    assert asked == {*ids_of(task_of(path, tokenizer, 62).dataset)}


def test_a_row_is_too_long_with_its_own_tools_messages_and_arguments(tmp_path: Path) -> None:
    """Each has 40 letters; what the template adds differs."""
    tokenizer = build_tokenizer(64)
    messages = [{"role": "user", "content": "a" * 20}, {"role": "assistant", "content": "b" * 20}] * 2
    rows: list[dict[str, Any]] = [
        {"prompt": "a" * 40},
        {"prompt": "b" * 40, "tools": [TOOL]},
        {"prompt": messages[:3]},
        {"prompt": "short"},
        {"prompt": "brief"},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({**row, "answer": "1"}) + "\n" for row in rows))
    assert ids_of(task_of(path, tokenizer, 43).dataset) == ["a.jsonl:1", "a.jsonl:4", "a.jsonl:5"]
    assert ids_of(task_of(path, tokenizer, 62).dataset) == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:4", "a.jsonl:5"]
    assert ids_of(task_of(path, tokenizer, 70).dataset) == [
        "a.jsonl:1",
        "a.jsonl:2",
        "a.jsonl:3",
        "a.jsonl:4",
        "a.jsonl:5",
    ]
    assert ids_of(task_of(path, tokenizer, 43, system_prompt="!").dataset) == ["a.jsonl:4", "a.jsonl:5"]


def test_only_rows_in_doubt_are_counted(tmp_path: Path, counted: list[str]) -> None:
    path = written(tmp_path / "a.jsonl", [f"{n}" * 10 for n in range(100, 150)] + ["long " * 20, "longer " * 30])
    dataset = task_of(path, build_tokenizer(64), 200).dataset
    assert [row for row in counted if row] == ["a.jsonl:52"]
    assert len(counted) <= 2, "the template's own once"
    assert len(dataset.train) + len(dataset.heldout) == 51


def test_a_row_that_is_too_long_ends_the_command_with_its_tokens_the_limit_and_the_fix(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [*SHORT, "b" * 70])
    with pytest.raises(DataError) as caught:
        _ = task_of(path, build_tokenizer(64), 62, bad_rows="error").dataset
    assert str(caught.value) == (
        f"{path}:3: the prompt has 73 tokens, but the model takes 63, with the answer: shorten the row\n"
        "Or leave such rows out and have them counted: task.data.bad_rows=skip"
    )
    given = PromptLimit.of(build_tokenizer(64), own=512, given=63)
    assert given.longest == 62
    assert given.said == "model.max_length is 63, with the answer: raise it, or shorten the row"


def test_what_is_too_long_repeats_and_contradicts_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [(SHORT[0], "1"), (SHORT[1], "1"), ("b" * 70, "1"), ("b" * 70, "1"), ("b" * 70, "2"), (SHORT[0], "1")]
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows))
    dataset = task_of(path, build_tokenizer(64), 62).dataset
    found = dataset.document()["read"]["train"]
    assert found["left_out"]["too-long"]["rows"] == 3
    assert dataset.warnings[0] == f"left out (too-long): {found['left_out']['too-long']['first']}"
    assert (found["duplicates"], found["contradictory"], found["uncounted"]) == (1, 0, 0)
    assert "; left out: 3; repeated: 1" in dataset.line()
    assert ids_of(dataset) == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:6"]


def test_a_file_of_nothing_but_long_prompts_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", ["b" * 70, "c" * 70])
    with pytest.raises(DataError, match=r"a\.jsonl has no usable row \(2 rows left out: too-long 2\)"):
        _ = task_of(path, build_tokenizer(64), 62).dataset


def test_a_row_that_the_template_refuses_is_no_matter_of_length(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "a" * 70}, {"role": "critic", "content": "b"}]
    path = written(tmp_path / "a.jsonl", [*SHORT, asked])
    assert ids_of(task_of(path, build_tokenizer(64), 62).dataset) == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]


def test_of_very_many_rows_in_doubt_the_longest_are_counted_and_the_rest_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: list[str]
) -> None:
    path = written(tmp_path / "a.jsonl", [*SHORT, "b" * 70, "c" * 90, "d" * 80])
    monkeypatch.setattr(lengths, "COUNTED", 190)  # of 78, 98 and 88 bytes, with their ends
    dataset = task_of(path, build_tokenizer(64), 62).dataset
    assert [row for row in counted if row] == ["a.jsonl:4", "a.jsonl:5"]
    assert ids_of(dataset) == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]
    assert dataset.line().endswith("; left out: 2; counted in tokens when they are asked: 1")


def test_what_was_counted_is_kept_for_the_same_tokenizer_template_and_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: list[str]
) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(lengths, "WORTH_KEEPING_BYTES", 100)
    asked = [*SHORT, "b" * 70, [{"role": "user", "content": "c" * 70}]]
    path = written(tmp_path / "a.jsonl", asked)

    def rows_counted(longest: int = 62, tokenizer: Any = None, **keys: Any) -> int:
        before = sum(map(bool, counted))
        task = task_of(path, tokenizer or build_tokenizer(64), longest, **keys)
        assert (
            task.dataset.document()["read"]["train"]["left_out"].get("too-long", {"rows": 0})["rows"]
            == (longest < 80) * 2
        )
        return sum(map(bool, counted)) - before

    assert rows_counted() == 2
    assert rows_counted() == 0
    assert rows_counted(tokenizer=build_tokenizer(99)) == 0, "the same tokens"
    assert rows_counted(64) == 2
    assert rows_counted(62, system_prompt="be brief") == 2
    other = build_tokenizer(64)
    other.chat_template = "!" + CHAT_TEMPLATE
    assert rows_counted(62, tokenizer=other) == 2
    assert rows_counted(62, tokenizer=_nfc()) == 2
    written(tmp_path / "a.jsonl", [*asked[:2], "d" * 75, "e" * 76])
    assert rows_counted() == 2, "another file"


def test_a_tokenizer_without_a_limit_counts_nothing(tmp_path: Path, counted: list[str]) -> None:
    path = written(tmp_path / "a.jsonl", [*SHORT, "b" * 1000])
    assert len(ids_of(task_of(path, build_tokenizer(64), None).dataset)) == 3
    assert not counted
