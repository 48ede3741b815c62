"""Rendering with a real tokenizer and its template; end tokens."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from asyncrl.tasks.base import Message, TaskError
from asyncrl.tasks.chat import conversation, end_token_ids, render

WORDS = ["<s>", "<user>", "<system>", "<assistant>", "<end>", "<turn>", "hello", "be", "kind"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'critic' %}{{ raise_exception('no critics') }}{% endif %}"
    "<{{ m.role }}> {{ m.content }} <end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="kind"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<s>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<system>", "<assistant>", "<turn>"],
        chat_template=TEMPLATE,
        name_or_path="org/model",
    )
    assert isinstance(made, PreTrainedTokenizerFast)
    return made


def words(ids: list[int]) -> str:
    return " ".join(WORDS[token] for token in ids)


def test_a_conversation_is_rendered_up_to_the_mark_of_the_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = render(tokenizer, conversation("hello", "be kind"))
    assert all(type(token) is int for token in ids)
    assert words(ids) == "<s> <system> be kind <end> <user> hello <end> <assistant>"


def test_a_row_with_a_system_message_keeps_it() -> None:
    own: list[Message] = [{"role": "system", "content": "own"}, {"role": "user", "content": "hello"}]
    assert conversation(own, "the recipe's") == own
    assert conversation("hello") == [{"role": "user", "content": "hello"}]


def test_a_base_model_is_refused_by_name_with_the_fix(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    with pytest.raises(TaskError, match=r"org/model has no chat template.*base model(.|\n)*instruct"):
        render(tokenizer, conversation("hello"))


def test_a_template_that_refuses_the_messages_is_quoted(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(TaskError, match=r"org/model refuses messages of the roles critic: .*no critics"):
        render(tokenizer, [{"role": "critic", "content": "hello"}])


@pytest.mark.parametrize(
    ("configured", "expected"), [(None, (4,)), (5, (4, 5)), ([5, 4], (4, 5)), ([4], (4,)), ([5, 8, 5], (4, 5, 8))]
)
def test_every_listed_end_token_ends_an_answer_once(
    tokenizer: PreTrainedTokenizerFast, configured: int | list[int] | None, expected: tuple[int, ...]
) -> None:
    assert end_token_ids(tokenizer, GenerationConfig(eos_token_id=configured)) == expected
    assert end_token_ids(tokenizer) == (4,)


def test_a_model_without_any_end_token_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.eos_token = None
    assert end_token_ids(tokenizer, GenerationConfig(eos_token_id=5)) == (5,)
    with pytest.raises(TaskError, match="org/model names no end token"):
        end_token_ids(tokenizer, GenerationConfig())
