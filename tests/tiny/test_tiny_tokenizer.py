from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from asyncrl.learners.tiny_tokenizer import MARKS, VOCABULARY, build_tokenizer

TOKENIZER = build_tokenizer(512)


@given(st.text())
def test_any_text_survives_and_its_tokens_are_its_bytes(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


@given(st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=5))))
def test_text_with_marks_survives_too(parts: list[str]) -> None:
    text = "".join(parts)
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_there_are_264_tokens_and_each_mark_is_one() -> None:
    assert len(TOKENIZER) == VOCABULARY == 264
    ids = [TOKENIZER.encode(mark, add_special_tokens=False) for mark in MARKS]
    assert ids == [[256 + index] for index in range(8)]
    assert (TOKENIZER.pad_token, TOKENIZER.eos_token) == ("<|pad|>", "<|end|>")


def test_a_conversation_is_written_with_its_marks() -> None:
    question = [{"role": "user", "content": "reverse 4821"}]
    assert (
        TOKENIZER.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
        == "<|user|>reverse 4821<|end|><|assistant|>"
    )
    answered = [*question, {"role": "assistant", "content": "1284"}]
    assert (
        TOKENIZER.apply_chat_template(answered, tokenize=False) == "<|user|>reverse 4821<|end|><|assistant|>1284<|end|>"
    )


def test_an_unknown_role_is_refused_by_name() -> None:
    with pytest.raises(Exception, match="role narrator is unknown"):
        TOKENIZER.apply_chat_template([{"role": "narrator", "content": "once"}], tokenize=False)


def test_it_loads_again_from_its_folder(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = '{"a": [1, 2]} don\'t  \n\t é 漢字 😀 <|end|>'
    assert loaded.encode(text, add_special_tokens=False) == TOKENIZER.encode(text, add_special_tokens=False)
    assert loaded.decode(loaded.encode(text, add_special_tokens=False)) == text
    assert loaded.chat_template == TOKENIZER.chat_template
